"""The progress of a study in one line: what runs now, of how many, and how long still.

On a terminal a bar shows it; otherwise it is printed every few seconds, and never twice a second.
"""

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from base.grouping import grouped
from base.progress import PLAIN_LINE_EVERY_SECONDS
from study.pipeline.ledger import Ledger
from study.step import Step

NAMED = 2  # processes of a kind whose steps are named
# Of a step that takes longer than expected, the share of the time so far that is expected still.
OVERDUE = 0.25
COUNTED = re.compile(r"(\d+/\d+)  ETA ")  # of a line of `base.progress`


class _Process(NamedTuple):
    """A process at work: its steps, since when, and its log."""

    steps: list[Step]
    started_at: float
    log: Path


def clock(seconds: float) -> str:
    """Return a time as a clock shows it.

    >>> clock(125), clock(7325)
    ('2:05', '2:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def left(seconds: float) -> str:
    """Return an estimate of the time left in words, rounded as far as it can be trusted.

    >>> [left(seconds) for seconds in (3, 42, 100, 7325)]
    ['10 s left', '50 s left', '2 min left', '2 h 2 min left']
    """
    if seconds <= 50:
        return f"{max(10, 10 * -(-seconds // 10)):.0f} s left"
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"{hours} h {minutes} min left" if hours else f"{minutes} min left"


def _counted(log: Path) -> str:
    """Return the last count that a step printed, such as '560/1024'; empty without one."""
    with log.open("rb") as file:
        # The last line is all that is wanted, so only the end of a long log is read.
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().decode(errors="replace").splitlines()
    count = COUNTED.search(lines[-1]) if lines else None
    return count[1] if count else ""


class StudyProgress:
    """A count of steps, with the time left by what steps of the same kind took so far."""

    def __init__(
        self, name: str, steps: Sequence[Step], share_of: Callable[[Step], float], ledger: Ledger
    ) -> None:
        """Count `steps`; `share_of` says which share of the hardware one occupies."""
        self.share_of = share_of
        self.open = {step.name: step for step in steps}
        self.by_kind = grouped(steps, lambda step: step.kind)
        self.total = len(steps)
        self.running: dict[Path, _Process] = {}
        self.took: dict[str, list[float]] = {}
        for step in steps:
            record = ledger.record(step)
            seconds = record.get("seconds") if record else None
            if isinstance(seconds, int | float):
                self._learn(step, seconds)
        self.on_terminal = sys.stderr.isatty()
        self.interval_seconds = 0.5 if self.on_terminal else PLAIN_LINE_EVERY_SECONDS
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(
                stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True
            ),
            disable=not self.on_terminal,
        )
        self._task = self.bar.add_task(name, total=self.total, note="")
        self._began_at = self._printed_at = time.monotonic()

    def _learn(self, step: Step, seconds: float) -> None:
        # as a ratio to the first guess: trainings of one kind differ in length
        self.took.setdefault(step.kind, []).append(seconds / step.expected_seconds)

    def left_seconds(self) -> float:
        """Return the work left over the whole hardware, or the longest process left if longer."""
        now = time.monotonic()
        running = {step.name for process in self.running.values() for step in process.steps}
        waiting = [step for step in self.open.values() if step.name not in running]
        work = sum(self._expected(step) * self.share_of(step) for step in waiting)
        longest = max(map(self._expected, waiting), default=0.0)
        for process in self.running.values():
            taken = now - process.started_at
            rest = sum(map(self._expected, process.steps)) - taken
            rest = max(rest, OVERDUE * taken)
            work += rest * self.share_of(process.steps[0])
            longest = max(longest, rest)
        return max(work, longest)

    def _expected(self, step: Step) -> float:
        return step.expected_seconds * mean(self.took.get(step.kind, [1.0]))

    def at_work(self) -> str:
        """Return the kinds of steps at work: which of how many, and the runs or counts of each.

        Such as 'train 5-6 of 16 (lr1-seed3 560/1024, lr2-seed3 176/1024)'.
        """
        by_kind = grouped(self.running.values(), lambda process: process.steps[0].kind)
        return ", ".join(self._of_kind(kind, processes) for kind, processes in by_kind.items())

    def _of_kind(self, kind: str, processes: Sequence[_Process]) -> str:
        total = len(self.by_kind[kind])
        if total == 1:
            return f"{kind} {_counted(processes[0].log)}".rstrip()
        begun = sum(len(process.steps) for process in processes)
        first = total - sum(step.name in self.open for step in self.by_kind[kind]) + 1
        numbers = f"{first}-{first + begun - 1}" if begun > 1 else f"{first}"
        names = [self._named(process) for process in processes[:NAMED]]
        names += [f"{len(processes) - NAMED} more"] if len(processes) > NAMED else []
        return f"{kind} {numbers} of {total} ({', '.join(names)})"

    def _named(self, process: _Process) -> str:
        """Name the run of a process, and how far a training is; the others count within a model."""
        first = process.steps[0]
        name = first.run or first.name.removeprefix(f"{first.kind}-")
        return f"{name} {_counted(process.log)}".rstrip() if first.kind == "train" else name

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(line)

    def started(self, steps: list[Step], log: Path) -> None:
        """Note that a process begins the work of these steps."""
        self.running[log] = _Process(steps, time.monotonic(), log)

    def finished(self, steps: list[Step], seconds: float) -> None:
        """Count steps that a process completed in so many seconds together."""
        guessed = sum(step.expected_seconds for step in steps)
        # One process did all of them: its time is shared out by what was expected of each.
        for step in steps:
            self._learn(step, seconds * step.expected_seconds / guessed)
        self.closed(steps)

    def closed(self, steps: list[Step], line: str = "") -> None:
        """Count steps that were complete already, or that failed; then print why."""
        for step in steps:
            del self.open[step.name]
        self._ended(steps)
        if line:
            self.say(line)

    def again(self, steps: list[Step], line: str) -> None:
        """Count steps as open that will be started again, and print why."""
        self._ended(steps)
        self.say(line)

    def _ended(self, steps: list[Step]) -> None:
        ended = {step.name for step in steps}
        self.running = {
            log: process
            for log, process in self.running.items()
            if not ended.intersection(step.name for step in process.steps)
        }

    def refresh(self) -> None:
        """Update the bar; without a terminal print a line now and then."""
        done, now = self.total - len(self.open), time.monotonic()
        note = f"{left(self.left_seconds())}: {self.at_work()}" if self.running else ""
        self.bar.update(self._task, completed=done, note=note)
        if self.on_terminal or not note or now - self._printed_at < PLAIN_LINE_EVERY_SECONDS:
            return
        self._printed_at = now
        self.say(f"{clock(now - self._began_at)}  {done}/{self.total} steps, {note}")
