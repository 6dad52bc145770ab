"""The rows of metrics.jsonl as the points that MLflow keeps: a metric, its place, a value, a time.

Places are training tokens.
"""

import hashlib
import json
import math
from typing import Any, NamedTuple

from base.errors import UserError
from train.run.directory import RunDirectory
from train.run.metrics import ROW_KEYS, TRAINED, surviving_rows

HELD_OUT_LOSS = "held_out_loss"  # with the name of an average after it: of that average
Row = dict[str, Any]


class Point(NamedTuple):
    """One value of one metric."""

    name: str
    at: int  # MLflow's step: tokens, or steps
    value: float
    # since the epoch, from the files: the same row makes the same point whenever it is read
    milliseconds: int


class Stream(NamedTuple):
    """Rows that are only added to, unless a resumed run replaced some, and the points of each."""

    rows: list[Row]
    points: list[list[Point]]


class Prefix:
    """The number of first rows of a stream, and a hash of them."""

    def __init__(self, rows: list[Row]) -> None:
        self._count, self._hash = 0, hashlib.sha256()
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Take in the next row."""
        self._count += 1
        self._hash.update(json.dumps(row).encode())

    def __str__(self) -> str:
        return f"{self._count} {self._hash.hexdigest()}"


def metric_name(key: str) -> str:
    """Return the name of a figure of metrics.jsonl in MLflow; that of an average comes first.

    >>> [metric_name(key) for key in ("held_out_loss", "held_out_loss/lawa5x500", "grad_norm")]
    ['held_out_loss', 'lawa5x500/held_out_loss', 'train/grad_norm']
    """
    if key.startswith(f"{HELD_OUT_LOSS}/"):
        return f"{key.removeprefix(f'{HELD_OUT_LOSS}/')}/{HELD_OUT_LOSS}"
    return key if key in ("learning_rate", HELD_OUT_LOSS) else f"train/{key}"


def _current(rows: list[Row]) -> list[Row]:
    """The rows that no later attempt will write again.

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


def stream_of(directory: RunDirectory) -> Stream:
    """Return the training metrics of a run that no later attempt will write again."""
    rows = _current(surviving_rows(directory.metrics))
    points = [
        check_finite(
            [
                Point(metric_name(key), row["tokens"], float(row[key]), int(row["time"] * 1000))
                for key in sorted(row.keys() - ROW_KEYS)
            ]
        )
        for row in rows
    ]
    return Stream(rows, points)


def check_finite(points: list[Point]) -> list[Point]:
    """Return the points; UserError for one that MLflow would keep as another number."""
    for point in points:
        if not math.isfinite(point.value):
            raise UserError(f"{point.name} is {point.value} at {point.at}; measure it again")
    return points
