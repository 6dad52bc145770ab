"""The rows of metrics.jsonl and of the table as the metrics that MLflow keeps.

A metric's step is the number of training tokens. Its time is that of the files, so the same row
makes the same metric whenever it is read.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.errors import UserError
from study.measurements.curvature import TOP, TRACE
from study.results.table import Row
from train.run.metrics import HELD_OUT_LOSS, ROW_KEYS, TRAINED, surviving_rows

if TYPE_CHECKING:
    from mlflow.entities import Metric

FINAL = "final"  # the most telling measurements of the end of a run, for MLflow's own pages
KINDS = ("quant", "curvature", "tasks")  # the first part of the name of a measurement's column
HEADLINES = (HELD_OUT_LOSS, TRACE, TOP)
SPEC_HEADLINES = ("kl_divergence", "relative_error")


@dataclass(frozen=True)
class Stream:
    """Rows that are only added to, unless a resumed run replaced some, and the metrics of each."""

    rows: list[dict[str, Any]]
    metrics: list[list["Metric"]]

    @cached_property
    def tags(self) -> list[str]:
        """The number of first rows and their hash, for every such number."""
        digest = hashlib.sha256()
        tags = [f"0 {digest.hexdigest()}"]
        for count, row in enumerate(self.rows, 1):
            digest.update(json.dumps(row).encode())
            tags.append(f"{count} {digest.hexdigest()}")
        return tags


def metric_name(key: str) -> str:
    """Return the name of a figure of metrics.jsonl in MLflow; that of an average comes first.

    >>> [metric_name(key) for key in ("held_out_loss", "held_out_loss.code/ema0.9x1", "grad_norm")]
    ['held_out_loss', 'ema0.9x1/held_out_loss.code', 'train/grad_norm']
    """
    if key.startswith(HELD_OUT_LOSS):
        loss, _, average = key.partition("/")
        return f"{average}/{loss}" if average else loss
    return key if key == "learning_rate" else f"train/{key}"


def _current(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that no later attempt will write again.

    An attempt that resumes from a checkpoint writes every later step again, one by one. The rows of
    these steps by earlier attempts go when it has begun, not step by step: the run is made anew
    once, and only added to from then on.
    """
    starts: dict[int, int] = {}  # by attempt: the first step that it trained
    for row in rows:
        if TRAINED in row:
            starts[row["attempt"]] = min(row["step"], starts.get(row["attempt"], row["step"]))
    bounds = {
        attempt: min((step for later, step in starts.items() if later > attempt), default=math.inf)
        for attempt in {row["attempt"] for row in rows}
    }
    return [row for row in rows if row["step"] < bounds[row["attempt"]]]


def metrics_stream(path: Path) -> Stream:
    """Return the training metrics of a run that no later attempt will write again."""
    rows = _current(surviving_rows(path))
    metrics = [
        [
            _metric(metric_name(key), row[key], row["tokens"], _milliseconds(row))
            for key in sorted(row.keys() - ROW_KEYS)
        ]
        for row in rows
    ]
    return Stream(rows, metrics)


def table_stream(rows: Sequence[Row], training: Stream, last_step: int | None) -> Stream:
    """Return one run's rows of the table, at the times when training reached their tokens.

    Measurements keep the names of their columns (`quant/gptq-b3-g128/kl_divergence`, of an average
    `lawa5x500/quant/...`). What was not measured has no metric. Where a row does not know its
    tokens, steps take their place, and 0 that of a step which no source states.
    """
    times = {row["tokens"]: _milliseconds(row) for row in training.rows}
    axis = "step" if any(row["tokens"] is None for row in rows) else "tokens"
    metrics = []
    for row in rows:
        at, own = row[axis] or 0, {}
        prefix = f"{row['average']}/" if row["average"] else ""
        is_last = row["step"] == last_step and row["average"] is None
        for column, value in row.items():
            if value is None:
                continue
            kind, _, short = column.partition("/")
            if kind in KINDS:
                own[prefix + column] = value
            of_spec = kind == "quant" and column.rpartition("/")[2] in SPEC_HEADLINES
            if is_last and (of_spec or column in HEADLINES):
                own[f"{FINAL}/{short or column}"] = value
        time = times.get(at, 0)
        metrics.append([_metric(name, value, at, time) for name, value in own.items()])
    return Stream(list(map(dict, rows)), metrics)


def _milliseconds(row: dict[str, Any]) -> int:
    return int(row["time"] * 1000)


def _metric(name: str, value: float, at: int, milliseconds: int) -> "Metric":
    """Return a metric; UserError for a value that MLflow would keep as another number."""
    from mlflow.entities import Metric

    if not math.isfinite(value):
        raise UserError(f"{name} is {value} at {at}; measure it again")
    return Metric(name, float(value), milliseconds, at)
