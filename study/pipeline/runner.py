"""The local runner: the steps of a study in order, as many at once as cores and GPUs allow.

A step runs below `supervise.py`, which ends it with all its descendants when this process is gone.
One runner works on a study at a time, and none beside the processes of a killed one:
STUDY/.runner.lock is held by the runner alone, STUDY/.steps.lock also by everything it started, so
a new runner can tell another one at work from the last processes of one that was killed.
"""

import math
import os
import select
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from base.files import freed, take_lock
from study.machine.hardware import Hardware
from study.pipeline import warm
from study.pipeline.ledger import Ledger
from study.pipeline.processes import Process, Processes
from study.pipeline.progress import StudyProgress
from study.step import (
    COMMAND_PROMPT,
    Machine,
    Step,
    batches,
    last_error,
    log_path,
    resolve,
    shared,
)
from study.steps import FINAL, ONLINE
from train.run.launch import HUNG

PROJECT = Path(__file__).resolve().parents[2]
HANGS = 3  # of a step, after each of which it is resumed
MODELS_PER_PROCESS = 12  # its imports take some seconds, as much as one tiny checkpoint


# glibc returns freed memory to the kernel, which clears it page by page for the next tensor: a
# tenth of a training step. Here a process keeps what it frees, within bounds, and in huge pages.
KEEP_MEMORY = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,  # 1 asks for transparent ones
        "mmap_threshold": 64 << 20,
        "trim_threshold": 256 << 20,
        "top_pad": 16 << 20,
    }.items()
)


ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of tokenizers


class StepError(Exception):
    """A step ended badly without saying why in one line; the command exits with code 1."""


ORPHAN_SECONDS = 30.0  # supervise.py needs about 3 to end what a killed runner left


@contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold both locks of a study; yield the descriptor of the one that steps inherit."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        (directory / ".runner.lock").open("a") as runner,
        (directory / ".steps.lock").open("a") as steps,
    ):
        # The lock of the runner first: only then are holders of the other one orphans.
        if not take_lock(runner):
            raise UserError(f"another 'study run' works on {directory}; {freed(Path(runner.name))}")
        if not take_lock(steps, ORPHAN_SECONDS):
            raise UserError(
                f"processes of an earlier run still work on {directory}; end them "
                f"('fuser {directory}/.steps.lock' lists them) and run again"
            )
        yield steps.fileno()


# The process is of a low priority: where steps want every core it gets a tenth of one. It rests for
# twice the time that it took, so it takes less than 4% of one core from the steps.
EVERY_SECONDS = 300.0
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
        # A refresh that takes long is followed by a longer rest.
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


@dataclass(frozen=True)
class _Running:
    steps: list[Step]
    slots: int
    gpus: tuple[str, ...]
    process: Process
    log: Path
    log_start: int
    fingerprints: dict[str, str]
    started_at: float


