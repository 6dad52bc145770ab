"""The loss along directions by forward passes alone: curvature and critical sharpness.

The directions are the move from the checkpoint before, at every checkpoint that has one, and at the
last one the quantization steps of `quantization.by_block`, whose weights are there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.hf.measured import Critical
from curvature.settings import CriticalSettings, LineSettings
from study.measurements.kind import (
    CURVED,
    NATS,
    Column,
    Kind,
    Reading,
    Subject,
    TabledResult,
    alone,
    estimated,
    options,
)
from study.measurements.step import Along, quantized
from study.paths import curvature_result, hf_directory
from study.step import Step

MOVE = "move"  # the direction from the checkpoint before; others are step-SPEC


class LineColumns(NamedTuple):
    """The columns of one direction."""

    curvature: Column
    slope: Column
    sharpness: Column
    multiple: Column
    not_above: Column
    above: Column
    norm: Column


def _columns(direction: str) -> LineColumns:
    def column(figure: str, title: str, unit: str = "") -> Column:
        return Column(f"curvature/{direction}/{figure}", title, unit)

    return LineColumns(
        column("curvature", "curvature along d, d'Hd / |d|^2", CURVED),
        column("slope", "slope, g.d", f"{NATS} / d"),
        column("critical_sharpness", "2 / |critical multiple|", "1 / d"),
        column("critical_multiple", "where the loss is that of the model again", "d"),
        column("critical_not_above", "a multiple on that side without a higher loss", "d"),
        column("critical_above", "a multiple on that side with a higher loss", "d"),
        column("norm", "|d|"),
    )


OF_MOVE, OF_STEP = _columns(MOVE), _columns("step-{spec}")
NOISE = Column("curvature/critical_noise", "change of the loss by rounding", NATS)
PASSES = Column("curvature/critical_passes", "forward passes of all directions", type="count")
COLUMNS = (*OF_MOVE, *OF_STEP, NOISE, PASSES)


def _steps(
    along: Along[LineSettings], subject: Subject, steps_by_kind: Mapping[str, list[Step]]
) -> list[Step]:
    before = subject.before
    assert before, "the kind measures models with a checkpoint before"
    result = curvature_result(subject.run, subject.model, "critical")
    # Of the last checkpoint the step block by block has left the quantized weights.
    hf = hf_directory(subject.run, subject.model)
    blocks = [
        step for step in steps_by_kind.get("blocks", []) if hf in Path(step.outputs[0]).parents
    ]
    steps_to = [word for step in blocks for word in quantized(step.outputs)]
    chosen = options(CriticalSettings, along.settings, device="{device}")
    return [
        subject.step(
            "critical",
            f"critical-{subject.run}-{subject.name}",
            ("{launch}", "-m", "curvature", "critical"),
            (result,),
            uses=("held_out",),
            after=(before.making, *blocks),
            models=(subject.hf, "--previous", before.hf),
            tail=(*steps_to, "--data", subject.texts["held_out"].prefix, *chosen),
            expected_seconds=1.0,
        )
    ]


def _readings(columns: LineColumns, direction: str, spec: str = "") -> list[Reading]:
    keys = ("directions", direction)
    curvature, slope, sharpness, multiple, not_above, above, norm = columns
    critical = (*keys, "critical")
    return [
        *estimated(curvature, curvature.of(spec), *keys, "curvature"),
        *estimated(slope, slope.of(spec), *keys, "slope"),
        *estimated(sharpness, sharpness.of(spec), *critical, "sharpness"),
        alone(multiple, multiple.of(spec), *critical, "multiple", "mean"),
        alone(not_above, not_above.of(spec), *critical, "not_above"),
        alone(above, above.of(spec), *critical, "above"),
        alone(norm, norm.of(spec), *keys, "norm"),
    ]


def _tabled(along: Along[LineSettings]) -> list[TabledResult]:
    readings = _readings(OF_MOVE, MOVE)
    for spec in along.specs:
        readings += _readings(OF_STEP, f"step-{spec}", spec)
    readings += [
        alone(NOISE, NOISE.name, "noise"),
        alone(PASSES, PASSES.name, "forward_passes"),
    ]
    return [TabledResult("curvature", "critical", Critical, readings)]


CRITICAL = Kind[Along[LineSettings]]("critical", "moved", _steps, _tabled, shares_work=True)
