"""Progress of each training, by the files that it writes itself.

Nothing here subtracts times of day: speed is what the training measured with a clock that cannot
jump, and what is left is tokens over tokens per second.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.environment import attempts
from train.run.metrics import TRAINED

METRICS_TAIL_BYTES = 2**16  # some hundred rows
RANKS_TAIL_BYTES = 2**20  # a report of 4,000 ranks
SPEED_ROWS = (
    20  # behind the speed: their median does not move with one step that waited for the disk
)
STRAGGLER = 1.3  # times the median of the ranks


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        ended: "done", "preempted" or "failed" as status.json says; None: it trains, or it was
            killed.
        attempt: number of its newest start, from 1; 0 before the first.
        step: the newest update; None before the first.
        tokens: seen at that step.
        loss: of that step, nats per token.
        tokens_per_second: median over the newest updates of the newest attempt.
        left_seconds: what is left of the run's tokens at that speed.
        checkpoint: step of the newest whole checkpoint, restart checkpoints included.
        notes: what needs a look: a straggler, damaged files.
    """

    ended: str | None
    attempt: int
    step: int | None = None
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    left_seconds: float | None = None
    checkpoint: int | None = None
    notes: tuple[str, ...] = field(default=())


def training_of(study_dir: Path, run: RunConfig) -> Training:
    """Read the progress of a run from its files."""
    directory, notes = RunDirectory(study_dir / run.name), []
    ended, started = _ended(directory), _attempts(directory)
    rows, damaged = _newest_attempt(tail_rows(directory.metrics, METRICS_TAIL_BYTES))
    if damaged:
        notes.append(f"{damaged} damaged lines at the end of {directory.metrics}")
    straggler = straggler_of(directory.ranks)
    if straggler and ended != "done":
        notes.append(straggler)
    checkpoints = [*directory.complete_steps(), *directory.complete_restarts()]
    trained = [row for row in rows if TRAINED in row]
    newest = trained[-1] if trained else {}
    speeds = [
        row["tokens_per_second"]
        for row in trained[-SPEED_ROWS:]
        if row.get("tokens_per_second", 0) > 0
    ]
    speed, tokens = median(speeds) if speeds else None, int(newest.get("tokens", 0))
    left = max(0, run.total_steps * run.tokens_per_step - tokens)
    return Training(
        ended,
        started,
        newest.get("step"),
        tokens,
        newest.get("loss"),
        speed,
        left / speed if speed else None,
        max(checkpoints, default=None),
        tuple(notes),
    )


def straggler_of(ranks_jsonl: Path) -> str | None:
    """Describe the slowest rank of the newest report, if beyond STRAGGLER times the median.

    All ranks wait for the slowest, so only the time that each one's own process is busy tells them
    apart.
    """
    rows, _ = _newest_attempt(tail_rows(ranks_jsonl, RANKS_TAIL_BYTES))
    last = [
        row
        for row in rows
        if row["step"] == rows[-1]["step"] and row.get("busy_seconds_p50", 0) > 0
    ]
    if len(last) < 2:
        return None
    typical = median(row["busy_seconds_p50"] for row in last)
    slow = sorted((row for row in last if row["busy_seconds_p50"] > STRAGGLER * typical), key=_busy)
    if not slow:
        return None
    more = f", and {len(slow) - 1} more ranks" if len(slow) > 1 else ""
    return (
        f"rank {slow[-1]['rank']} on {slow[-1]['host']} computes {_busy(slow[-1]) / typical:.2f}"
        f" times as long as the median of {len(last)} ranks{more}"
    )


def tail_rows(path: Path, size: int) -> Iterator[dict[str, Any] | None]:
    """Yield the rows in the last `size` bytes of a JSONL file, None for a damaged line.

    What begins before those bytes, or is being written, is left out.
    """
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(max(0, start - 1))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines[1 if start else 0 : -1]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        yield row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _newest_attempt(rows: Iterator[dict[str, Any] | None]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the newest attempt, without those of orphans, and the damaged lines."""
    found = list(rows)
    whole = [row for row in found if row is not None]
    newest = max((row.get("attempt", 0) for row in whole), default=0)
    return [row for row in whole if row.get("attempt", 0) == newest], len(found) - len(whole)


def _busy(row: dict[str, Any]) -> float:
    return float(row["busy_seconds_p50"])


def _ended(directory: RunDirectory) -> str | None:
    try:
        return str(json.loads(directory.status_json.read_text())["status"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return f"{directory.status_json.name} cannot be read"


def _attempts(directory: RunDirectory) -> int:
    try:
        return len(attempts(directory.environment_json))
    except FileNotFoundError:
        return 0
