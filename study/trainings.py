"""Progress of each training, by the files that it writes itself.

Speed is what the training measured with a clock that cannot jump, and what is left is tokens over
tokens per second.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from base.aligned import aligned
from study.definition import Study
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.environment import attempts
from train.run.metrics import TRAINED, tail_rows
from train.run.status import Ending, read_status

METRICS_TAIL_BYTES = 2**16  # some hundred rows
RANKS_TAIL_BYTES = 2**20  # a report of 4,000 ranks
# Of the speed: their median does not move with one step that waited for the disk.
SPEED_ROWS = 20
ROWS_SHOWN = 8  # trainings at work, on one screen
STRAGGLER = 1.3  # times the median of the ranks
PROGRESS = ("step", "tokens", "loss", "tokens/s", "left", "saved")  # the columns of a table


@dataclass(frozen=True)
class Training:
    """The progress of a run by its files."""

    ending: Ending | None  # None: it trains, or it was killed
    attempt: int  # of its newest start, from 1; 0 before the first
    step: int | None  # the newest update; None before the first
    tokens: int  # seen at that step
    loss: float | None  # of that step, nats per token
    tokens_per_second: float | None  # median over the newest updates of the newest attempt
    left_seconds: float | None  # of the run's tokens at that speed; None: it has none, or has ended
    checkpoint: int | None  # step of the newest whole one, restart checkpoints included
    straggler: str | None  # the rank that holds up the others
    silent_seconds: float | None  # since it last logged, by the clock of this machine; None: never

    @property
    def has_ended(self) -> bool:
        """It is at its end, or diverged."""
        return self.ending in ("done", "diverged")

    def progress(self, run: RunConfig) -> tuple[str, ...]:
        """Return the cells of a row of PROGRESS."""
        speed, left = self.tokens_per_second, self.left_seconds
        return (
            f"{self.step or 0:,}/{run.total_steps:,}",
            short(self.tokens),
            "-" if self.loss is None else f"{self.loss:.4f}",
            "-" if speed is None else short(speed),
            "-" if left is None else str(timedelta(seconds=round(left))),
            "-" if self.checkpoint is None else f"{self.checkpoint:,}",
        )


def progress_lines(study_dir: Path, study: Study, *, whole: bool = False) -> list[str]:
    """Return a table of the trainings that have begun; none before the first.

    Trainings that have ended, and many at once, are numbers below it unless it is the `whole`.
    """
    trainings = [(run, training_of(study_dir, run)) for run in study.trained]
    begun = [each for each in trainings if each[1].silent_seconds is not None]
    if not begun:
        return []
    active = [each for each in begun if whole or not each[1].has_ended]
    shown = active if whole else active[:ROWS_SHOWN]
    rows = [(run.name, *training.progress(run)) for run, training in shown]
    table = ["", *aligned([("training", *PROGRESS), *rows])] if rows else []

    ended, more = len(begun) - len(active), len(active) - len(shown)
    counts = [f"{ended} trainings have ended" * bool(ended), f"{more} more train" * bool(more)]
    said = "; ".join(filter(None, counts))
    return [*table, *([f"{said} (--all lists them)"] if said else [])]


def training_of(study_dir: Path, run: RunConfig) -> Training:
    """Read the progress of a run from its files."""
    directory = RunDirectory(study_dir / run.name)
    status = read_status(directory)
    environment = directory.environment_json

    # the newest attempt, by the end of its metrics
    rows = _newest_attempt(tail_rows(directory.metrics, METRICS_TAIL_BYTES))
    trained = [row for row in rows if TRAINED in row]
    newest = trained[-1] if trained else {}

    # the time left, at the median of the last speeds
    speeds = [
        row["tokens_per_second"]
        for row in trained[-SPEED_ROWS:]
        if row.get("tokens_per_second", 0) > 0
    ]
    speed, tokens = median(speeds) if speeds else None, int(newest.get("tokens", 0))
    # By tokens, not by steps, since a step holds fewer tokens while the batch warms up.
    left = max(0, run.total_tokens - tokens)
    has_ended = status is not None and status.status in ("done", "diverged")
    checkpoints = [*directory.complete_steps(), *directory.complete_restarts()]
    return Training(
        ending=status.status if status else None,
        attempt=len(attempts(environment)) if environment.exists() else 0,
        step=newest.get("step"),
        tokens=tokens,
        loss=newest.get("loss"),
        tokens_per_second=speed,
        left_seconds=left / speed if speed and not has_ended else None,
        checkpoint=max(checkpoints, default=None),
        straggler=straggler_of(directory.ranks),
        silent_seconds=_age_seconds(directory.metrics),
    )


def _age_seconds(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None


def straggler_of(ranks_jsonl: Path) -> str | None:
    """Describe the slowest rank of the newest report, if beyond STRAGGLER times the median.

    All ranks wait for the slowest, so only what each does alone distinguishes them: the time of a
    fixed product on its GPU, or the time that its process is busy on a CPU.
    """
    rows = _newest_attempt(
        [row for row in tail_rows(ranks_jsonl, RANKS_TAIL_BYTES) if {"rank", "host"} <= row.keys()]
    )
    # Ranks are compared at one step alone: steps differ in the time they take.
    last = [row for row in rows if row["step"] == rows[-1]["step"] and _alone_seconds(row) > 0]
    if len(last) < 2:
        return None
    typical = median(map(_alone_seconds, last))
    slowest = max(last, key=_alone_seconds)
    ratio = _alone_seconds(slowest) / typical
    if ratio <= STRAGGLER:
        return None
    return (
        f"rank {slowest['rank']} on {slowest['host']} computes {ratio:.2f} times as long as the"
        f" median of {len(last)} ranks"
    )


def _alone_seconds(row: dict[str, Any]) -> float:
    # The time of the fixed product on a GPU, else the busy time of the process.
    return float(row.get("product_seconds", row.get("busy_seconds_p50", 0)))


def _newest_attempt(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the newest attempt, without those of orphans."""
    newest = max((row.get("attempt", 0) for row in rows), default=0)
    return [row for row in rows if row.get("attempt", 0) == newest]


def short(number: float) -> str:
    """Write a number with three digits.

    >>> [short(number) for number in (0, 60_000, 999_900, 350.2e9)]
    ['0', '60K', '1M', '350B']
    """
    for unit in ("", "K", "M", "B"):
        # 999.5 and more would be rounded to 1000, which is written in the next unit.
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"
