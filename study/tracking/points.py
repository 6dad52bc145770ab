"""What the files of a run hold, as the points that MLflow keeps: a metric, its place on the axis, a value, a time.

The axis of a run counts training tokens; steps, where a released model's tokens are not known. Only system metrics
count samples, as MLflow's own do.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from train.command import UserError
from train.run_directory import RunDirectory
from train.tracking import ROW_KEYS, TRAINED, attempts, surviving_rows

HELD_OUT_LOSS = "held_out_loss"  # with the name of an average behind it: of that average
SYSTEM = "system"  # MLflow shows what begins so on a page of its own
SAMPLE_KEYS = {"time", "host"}
Row = dict[str, Any]


class Point(NamedTuple):
    """One value of one metric."""

    name: str
    at: int  # MLflow's step: tokens, or steps or samples
    value: float
    milliseconds: int  # since the epoch, from the files: the same row makes the same point whenever it is read


class Stream(NamedTuple):
    """A file whose rows are only added to, unless a resumed run replaced some, and the points of each row."""

    name: str
    rows: list[Row]
    points: list[list[Point]]


class Prefix:
    """The first rows of a stream: how many they are, and a hash of them."""

    def __init__(self, rows: list[Row]) -> None:
        self._count, self._hash = 0, hashlib.sha256()
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Takes in the next row."""
        self._count += 1
        self._hash.update(json.dumps(row).encode())

    def __str__(self) -> str:
        return f"{self._count} {self._hash.hexdigest()}"


def metric_name(key: str) -> str:
    """Name of a figure of metrics.jsonl in MLflow; the name of an average comes first.

    >>> [metric_name(key) for key in ("held_out_loss", "held_out_loss/lawa5x500", "grad_norm")]
    ['held_out_loss', 'lawa5x500/held_out_loss', 'train/grad_norm']
    """
    if key.startswith(f"{HELD_OUT_LOSS}/"):
        return f"{key.removeprefix(f'{HELD_OUT_LOSS}/')}/{HELD_OUT_LOSS}"
    return key if key in ("learning_rate", HELD_OUT_LOSS) else f"train/{key}"


def _current(rows: list[Row]) -> list[Row]:
    """The rows that no later attempt will write again.

    An attempt that goes on from a checkpoint writes every step behind it again, one by one. What earlier attempts wrote
    of these steps goes when it has begun, not step by step: the run is made anew once, and only added to from then on.
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


def _metrics_stream(directory: RunDirectory) -> Stream:
    rows = _current(surviving_rows(directory.metrics))
    points = [
        [
            Point(metric_name(key), row["tokens"], float(row[key]), int(row["time"] * 1000))
            for key in sorted(row.keys() - ROW_KEYS)
        ]
        for row in rows
    ]
    return Stream("metrics", rows, points)


def _complete_lines(path: Path) -> list[Row]:
    """JSON lines of a file that is being written to: a torn last line is left for the next time."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except json.JSONDecodeError:
        raise UserError(f"{path} holds a line that is not JSON; remove that line") from None


def _ranks_stream(directory: RunDirectory, metrics: Stream) -> Stream:
    """How long steps took on each node: of a report on all ranks, the slowest rank of the node.

    A report belongs to the step whose row of metrics.jsonl says tokens and time; one that lacks ranks is being written.
    """
    at = {row["step"]: row for row in metrics.rows if TRAINED in row}
    reports: dict[tuple[int, int], list[Row]] = {}
    for line in _complete_lines(directory.ranks):
        reports.setdefault((line["step"], line["attempt"]), []).append(line)
    sizes = [one.get("world_size", 0) for one in attempts(directory.environment_json)] if reports else []
    rows, points = [], []
    for (step, attempt), ranks in sorted(reports.items()):
        row = at.get(step)
        if row is None or row["attempt"] != attempt or len(ranks) != sizes[attempt - 1]:
            continue
        rows.append({"step": step, "ranks": ranks})
        points.append(
            [
                Point(f"{SYSTEM}/{host}/{name}", row["tokens"], max(on_host), int(row["time"] * 1000))
                for host in sorted({rank["host"] for rank in ranks})
                for name in ("busy_seconds_p50", "step_seconds_p50", "step_seconds_p95", "step_seconds_max")
                if (on_host := [float(rank[name]) for rank in ranks if rank["host"] == host])
            ]
        )
    return Stream("ranks", rows, points)


def _system_stream(path: Path) -> Stream:
    """What `study.tracking.follow` sampled on one node."""
    rows = _complete_lines(path)
    points = [
        [
            Point(f"{SYSTEM}/{row['host']}/{key}", sample, float(row[key]), int(row["time"] * 1000))
            for key in sorted(row.keys() - SAMPLE_KEYS)
        ]
        for sample, row in enumerate(rows)
    ]
    return Stream(path.stem, rows, points)


def system_file(directory: RunDirectory, host: str) -> Path:
    """Samples of one node."""
    return directory.path / f"{SYSTEM}-{host}.jsonl"


def streams_of(directory: RunDirectory) -> list[Stream]:
    """Every file of the run that grows."""
    metrics = _metrics_stream(directory)
    nodes = sorted(directory.path.glob(f"{SYSTEM}-*.jsonl"))
    return [metrics, _ranks_stream(directory, metrics), *(_system_stream(path) for path in nodes)]


def check_finite(points: list[Point]) -> list[Point]:
    """The points; UserError for one that MLflow would keep as another number."""
    for point in points:
        if not math.isfinite(point.value):
            raise UserError(f"{point.name} is {point.value} at {point.at}; measure it again")
    return points