def child_environment(kind: str, gpus: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment of a step: its GPUs, its threads, no network unless it fetches."""
    path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", KEEP_MEMORY),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as the numbers of the hardware are counted
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        # nothing else can run before the text is there
        **({"TOKENIZERS_PARALLELISM": "true"} if kind == "prepare" else ONE_THREAD),
        **({} if kind in ONLINE else {"HF_HUB_OFFLINE": "1"}),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }


class Runner:
    """One execution of the steps of one study."""

    def __init__(
        self,
        directory: Path,
        steps: list[Step],
        hardware: Hardware,
        lock_fd: int,
        machine_of: Callable[[Step], Machine] = lambda _: Machine(),
        refresh: tuple[str, ...] = (),
    ) -> None:
        """Prepare to run all steps of the study in a directory whose locks are held.

        Steps inherit `lock_fd`. `machine_of` says what a step takes of the hardware. `refresh` is
        the command of the live view; without one there is none.
        """
        self.directory, self.hardware = directory, hardware
        self.processes = Processes(PROJECT, lock_fd)
        self.machine_of = machine_of
        self.ledger = Ledger(directory, steps)
        self.pending = {step.name: step for step in steps}
        self.running: list[_Running] = []
        self.complete: set[str] = set()
        self.left_out: dict[str, str] = {}  # step -> why it is never made
        self.failures: list[UserError | StepError] = []  # one per step
        self.hangs = Counter[str]()  # by step
        self.progress = StudyProgress(directory.name, steps, self._share, self.ledger)
        self.live = LiveView(directory, refresh, self.processes, child_environment("refresh"))

    def run(self) -> None:
        """Run until nothing more can; a failed step holds up only what depends on it.

        Raises:
            UserError: a step failed with a one-line error of its own.
            StepError: a step failed without one.
        """
        try:
            with self.progress.bar, self.processes:
                self._start_ready()
                while self.running:
                    self._wait()
                    self._start_ready()
                    self.progress.refresh()
        finally:
            self._end_running()
        if self.failures:
            first, *others = self.failures
            more = f" (and {len(others)} more failed steps)" if others else ""
            raise type(first)(f"{first}{more}")

    def _slots(self, step: Step) -> int:
        """Return the cores of a step; a step on GPUs takes one for each."""
        return min(self.machine_of(step).gpus or step.slots, self.hardware.cores)

    def _share(self, step: Step) -> float:
        """Return the share of the hardware that a step occupies."""
        gpus = self.machine_of(step).gpus
        of_gpus = gpus / len(self.hardware.gpus) if gpus else 0.0
        return max(self._slots(step) / self.hardware.cores, of_gpus)

    def _ready(self) -> list[Step]:
        """Return the steps that may start now; count those that are complete or left out."""
        ready = []
        # A copy, since `pending` shrinks; in the order of the study, so one pass closes a chain.
        for step in list(self.pending.values()):
            if not self.complete.issuperset(set(step.after) - self.left_out.keys()):
                continue
            reason = self.ledger.left_out(step)
            if reason:
                del self.pending[step.name]
                self.left_out[step.name] = reason
                self.progress.closed([step])
                continue
            if step.kind in FINAL:
                self.live.end()  # what it writes is theirs from now on
            if self.ledger.is_complete(step):
                del self.pending[step.name]
                self.complete.add(step.name)
                self.progress.closed([step])
            else:
                ready.append(step)
        return ready

    def _start_ready(self) -> None:
        ready = self._ready()
        if not ready:
            return
        # Only if something is left that a fork would start faster.
        if any(warm.MEASURING.intersection(step.head[2:3]) for step in self.pending.values()):
            self.processes.warm_up(child_environment(""))
        at_work = {step.name for running in self.running for step in running.steps}
        # A process that a step could share is not started while what that step waits for is at
        # work.
        awaited = {
            step.process
            for step in self.pending.values()
            if step.models and at_work.intersection(step.after)
        }
        startable = [step for step in ready if step.process not in awaited]
        # few enough models share a process to leave work for every GPU
        models = min(MODELS_PER_PROCESS, -(-len(startable) // max(len(self.hardware.gpus), 1)))
        for batch in batches(startable, models, len(ready)):
            machine = self.machine_of(batch[0])
            # First fit: what needs more than is free is passed over, and looked at again later.
            free_slots = self.hardware.cores - sum(running.slots for running in self.running)
            busy = {gpu for running in self.running for gpu in running.gpus}
            free_gpus = [gpu for gpu in self.hardware.gpus if gpu not in busy]
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
            # The log holds earlier attempts too: errors are looked for from here on alone.
            start = output.tell()
            process = self.processes.start(command, output, child_environment(first.kind, gpus))
        slots = self._slots(first)
        self.running.append(
            _Running(batch, slots, gpus, process, log, start, fingerprints, time.monotonic())
        )
        self.progress.started(batch, log)

    def _wait(self) -> None:
        by_leash = {running.process.leash: running for running in self.running}
        ready, _, _ = select.select(list(by_leash), [], [], self.progress.interval_seconds)
        for leash in ready:
            self._finished(by_leash[leash])
        line = self.live.turn()
        if line:
            self.progress.say(line)

    def _finished(self, running: _Running) -> None:
        self.running.remove(running)
        seconds = time.monotonic() - running.started_at
        status = running.process.wait()
        first = running.steps[0]
        diverged = None
        if first.kind == "train":
            self.ledger.look_again()
            diverged = self.ledger.divergence(first)
        # Outputs are written whole and were removed before: one that is there is the process's own,
        # however it ended.
        several = len(running.steps) > 1
        complete = [
            step
            for step in running.steps
            if status == 0 or diverged or (several and not step.resumes)
        ]
        complete = [step for step in complete if not self.ledger.fault(step)]
        for step in complete:
            self.ledger.finish(step, running.fingerprints[step.name], seconds / len(running.steps))
            self.complete.add(step.name)
        if complete:
            self.progress.finished(complete, seconds)
            if diverged:
                self.progress.say(diverged.words)
        failed = [step for step in running.steps if step not in complete]
        if not failed:
            return
        first = failed[0]
        reason = last_error(running.log, running.log_start) if status else None
        if reason and reason.startswith(HUNG) and self.hangs[first.name] < HANGS:
            self.hangs[first.name] += 1
            self.pending |= {step.name: step for step in failed}
            self.progress.again(failed, f"step {first.name} is resumed, {reason}")
            return
        if status == 0:
            why = str(self.ledger.fault(first))
            if ";" not in why:
                why += "; run again, and if nobody stopped it read the log"
        else:
            why = reason or f"it ended with status {status}; read the log"
            if status == 2 and not reason:  # a refusal always has a line: the log did not take it
                why = "its error is not in the log; look at space and quota there, and run again"
        line = f"step {first.name} failed, log {running.log}: {why}"
        # Once for each step, because `run` states how many more have failed.
        self.failures += [UserError(line) if reason else StepError(line)] * len(failed)
        self.progress.closed(failed, line)

    def _end_running(self) -> None:
        """End every step and the live view, then await each."""
        self.live.end()
        # All are told to end before one is awaited: their grace periods pass together.
        for running in self.running:
            running.process.end()
        for running in self.running:
            running.process.wait()
        self.running.clear()
