"""The progress of a study: a bar with ETA on a terminal, a line per step otherwise."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from base.progress import PLAIN_LINE_EVERY_SECONDS
from study.pipeline.ledger import Ledger
from study.step import COMMAND_PROMPT, Step


def _clock(seconds: float) -> str:
    """'2:05' for 125 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _named(first: str, count: int) -> str:
    """Name the steps of one process, whose log has the name of the first."""
    return f"{first} and {count - 1} more" if count > 1 else first


def _last_line(log: Path) -> str:
    """Return the last line of a step's log; 'starting' if it printed nothing yet."""
    with log.open("rb") as file:
        # The last line is all that is wanted, so only the end of a long log is read.
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().decode(errors="replace").splitlines()
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "starting" if line.startswith(COMMAND_PROMPT) else line


class StudyProgress:
    """A count of steps, with an ETA from what steps of the same kind took so far."""

    def __init__(
        self, name: str, steps: list[Step], share_of: Callable[[Step], float], ledger: Ledger
    ) -> None:
        """Count `steps`; `share_of` says which share of the hardware one occupies."""
        self.share_of = share_of
        self.open = {step.name: step for step in steps}
        self.total = len(steps)
        self.running: dict[str, tuple[float, Path]] = {}  # since when, and the log of the process
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
        self._printed_at = time.monotonic()

    def _learn(self, step: Step, seconds: float) -> None:
        # as a ratio to the first guess: trainings of one kind differ in length
        self.took.setdefault(step.kind, []).append(seconds / step.expected_seconds)

    def eta_seconds(self) -> float:
        """Return the work left over the whole hardware, or the longest step left if longer."""
        now = time.monotonic()
        work, longest = 0.0, 0.0
        for step in self.open.values():
            left = step.expected_seconds * mean(self.took.get(step.kind, [1.0]))
            if step.name in self.running:
                # One that is overdue keeps some work, so that the ETA is not 0 before it ends.
                left = max(left - (now - self.running[step.name][0]), 0.05 * left)
            work += left * self.share_of(step)
            longest = max(longest, left)
        return max(work, longest)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._printed_at = time.monotonic()
        self.bar.console.print(line)

    def _count(self) -> str:
        return f"[{self.total - len(self.open)}/{self.total}]"

    def started(self, steps: list[Step], log: Path) -> None:
        """Show that a process begins the work of these steps."""
        self.running |= {step.name: (time.monotonic(), log) for step in steps}
        self.refresh()

    def finished(self, steps: list[Step], seconds: float) -> None:
        """Count steps that a process completed in so many seconds together."""
        guessed = sum(step.expected_seconds for step in steps)
        # One process did all of them: its time is shared out by what was expected of each.
        for step in steps:
            self._learn(step, seconds * step.expected_seconds / guessed)
        self.closed(steps)
        if not self.on_terminal:
            eta = _clock(self.eta_seconds())
            named = _named(steps[0].name, len(steps))
            self.say(f"{self._count()} {named}  {seconds:.1f} s  ETA {eta}")

    def closed(self, steps: list[Step], line: str = "") -> None:
        """Count steps that were complete already, or that failed; then print why."""
        for step in steps:
            del self.open[step.name]
            self.running.pop(step.name, None)
        if line:
            self.say(line)
        self.refresh()

    def again(self, steps: list[Step], line: str) -> None:
        """Count steps as open that will be started again, and print why."""
        for step in steps:
            del self.running[step.name]
        self.say(line)

    def refresh(self) -> None:
        """Update the bar; without a terminal print the last line of each step now and then."""
        eta = _clock(self.eta_seconds())
        # Steps of one process share its log, and are shown as one.
        logs = Counter(log for _, log in self.running.values())
        note = f"ETA {eta}  {', '.join(_named(log.stem, count) for log, count in logs.items())}"
        self.bar.update(self._task, completed=self.total - len(self.open), note=note)
        if self.on_terminal or time.monotonic() - self._printed_at < PLAIN_LINE_EVERY_SECONDS:
            return
        for log, count in logs.items():
            named = _named(log.stem, count)
            self.say(f"{self._count()} {named}: {_last_line(log)}  (study ETA {eta})")
