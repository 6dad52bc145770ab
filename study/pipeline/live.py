"""The live view of a study: a process beside its steps that brings report and MLflow up to them."""

import math
import select
import time
from pathlib import Path

from study.pipeline.processes import Process, Processes
from study.step import Machine, last_error, resolve

# The process is of a low priority: where steps want every core it gets a tenth of one. It rests for
# twice the time that it took, so it takes less than 4% of one core from the steps.
EVERY_SECONDS = 120.0
REST = 2.0  # times as long as the last refresh took


class LiveView:
    """One refresh at a time; what one fails at is said in a line and never ends the study."""

    def __init__(
        self,
        directory: Path,
        command: tuple[str, ...],
        processes: Processes,
        environment: dict[str, str],
    ) -> None:
        """Begin no refresh yet, and none at all without a command."""
        self.log = directory / "logs" / "refresh.log"
        self._command = resolve(command, directory, Machine())
        self._processes, self._environment = processes, environment
        self._process: Process | None = None
        self._started_at = time.monotonic()
        self._next_at = self._started_at + EVERY_SECONDS if command else math.inf
        self._last_reason: str | None = None

    def turn(self) -> str | None:
        """Begin a refresh if it is time for one; return a line if the last one failed anew."""
        if self._process is None and time.monotonic() >= self._next_at:
            self._begin()
        if self._process is None or not select.select([self._process.leash], [], [], 0)[0]:
            return None
        status = self._process.wait()
        self._process, now = None, time.monotonic()
        self._next_at = now + max(EVERY_SECONDS, REST * (now - self._started_at))
        reason = None
        if status:
            reason = last_error(self.log, 0) or f"it ended with status {status}; read the log"
        is_new = reason != self._last_reason
        self._last_reason = reason
        if reason and is_new:
            return f"report and MLflow stay as they were, log {self.log}: {reason}"
        return None

    def _begin(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at = time.monotonic()
        with self.log.open("wb") as output:
            self._process = self._processes.start(self._command, output, self._environment)

    def end(self) -> None:
        """End the refresh at work and begin no more."""
        if self._process:
            self._process.end()
            self._process.wait()
        self._process, self._next_at = None, math.inf
