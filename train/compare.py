"""Where two runs part: which settings differ, and the first steps and sizes by which their figures do."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.command import UserError
from train.config import RunConfig, load_run
from train.run_directory import RunDirectory
from train.tracking import read_metrics

THRESHOLDS = (1e-6, 1e-4, 1e-2)
ABSOLUTE = {"loss": "nats per token", "held_out_loss": "nats per token"}
RELATIVE = ("grad_norm", "learning_rate")  # |a - b| / max(|a|, |b|): their sizes say nothing by themselves


class Departure(NamedTuple):
    """A step and by how much the two runs differ there."""

    step: int
    difference: float


class Series(NamedTuple):
    """One figure of two runs over the steps at which both logged it; differences are never negative."""

    name: str
    unit: str
    steps: int  # at which both logged it
    first: Departure | None  # the first that is not exactly equal
    beyond: dict[float, Departure | None]  # by threshold: the first above it
    largest: Departure | None


class Comparison(NamedTuple):
    """What `python -m train compare` prints."""

    settings: list[tuple[str, str, str]]  # key path and its JSON value in A and in B
    common_steps: int
    only_a: list[int]
    only_b: list[int]
    series: list[Series]

    def exceeds(self, tolerance: float) -> bool:
        """Whether any figure differs by more than `tolerance`."""
        return any(series.largest is not None and series.largest.difference > tolerance for series in self.series)


def compare_runs(run_a: Path, run_b: Path, tolerance: float | None = None) -> Comparison:
    """Compares two run directories step by step, whatever engines trained them.

    Args:
        run_a: a run directory with run.json and metrics.jsonl.
        run_b: the other one; of a branch and its parent the steps that both trained are compared.
        tolerance: a threshold beside 1e-6, 1e-4 and 1e-2; losses in nats per token, the other figures relative.

    Raises:
        UserError: a file is missing or damaged, the tolerance is negative, or no step is in both runs.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UserError(f"--tolerance {tolerance:g} is no distance; give a number from 0 on")
    configs = [load_run(path / "run.json") for path in (run_a, run_b)]
    rows_a, rows_b = _rows(run_a), _rows(run_b)
    common = sorted(rows_a.keys() & rows_b.keys())
    if not common:
        raise UserError(f"{run_a} and {run_b} have no step in common; compare runs that trained the same steps")
    thresholds = sorted({*THRESHOLDS, *([] if tolerance is None else [tolerance])})
    series = []
    for name in (*ABSOLUTE, *RELATIVE):
        steps = [step for step in common if name in rows_a[step] and name in rows_b[step]]
        series.append(
            _compare_series(name, [(step, rows_a[step][name], rows_b[step][name]) for step in steps], thresholds)
        )
    settings = _differing_settings(*configs)
    return Comparison(settings, len(common), sorted(rows_a.keys() - common), sorted(rows_b.keys() - common), series)


def _rows(run_dir: Path) -> dict[int, dict[str, float]]:
    """The compared figures of a run by step; UserError where there are none or one of them is no finite number."""
    path = RunDirectory(run_dir).metrics
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path} holds no metrics; train {run_dir} first")
    figures: dict[int, dict[str, float]] = {}
    for row in rows:
        if not isinstance(row["step"], int):
            raise UserError(f"{path}: step {row['step']!r:.40} is no whole number; remove that line")
        figures[row["step"]] = {name: row[name] for name in (*ABSOLUTE, *RELATIVE) if name in row}
        for name, value in figures[row["step"]].items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(
                    f"{path}: {name} of step {row['step']} is {value!r:.40}, no finite number; remove that line"
                )
    return figures


def _compare_series(name: str, pairs: list[tuple[int, float, float]], thresholds: list[float]) -> Series:
    first: Departure | None = None
    largest: Departure | None = None
    beyond: dict[float, Departure | None] = dict.fromkeys(thresholds)
    for step, a, b in pairs:
        if a == b:
            continue
        found = Departure(step, abs(a - b) / (1.0 if name in ABSOLUTE else max(abs(a), abs(b))))
        first = first or found
        if largest is None or found.difference > largest.difference:
            largest = found
        for threshold, known in beyond.items():
            if known is None and found.difference > threshold:
                beyond[threshold] = found
    return Series(name, ABSOLUTE.get(name, "relative"), len(pairs), first, beyond, largest)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every value of nested objects as JSON text, by its key path; lists are values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, json.dumps(value)


def _differing_settings(config_a: RunConfig, config_b: RunConfig) -> list[tuple[str, str, str]]:
    """Key path and both values of every setting that differs, the fingerprints left out."""
    absent = "-"  # a key of a part that the other run does not have, such as an anneal
    leaves_a, leaves_b = (dict(_leaves(config.model_dump(mode="json"))) for config in (config_a, config_b))
    paths = [*leaves_a, *(path for path in leaves_b if path not in leaves_a)]
    found = [(path, leaves_a.get(path, absent), leaves_b.get(path, absent)) for path in paths]
    return [(path, a, b) for path, a, b in found if a != b]


def describe(comparison: Comparison) -> str:
    """The comparison as aligned lines of text."""
    lines = ["settings that differ:" if comparison.settings else "the same settings"]
    width = max((len(path) for path, _, _ in comparison.settings), default=0)
    lines += [f"  {path:{width}}  {a}  |  {b}" for path, a, b in comparison.settings]
    lines.append(
        f"{comparison.common_steps:,} steps in both{_only('A', comparison.only_a)}{_only('B', comparison.only_b)}"
    )
    for series in comparison.series:
        lines += ["", *_describe_series(series)]
    return "\n".join(lines)


def _only(run: str, steps: list[int]) -> str:
    return f", {len(steps):,} only in {run} (from {steps[0]:,} to {steps[-1]:,})" if steps else ""


def _describe_series(series: Series) -> list[str]:
    if not series.steps:
        return [f"{series.name}: at no step in both"]
    if series.first is None:
        return [f"{series.name}: identical over {series.steps:,} steps"]
    rows: dict[str, Departure | None] = {"first difference": series.first}
    rows |= {f"first beyond {threshold:g}": found for threshold, found in series.beyond.items()}
    rows |= {"largest": series.largest}
    return [
        f"{series.name} ({series.unit}), {series.steps:,} steps",
        *(
            f"  {label:18}  " + (f"step {found.step:<9,} {found.difference:.3e}" if found else "never")
            for label, found in rows.items()
        ),
    ]
