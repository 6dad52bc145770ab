"""Curvature along the quantization steps of a last checkpoint: the second-order prediction.

Also the loss on the plane through a run's last two checkpoints and the quantized last one.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.hf.measured import MeasuredStep
from curvature.settings import PlaneSettings, PredictionSettings, SliceSettings, StepSettings
from study.measurements.curvature import product_options
from study.measurements.kind import NATS, Column, Kind, Subject, TabledResult, estimated, options
from study.paths import curvature_result
from study.step import Step

TERMS = (  # of the loss increase
    Column("curvature/step-{spec}/first_order", "g.delta", NATS),
    Column("curvature/step-{spec}/second_order", "delta'H delta / 2", NATS),
    Column("curvature/step-{spec}/predicted", "their sum", NATS),
    Column("curvature/step-{spec}/measured", "measured increase", NATS),
    Column("curvature/step-{spec}/remainder", "remainder", NATS),
)
DIFFERENCE = Column("curvature/step-{spec}/relative_difference", "predicted / measured - 1")
RATIOS = (  # of curvatures; of nothing there is none
    Column("curvature/step-{spec}/step_to_mean", "step / mean"),
    Column("curvature/step-{spec}/step_to_signed", "step / random signs"),
)
COLUMNS = (*TERMS, DIFFERENCE, *RATIOS)


# Names of the models of a slice: the last checkpoint, the one before, and the quantized last one.
SLICE_POINTS = ("base", "previous", "quantized")


class Along[Settings](NamedTuple):
    """The quantization steps that a measurement is along, by spec, and its settings."""

    specs: tuple[str, ...]
    settings: Settings


def _command(subject: Subject, measurement: str, options: Iterable[str]) -> tuple[str, ...]:
    return ("{launch}", "-m", "curvature", measurement, subject.hf, *options)


def quantized(outputs: Iterable[str]) -> Iterator[str]:
    """Yield the options that name the quantized weights beside these results."""
    for output in outputs:
        yield from ("--quantized", f"{{study}}/{Path(output).parent}")


def _steps(
    along: Along[PredictionSettings], subject: Subject, steps_by_kind: Mapping[str, list[Step]]
) -> list[Step]:
    # There is one for each run, and it left the quantized weights that the step goes to.
    (blocks,) = steps_by_kind["blocks"]
    chosen = product_options(StepSettings, along.settings, subject)
    command = _command(subject, "step", (*chosen, *quantized(blocks.outputs)))
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
            expected_seconds=1.5 + 2.0 * len(along.specs),
        )
    ]


def _tabled(along: Along[PredictionSettings]) -> list[TabledResult]:
    results = []
    for spec in along.specs:
        readings = []
        for figure in (*TERMS, DIFFERENCE):
            readings += estimated(figure, figure.of(spec), "whole", figure.figure)
        for ratio in RATIOS:
            readings += estimated(ratio, ratio.of(spec), "whole", "ratios", ratio.figure)
        results.append(TabledResult("curvature", f"step-{spec}", MeasuredStep, readings))
    return results


def _slice_steps(
    along: Along[PlaneSettings], subject: Subject, steps_by_kind: Mapping[str, list[Step]]
) -> list[Step]:
    # The plane goes through both checkpoints and the quantized one, so it reads all three.
    (blocks,), before = steps_by_kind["blocks"], subject.before
    assert before, "a study with steps saves two checkpoints of each run"
    quantized = f"{{study}}/{Path(blocks.outputs[0]).parent}"
    result = curvature_result(subject.run, subject.model, f"slice-{along.specs[0]}")
    names = (word for name in SLICE_POINTS for word in ("--name", name))
    text = ("--data", subject.texts["held_out"].prefix, "--out", f"{{study}}/{Path(result).parent}")
    chosen = options(SliceSettings, along.settings, device="{device}")
    command = _command(subject, "slice", (before.hf, quantized, *names, *text, *chosen))
    return [
        subject.step(
            "slice",
            f"slice-{subject.run}",
            command,
            (result,),
            uses=("held_out",),
            after=(before.making, blocks),
            expected_seconds=2.0,
        )
    ]


STEP = Kind[Along[PredictionSettings]]("step", "last", _steps, _tabled, shares_model=True)
SLICE = Kind[Along[PlaneSettings]]("slice", "last", _slice_steps, shares_work=True)
