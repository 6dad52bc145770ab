"""The work of every attempt of a run, by environment.json and few rows of metrics.jsonl.

A file of metrics may have hundreds of megabytes, so an attempt's first and last rows are found by
bisection: rows are in the order of the attempts, but for the last of an orphan.
"""

import os
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from train.run.directory import RunDirectory
from train.run.environment import attempts, kinds_of, node_count
from train.run.metrics import TRAINED, as_row, tail_rows

LAST_ROWS_BYTES = 2**13  # at first
BEYOND = 2**63  # more than any attempt: the end of the file


class AttemptWork(NamedTuple):
    """The updates that one attempt made, whether or not a later one made them again.

    Attributes:
        nodes: how many trained.
        kinds: of their processors.
        began: when its process started, in seconds since the epoch; None where not recorded.
        first_step, last_step: its first and last update.
        first_time, last_time: when these were logged.
    """

    nodes: int
    kinds: list[str]
    began: float | None
    first_step: int = 0
    last_step: int = -1
    first_time: float = 0.0
    last_time: float = 0.0

    @property
    def updates(self) -> int:
        """The number of updates; 0 of a start that made none."""
        return self.last_step - self.first_step + 1

    @property
    def seconds(self) -> float:
        """The time from its first update to its last one, saves and evaluations included."""
        return max(0.0, self.last_time - self.first_time)


def history(directory: RunDirectory) -> list[AttemptWork]:
    """Return the work of every attempt, in order; empty for a run that was never started."""
    if not directory.environment_json.exists():
        return []
    recorded = attempts(directory.environment_json)
    numbers = range(1, len(recorded) + 1)
    if not directory.metrics.exists():
        return [_work(attempt, []) for attempt in recorded]

    with directory.metrics.open("rb") as file:
        begins = [_begin_of(file, directory.metrics, number) for number in (*numbers, BEYOND)]
        return [
            _work(attempt, _ends(file, directory.metrics, number, begins[number - 1 : number + 1]))
            for number, attempt in zip(numbers, recorded, strict=True)
        ]


def _work(attempt: dict[str, Any], ends: list[dict[str, Any]]) -> AttemptWork:
    """Return the work of an attempt whose first and last update these rows are."""
    began = attempt.get("began")
    work = AttemptWork(node_count(attempt), kinds_of(attempt), began)
    if not ends:
        return work
    first, last = ends
    return work._replace(
        first_step=first["step"],
        last_step=last["step"],
        first_time=first["time"],
        last_time=last["time"],
    )


def surviving(works: list[AttemptWork]) -> list[int]:
    """Return how many updates of each attempt were not made again by a later one."""
    counts, again_from = [], float("inf")
    for work in reversed(works):
        counts.append(max(0, int(min(work.last_step, again_from - 1)) - work.first_step + 1))
        if work.updates:
            again_from = min(again_from, work.first_step)
    return counts[::-1]


def _begin_of(file: IO[bytes], path: Path, attempt: int) -> int:
    """Return the byte at which the first row of this attempt, or of a later one, begins."""
    size = file.seek(0, os.SEEK_END)

    def attempt_at(offset: int) -> int:
        return next((row["attempt"] for _, row in _rows_from(file, path, offset)), BEYOND)

    # Of all bytes of the line before, the first: the line itself begins after it.
    offset = bisect_left(range(size), attempt, key=attempt_at)
    return next((begin for begin, _ in _rows_from(file, path, offset)), size)


def _ends(file: IO[bytes], path: Path, attempt: int, span: list[int]) -> list[dict[str, Any]]:
    """Return the rows of an attempt's first and last update, which are between two bytes."""
    begin, end = span

    def is_update(row: dict[str, Any]) -> bool:
        return TRAINED in row and row.get("attempt") == attempt

    inside = (row for at, row in _rows_from(file, path, begin) if at < end)
    first = next((row for row in inside if is_update(row)), None)
    if first is None:
        return []
    size = LAST_ROWS_BYTES
    last: dict[str, Any] | None = None
    while last is None:  # rows of single updates may be long
        last = next(filter(is_update, reversed(tail_rows(path, size, end))), None)
        size *= 4
    return [first, last]


def _rows_from(file: IO[bytes], path: Path, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows that begin at or after a byte, each with its first byte."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()  # the rest of the line before, which is its end alone where a row begins
    while True:
        begin, line = file.tell(), file.readline()
        if not line.endswith(b"\n"):
            return
        row = as_row(line, path)
        if row is not None and {"attempt", "time"} <= row.keys():
            yield begin, row
