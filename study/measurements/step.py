"""Curvature along the quantization steps of a last checkpoint: the second-order prediction."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.hf.measured import Step as MeasuredStep
from ckpt_tools.hf.measured import StepPart
from ckpt_tools.hf.results import read_result
from study.measurements.curvature import CurvatureSettings, product_options
from study.measurements.kind import (
    ESTIMATE,
    Kind,
    Reader,
    Subject,
    Type,
    Values,
    estimate_values,
)
from study.paths import MeasuredModel, curvature_result
from study.pipeline.step import Step

FIGURES = (
    *("first_order", "second_order", "predicted", "measured", "remainder"),
    "relative_difference",
)
RATIOS = ("step_to_mean", "step_to_signed")


class Along(NamedTuple):
    """The quantization steps that curvature is measured along, by spec."""

    specs: tuple[str, ...]
    curvature: CurvatureSettings


def _result(run: str, model: MeasuredModel, spec: str) -> str:
    return curvature_result(run, model, f"step-{spec}")


def text_options(subject: Subject) -> tuple[str, ...]:
    """Return the text that steps and slices are measured on."""
    return ("--data", subject.texts["held_out"].prefix, "--device", "{device}")


def _steps(along: Along, subject: Subject, made: Mapping[str, list[Step]]) -> list[Step]:
    settings, (blocks,) = along.curvature, made["blocks"]
    command = (
        *("{launch}", "-m", "curvature", "step", subject.hf),
        *text_options(subject),
        *product_options(settings),
        *("--microbatches", str(settings.step_microbatches)),
        *(
            word
            for result in blocks.outputs
            for word in ("--quantized", f"{{study}}/{Path(result).parent}")
        ),
    )
    return [
        subject.step(
            "step",
            f"step-{subject.run}",
            command,
            tuple(_result(subject.run, subject.model, spec) for spec in along.specs),
            uses=("held_out",),
            after=(blocks,),
            expected_seconds=5.0 + 3.0 * len(along.specs),
        )
    ]


def _columns(along: Along) -> dict[str, Type]:
    return {
        f"curvature/step-{spec}/{figure}{suffix}": "number"
        for spec in along.specs
        for figure in (*FIGURES, *RATIOS)
        for suffix in ESTIMATE
    }


def _values(path: Path, spec: str) -> Values:
    whole = read_result(path, MeasuredStep).measured.whole or StepPart()
    values = Values()
    for figure in FIGURES:
        values |= estimate_values(f"curvature/step-{spec}/{figure}", getattr(whole, figure))
    for ratio in RATIOS:  # of nothing there is none
        values |= estimate_values(f"curvature/step-{spec}/{ratio}", whole.ratios.get(ratio))
    return values


def _results(along: Along, run: str, model: MeasuredModel) -> dict[str, Reader]:
    return {_result(run, model, spec): partial(_values, spec=spec) for spec in along.specs}


STEP = Kind[Along]("step", "last", _steps, _results, _columns, shares_model=True)
