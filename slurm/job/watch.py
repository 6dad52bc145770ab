"""A watch on a training from outside: it sees a start or a save that does not end.

The ranks watch each other's steps (`train.running.watchdog`), but only once all of them have met.
"""

import time
from pathlib import Path

from train.run.directory import RunDirectory


class Watch:
    """The age of what a training last wrote, by the clock of this process alone."""

    def __init__(self, study_dir: Path, run: str, silent_seconds: float) -> None:
        self._run, self._silent_seconds = RunDirectory(study_dir / run), silent_seconds
        self._seen, self._since = self._size(), time.monotonic()
        self._first = self._seen

    def _size(self) -> int:
        try:
            return self._run.metrics.stat().st_size
        except OSError:  # not there yet, or the filesystem is away
            return 0

    def hung(self) -> str | None:
        """Return what hangs, in words, once nothing was logged for too long; None until then."""
        size, now = self._size(), time.monotonic()
        if size != self._seen:
            self._seen, self._since = size, now
        if now - self._since < self._silent_seconds:
            return None
        what = "training logs nothing"
        if self._seen == self._first:
            what = f"training does not start: {self._missing()}"
        return f"hung: {what} for {self._silent_seconds:.0f} s"

    def _missing(self) -> str:
        """Return how many ranks have met; before, none has written a heartbeat."""
        reports = sorted(self._run.watch.glob("rank*.json")) if self._run.watch.exists() else []
        if not reports:
            return "its ranks have not met, a node does not answer at the rendezvous"
        return f"{len(reports)} ranks have met and none makes a step"
