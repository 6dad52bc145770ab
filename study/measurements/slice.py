"""The loss on the plane through a run's last two checkpoints and the quantized last one."""

from collections.abc import Mapping
from pathlib import Path

from study.measurements.kind import Kind, Subject
from study.measurements.step import Along, text_options
from study.paths import curvature_result
from study.pipeline.step import Step


def _steps(along: Along, subject: Subject, made: Mapping[str, list[Step]]) -> list[Step]:
    settings, (blocks,), before = along.curvature, made["blocks"], subject.before
    assert before, "a study with steps saves two checkpoints of each run"
    command = (
        *("{launch}", "-m", "curvature", "slice", subject.hf),
        *text_options(subject),
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


SLICE = Kind[Along]("slice", "last", _steps)
