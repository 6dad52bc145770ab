"""Runs the steps of a study on this machine: in order, as many at once as there are slots, each only if needed.

A step runs below `supervise.py`, which ends it with all its descendants when this process is gone. Two locks keep
studies apart: STUDY/.runner.lock is held by this process alone, STUDY/.steps.lock also by everything it started, so a
new runner can tell another one at work from the last processes of one that was killed.
"""

import fcntl
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from study import supervise
from study.ledger import Ledger
from study.progress import StudyProgress
from study.steps import COMMAND_PROMPT, Step, log_path
from train.command import UserError

PROJECT = Path(__file__).resolve().parent.parent
ORPHAN_SECONDS = 30.0  # supervise.py needs about 3 to end what a killed runner left
ERROR_PREFIX = "error: "


class StepError(Exception):
    """A step ended badly without saying why in one line; the command exits with code 1."""


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen
    pidfd: int
    log_start: int
    fingerprint: str
    started_at: float


def child_environment() -> dict[str, str]:
    """What a step runs with: this project importable from anywhere, one thread, nothing that reaches the network."""
    path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the studies that run here are sized for cores, with or without a GPU beside them
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }


@contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Holds both locks of a study; yields the descriptor of the one that steps inherit."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".runner.lock").open("a") as runner, (directory / ".steps.lock").open("a") as steps:
        try:
            fcntl.flock(runner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another 'study run' works on {directory}; wait until it ends, or end it and run again"
            ) from None
        deadline = time.monotonic() + ORPHAN_SECONDS
        while True:
            try:
                fcntl.flock(steps, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"processes of an earlier run still work on {directory}; end them "
                        f"('fuser {directory}/.steps.lock' lists them) and run again"
                    ) from None
                time.sleep(0.1)
        yield steps.fileno()


def last_error(log: Path, start: int) -> str | None:
    """The last 'error: ...' line a step wrote to its log after byte `start`."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith(ERROR_PREFIX)), None)


class Runner:
    """One execution of the steps of one study."""

    def __init__(self, directory: Path, steps: list[Step], workers: int, lock_fd: int) -> None:
        self.directory, self.workers, self.lock_fd = directory, workers, lock_fd
        self.ledger = Ledger(directory, steps)
        self.pending = {step.name: step for step in steps}
        self.running: dict[str, _Running] = {}
        self.complete: set[str] = set()
        self.failures: dict[str, tuple[str, bool]] = {}  # step -> one line, and whether it is the step's own
        self.progress = StudyProgress(directory.name, steps, workers, self.ledger)

    def run(self) -> None:
        """Runs until nothing more can; a failed step holds up only what depends on it.

        Raises:
            UserError: a step failed with a one-line error of its own.
            StepError: a step failed without one.
        """
        try:
            with self.progress:
                while True:
                    self._start_ready()
                    if not self.running:
                        break
                    self._wait()
        finally:
            self._end_running()
        if self.failures:
            line, said_why = next(iter(self.failures.values()))
            more = f" (and {len(self.failures) - 1} more failed steps)" if len(self.failures) > 1 else ""
            raise (UserError if said_why else StepError)(line + more)

    def _slots(self, step: Step) -> int:
        return min(step.slots, self.workers)

    def _start_ready(self) -> None:
        for step in list(self.pending.values()):
            if not self.complete.issuperset(step.after):
                continue
            if self.ledger.is_complete(step):
                del self.pending[step.name]
                self.complete.add(step.name)
                self.progress.skipped(step)
                continue
            free = self.workers - sum(self._slots(self.ledger.steps[name]) for name in self.running)
            if self._slots(step) <= free:
                del self.pending[step.name]
                self._start(step)

    def _start(self, step: Step) -> None:
        fingerprint = self.ledger.fingerprint(step)  # of what it reads now, before it runs
        self.ledger.prepare(step)
        log = log_path(self.directory, step)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = step.argv(self.directory)
        with log.open("ab") as output:
            output.write(f"{COMMAND_PROMPT}{shlex.join(command)}\n".encode())
            output.flush()
            start = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(supervise.__file__), str(self.lock_fd), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(),
                cwd=PROJECT,
                pass_fds=[self.lock_fd],
                start_new_session=True,  # a Ctrl-C reaches this process alone, which then ends them in order
            )
        pidfd = os.pidfd_open(process.pid)
        self.running[step.name] = _Running(process, pidfd, start, fingerprint, time.monotonic())
        self.progress.started(step)

    def _wait(self) -> None:
        by_fd = {running.pidfd: name for name, running in self.running.items()}
        ready, _, _ = select.select(list(by_fd), [], [], self.progress.interval_seconds)
        for pidfd in ready:
            self._finished(self.ledger.steps[by_fd[pidfd]])
        self.progress.refresh()

    def _finished(self, step: Step) -> None:
        running = self.running.pop(step.name)
        seconds = time.monotonic() - running.started_at
        status = running.process.wait()
        _close(running)
        log = log_path(self.directory, step)
        if status == 0 and self.ledger.outputs_exist(step):
            self.ledger.finish(step, running.fingerprint, seconds)
            self.complete.add(step.name)
            self.progress.finished(step, seconds)
            return
        reason = last_error(log, running.log_start) if status else None
        if status == 0:
            missing = [output for output in step.outputs if not (self.directory / output).is_file()]
            why = f"it ended well but left no {missing[0]}; remove what it left and run again"
        else:
            why = reason or f"it ended with status {status}; read the log"
        line = f"step {step.name} failed, log {log}: {why}"
        self.failures[step.name] = (line, reason is not None)
        self.progress.failed(step, line)

    def _end_running(self) -> None:
        """Closing its standard input makes supervise.py end the step; all at once, then each awaited."""
        for running in self.running.values():
            stdin: IO[bytes] | None = running.process.stdin
            assert stdin is not None
            stdin.close()
        for running in self.running.values():
            running.process.wait()
            _close(running)
        self.running.clear()


def _close(running: _Running) -> None:
    os.close(running.pidfd)
    if running.process.stdin:
        running.process.stdin.close()
