"""Progress with an ETA: a bar on a terminal, plain lines otherwise."""

import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from base.environment import is_rank_zero

PLAIN_LINE_EVERY_SECONDS = 10.0


class Progress:
    """A progress bar with ETA on a terminal, a plain line every few seconds otherwise."""

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        self.label, self.total, self.done = label, total, done
        self._started_at = self._printed_at = time.monotonic()
        self._done_at_start = done
        self._bar: RichProgress | None = None
        if is_rank_zero() and sys.stderr.isatty():
            self._bar = RichProgress(
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                "ETA",
                TimeRemainingColumn(),
                "{task.fields[note]}",
            )
            self._task = self._bar.add_task(label, total=total, completed=done, note="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int = 1, **values: float) -> None:
        """Count `count` more items as done and show the latest named values."""
        self.done += count
        note = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
        if self._bar:
            self._bar.update(self._task, completed=self.done, note=note)
            return
        now = time.monotonic()
        due = now - self._printed_at >= PLAIN_LINE_EVERY_SECONDS or self.done == self.total
        if due and is_rank_zero():
            self._printed_at = now
            # What was done before a resumed start took none of the time since then.
            rate = (self.done - self._done_at_start) / max(now - self._started_at, 1e-9)
            eta_seconds = (self.total - self.done) / max(rate, 1e-9)
            print(
                f"{self.label} {self.done}/{self.total}  ETA {eta_seconds:.0f} s  {note}",
                file=sys.stderr,
                flush=True,
            )
