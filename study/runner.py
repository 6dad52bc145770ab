"""Runs the steps of a study on this machine: in order, as many at once as there are cores and GPUs, each if needed.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from study import supervise
from study.commands import COMMAND_PROMPT, ONLINE, Machine, Step, batches, log_path, resolve, shared
from study.hardware import Hardware
from study.ledger import Ledger
from study.progress import StudyProgress
from train.command import UserError

PROJECT = Path(__file__).resolve().parent.parent
ORPHAN_SECONDS = 30.0  # supervise.py needs about 3 to end what a killed runner left
ERROR_PREFIX = "error: "
MODELS_PER_PROCESS = 12  # a process spends some seconds on its imports, as much as one tiny checkpoint takes


class StepError(Exception):
    """A step ended badly without saying why in one line; the command exits with code 1."""


@dataclass(frozen=True)
class _Running:
    steps: list[Step]
    slots: int
    gpus: tuple[str, ...]
    process: subprocess.Popen
    pidfd: int
    log: Path
    log_start: int
    fingerprints: dict[str, str]
    started_at: float


def child_environment(kind: str, gpus: tuple[str, ...] = ()) -> dict[str, str]:
    """Return what a step runs with: its GPUs, one thread, no network unless it fetches, this project importable."""
    path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as the numbers of the hardware are counted
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({} if kind in ONLINE else {"HF_HUB_OFFLINE": "1"}),
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

    def __init__(
        self,
        directory: Path,
        steps: list[Step],
        hardware: Hardware,
        lock_fd: int,
        machine_of: Callable[[Step], Machine] = lambda _: Machine(),
    ) -> None:
        """`machine_of` says what a step takes of the hardware, and what the placeholders of its command stand for."""
        self.directory, self.hardware, self.lock_fd, self.machine_of = directory, hardware, lock_fd, machine_of
        self.ledger = Ledger(directory, steps)
        self.pending = {step.name: step for step in steps}
        self.running: list[_Running] = []
        self.complete: set[str] = set()
        self.failures: dict[str, tuple[str, bool]] = {}  # step -> one line, and whether it is the step's own
        self.progress = StudyProgress(directory.name, steps, self._share, self.ledger)

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
        """Return the cores of a step; a step on GPUs takes one for each."""
        return min(self.machine_of(step).gpus or step.slots, self.hardware.cores)

    def _share(self, step: Step) -> float:
        """Return the share of the hardware that a step occupies."""
        gpus = self.machine_of(step).gpus
        return max(self._slots(step) / self.hardware.cores, gpus / len(self.hardware.gpus) if gpus else 0.0)

    def _free_gpus(self) -> list[str]:
        taken = {gpu for running in self.running for gpu in running.gpus}
        return [gpu for gpu in self.hardware.gpus if gpu not in taken]

    def _models_per_process(self, ready: int) -> int:
        """Return how many models share a process: on several GPUs no more than leave work for all of them."""
        return min(MODELS_PER_PROCESS, -(-ready // max(len(self.hardware.gpus), 1)))

    def _ready(self) -> list[Step]:
        """Steps that may start now; those that are complete already are ticked off."""
        ready = []
        for step in list(self.pending.values()):
            if not self.complete.issuperset(step.after):
                continue
            if self.ledger.is_complete(step):
                del self.pending[step.name]
                self.complete.add(step.name)
                self.progress.skipped(step)
            else:
                ready.append(step)
        return ready

    def _start_ready(self) -> None:
        ready = self._ready()
        if not ready:
            return
        at_work = {step.name for running in self.running for step in running.steps}
        # A process that a step could share is not started while what that step waits for is at work.
        awaited = {step.process for step in self.pending.values() if step.models and at_work.intersection(step.after)}
        startable = [step for step in ready if step.process not in awaited]
        for batch in batches(startable, self._models_per_process(len(startable)), len(ready)):
            free_slots = self.hardware.cores - sum(running.slots for running in self.running)
            free_gpus, machine = self._free_gpus(), self.machine_of(batch[0])
            if self._slots(batch[0]) <= free_slots and machine.gpus <= len(free_gpus):
                for step in batch:
                    del self.pending[step.name]
                self._start(batch, machine, tuple(free_gpus[: machine.gpus]))

    def _start(self, batch: list[Step], machine: Machine, gpus: tuple[str, ...]) -> None:
        # of what they read now, before they run
        fingerprints = {step.name: self.ledger.fingerprint(step) for step in batch}
        for step in batch:
            self.ledger.prepare(step)
        first = batch[0]
        log = log_path(self.directory, first)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = resolve(shared(batch), self.directory, machine)
        with log.open("ab") as output:
            output.write(f"{COMMAND_PROMPT}{shlex.join(command)}\n".encode())
            output.flush()
            start = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(supervise.__file__), str(self.lock_fd), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(first.kind, gpus),
                cwd=PROJECT,
                pass_fds=[self.lock_fd],
                start_new_session=True,  # a Ctrl-C reaches this process alone, which then ends them in order
            )
        pidfd = os.pidfd_open(process.pid)
        slots = self._slots(first)
        self.running.append(_Running(batch, slots, gpus, process, pidfd, log, start, fingerprints, time.monotonic()))
        self.progress.started(batch, log)

    def _wait(self) -> None:
        by_fd = {running.pidfd: running for running in self.running}
        ready, _, _ = select.select(list(by_fd), [], [], self.progress.interval_seconds)
        for pidfd in ready:
            self._finished(by_fd[pidfd])
        self.progress.refresh()

    def _finished(self, running: _Running) -> None:
        self.running.remove(running)
        seconds = time.monotonic() - running.started_at
        status = running.process.wait()
        _close(running)
        # Outputs are written whole and were removed before: one that is there is the process's own, however it ended.
        several = len(running.steps) > 1
        made = [step for step in running.steps if status == 0 or (several and not step.resumes)]
        made = [step for step in made if self.ledger.outputs_exist(step)]
        for step in made:
            self.ledger.finish(step, running.fingerprints[step.name], seconds / len(running.steps))
            self.complete.add(step.name)
        if made:
            self.progress.finished(made, seconds)
        failed = [step for step in running.steps if step not in made]
        if not failed:
            return
        reason = last_error(running.log, running.log_start) if status else None
        if status == 0:
            missing = next(name for name in failed[0].outputs if not (self.directory / name).is_file())
            why = f"it ended well but left no {missing}; remove what it left and run again"
        else:
            why = reason or f"it ended with status {status}; read the log"
        line = f"step {failed[0].name} failed, log {running.log}: {why}"
        self.failures |= {step.name: (line, reason is not None) for step in failed}
        self.progress.failed(failed, line)

    def _end_running(self) -> None:
        """Closing its standard input makes supervise.py end the step; all at once, then each awaited."""
        for running in self.running:
            stdin: IO[bytes] | None = running.process.stdin
            assert stdin is not None
            stdin.close()
        for running in self.running:
            running.process.wait()
            _close(running)
        self.running.clear()


def _close(running: _Running) -> None:
    os.close(running.pidfd)
    if running.process.stdin:
        running.process.stdin.close()
