"""The rows of metrics.jsonl and of the table as the metrics that MLflow keeps.

A metric's step is the number of training tokens. Its time is that of the files, so the same row
makes the same metric whenever it is read.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.quantities import MILLI
from study.measurements.curvature import TOP, TRACE
from study.measurements.kind import NATS, SHARE
from study.measurements.quantization import DIVERGENCE, LOSS_INCREASE, RELATIVE_ERROR
from study.measurements.tasks import ACCURACY, QUANTIZED
from study.results.table import Row
from train.run.metrics import HELD_OUT_LOSS, ROW_KEYS, TRAINED, surviving_rows

if TYPE_CHECKING:
    from mlflow.entities import Metric

# The measurements that MLflow has; the table, an artifact, has all. Its names take no comma,
# bracket or power, and what is before the last slash is the heading of a section of charts.
OF_SPEC = {
    (column.name.partition("/")[0], column.figure): column
    for column in (DIVERGENCE, RELATIVE_ERROR, LOSS_INCREASE, ACCURACY, QUANTIZED)
}
CURVATURE = {
    TRACE.name: "Hessian/trace",
    TOP.name: "Hessian/largest eigenvalue",
}
UNITS = {NATS: ("1e-3 nats per token", MILLI), SHARE: ("percent", 100.0)}


@dataclass(frozen=True)
class MetricStream:
    """Rows that are only added to, unless a resumed run replaced some, and the metrics of each.

    MLflow keeps NaN and infinity as other numbers. They are no metrics: `not_finite` says how many
    there are, and where the first is.
    """

    rows: list[dict[str, Any]]
    metrics: list[list["Metric"]]
    not_finite: str = ""

    @cached_property
    def tags(self) -> list[str]:
        """The number of first rows and their hash, for every such number."""
        digest = hashlib.sha256()
        tags = [f"0 {digest.hexdigest()}"]
        for count, row in enumerate(self.rows, 1):
            # One running hash gives that of every beginning of the stream.
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


def measured_metric(column: str) -> tuple[str, float] | None:
    """Return the name in MLflow of a column of the table and what its values are multiplied by.

    None for a column that MLflow does not have.

    >>> measured_metric(DIVERGENCE.of("gptq-b3-g32"))
    ('KL divergence 1e-3 nats per token/gptq-b3-g32', 1000.0)
    >>> measured_metric(f"{DIVERGENCE.of('gptq-b3-g32')}_low")
    """
    if column in CURVATURE:
        return CURVATURE[column], 1.0
    kind, _, measured = column.partition("/")
    measured, _, figure = measured.rpartition("/")
    known = OF_SPEC.get((kind, figure))
    if known is None:
        return None
    unit, scale = UNITS[known.unit]
    return f"{known.title} {unit}/{measured.replace('/', ' ')}", scale


def _current(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that no later attempt will write again.

    An attempt that resumes from a checkpoint writes every later step again, one by one. The rows of
    these steps by earlier attempts go when it has begun, not step by step: the run is made anew
    once, and only added to from then on.
    """
    starts: dict[int, int] = {}  # by attempt: the first step that it trained
    for row in rows:
        # Rows of evaluation alone do not say where an attempt began to train.
        if TRAINED in row:
            starts[row["attempt"]] = min(row["step"], starts.get(row["attempt"], row["step"]))
    bounds = {
        # What an attempt wrote counts up to where the earliest later one began anew.
        attempt: min((step for later, step in starts.items() if later > attempt), default=math.inf)
        for attempt in {row["attempt"] for row in rows}
    }
    return [row for row in rows if row["step"] < bounds[row["attempt"]]]


def metrics_stream(path: Path) -> MetricStream:
    """Return the training metrics of a run that no later attempt will write again."""
    rows = _current(surviving_rows(path))
    figures = [
        {metric_name(key): row[key] for key in sorted(row.keys() - ROW_KEYS)} for row in rows
    ]
    metrics = [
        _metrics(of_row, row["tokens"], _milliseconds(row))
        for row, of_row in zip(rows, figures, strict=True)
    ]
    lacking = _not_finite(figures, lambda at: f"line {_line_of(path, rows[at])} of {path.name}")
    return MetricStream(rows, metrics, lacking)


def _line_of(path: Path, row: dict[str, Any]) -> int:
    """Return the number, from 1, of the line of a file that a row was read from."""
    keys = ROW_KEYS & row.keys()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        content = json.loads(line)
        if all(content.get(key) == row[key] for key in keys):
            return number
    raise AssertionError(f"{path} has no row of step {row['step']}")


def table_stream(rows: Sequence[Row], training: MetricStream) -> MetricStream:
    """Return one run's rows of the table, at the times when training reached their tokens.

    Measurements are named by `measured_metric`, of an average `lawa5x500/...`. What was not
    measured has no metric. Where a row does not know its tokens, steps take their place, and 0 that
    of a step which no source states.
    """
    # Times of training, not of measuring: measuring again makes the same metrics.
    times = {row["tokens"]: _milliseconds(row) for row in training.rows}
    axis = "step" if any(row["tokens"] is None for row in rows) else "tokens"
    metrics, figures = [], []
    for row in rows:
        at, of_row = row[axis] or 0, {}
        prefix = f"{row['average']}/" if row["average"] else ""
        for column, value in row.items():
            if value is not None and (metric := measured_metric(column)):
                name, scale = metric
                of_row[prefix + name] = scale * value
        metrics.append(_metrics(of_row, at, times.get(at, 0)))
        figures.append(of_row)
    lacking = _not_finite(figures, lambda at: f"the table's row of step {rows[at]['step']}")
    return MetricStream(list(map(dict, rows)), metrics, lacking)


def _milliseconds(row: dict[str, Any]) -> int:
    return int(row["time"] * 1000)


def _metrics(figures: dict[str, float], at: int, milliseconds: int) -> list["Metric"]:
    """Return the figures as metrics, those that MLflow would keep as another number left out."""
    from mlflow.entities import Metric

    return [
        Metric(name, float(value), milliseconds, at)
        for name, value in figures.items()
        if math.isfinite(value)
    ]


def _not_finite(figures: Sequence[dict[str, float]], where: Callable[[int], str]) -> str:
    """Return how many figures are not finite, and which is the first, in words."""
    lacking = [
        (index, name, value)
        for index, of_row in enumerate(figures)
        for name, value in of_row.items()
        if not math.isfinite(value)
    ]
    if not lacking:
        return ""
    index, name, value = lacking[0]
    return f"{len(lacking)} not finite, left out; the first: {name} is {value} in {where(index)}"
