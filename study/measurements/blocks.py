"""Quantization block by block, at the last checkpoint of each run."""

from collections.abc import Mapping
from pathlib import Path

from study.measurements.kind import Kind, Subject
from study.measurements.quantization import (
    TEXTS,
    QuantizationSettings,
    calibrated,
    computed,
    launched,
)
from study.paths import result
from study.pipeline.step import Step


def _steps(
    settings: QuantizationSettings, subject: Subject, _: Mapping[str, list[Step]]
) -> list[Step]:
    specs = settings.by_block
    results = tuple(result(subject.run, subject.model, "blocks", spec) for spec in specs)
    command = (
        *launched(specs),
        subject.hf,
        *(word for spec in specs for word in ("--spec", spec)),
        *calibrated(settings, subject),
        *computed(settings, settings.block_tokens),
        *("--per-block", "--dense"),
        *(word for path in results for word in ("--out", f"{{study}}/{Path(path).parent}")),
    )
    seconds = 5.0 + 6.0 * len(specs)
    name = f"blocks-{subject.run}"
    return [subject.step("blocks", name, command, results, uses=TEXTS, expected_seconds=seconds)]


BLOCKS = Kind[QuantizationSettings]("blocks", "last", _steps, shares_work=True)
