"""Curvature along the quantization steps of a last checkpoint: the second-order prediction.

Also the loss on the plane through a run's last two checkpoints and the quantized last one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.hf.measured import Step as MeasuredStep
from study.measurements.curvature import CurvatureSettings, product_options
from study.measurements.kind import Kind, Result, Subject, estimated
from study.paths import curvature_result
from study.pipeline.step import Step

FIGURES = (
    *("first_order", "second_order", "predicted", "measured", "remainder"),
    "relative_difference",
)
RATIOS = ("step_to_mean", "step_to_signed")  # of nothing there is none


class Along(NamedTuple):
    """The quantization steps that curvature is measured along, by spec."""

    specs: tuple[str, ...]
    curvature: CurvatureSettings


def _command(subject: Subject, measurement: str) -> tuple[str, ...]:
    text = ("--data", subject.texts["held_out"].prefix, "--device", "{device}")
    return ("{launch}", "-m", "curvature", measurement, subject.hf, *text)


def _steps(along: Along, subject: Subject, steps_by_kind: Mapping[str, list[Step]]) -> list[Step]:
    settings, (blocks,) = along.curvature, steps_by_kind["blocks"]
    command = (
        *_command(subject, "step"),
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
            tuple(
                curvature_result(subject.run, subject.model, f"step-{spec}") for spec in along.specs
            ),
            uses=("held_out",),
            after=(blocks,),
            expected_seconds=5.0 + 3.0 * len(along.specs),
        )
    ]


def _tabled(along: Along) -> list[Result]:
    results = []
    for spec in along.specs:
        name = f"curvature/step-{spec}"
        columns = [
            *(
                column
                for figure in FIGURES
                for column in estimated(f"{name}/{figure}", "whole", figure)
            ),
            *(
                column
                for ratio in RATIOS
                for column in estimated(f"{name}/{ratio}", "whole", "ratios", ratio)
            ),
        ]
        results.append(Result("curvature", f"step-{spec}", MeasuredStep, columns))
    return results


def _slice_steps(
    along: Along, subject: Subject, steps_by_kind: Mapping[str, list[Step]]
) -> list[Step]:
    settings, (blocks,), before = along.curvature, steps_by_kind["blocks"], subject.before
    assert before, "a study with steps saves two checkpoints of each run"
    command = (
        *_command(subject, "slice"),
        *("--previous", before.hf),
        *("--quantized", f"{{study}}/{Path(blocks.outputs[0]).parent}"),
        *("--grid", str(settings.slice_grid), "--sequences", str(settings.slice_sequences)),
    )
    return [
        subject.step(
            "slice",
            f"slice-{subject.run}",
            command,
            (curvature_result(subject.run, subject.model, f"slice-{along.specs[0]}"),),
            uses=("held_out",),
            after=(before.making, blocks),
            expected_seconds=10.0,
        )
    ]


STEP = Kind[Along]("step", "last", _steps, _tabled, shares_model=True)
SLICE = Kind[Along]("slice", "last", _slice_steps)
