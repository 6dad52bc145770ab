"""Saving while training goes on: one save at a time, tried again when it fails, old restart checkpoints rotated."""

import contextlib
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from train.attempt import Attempt, SupersededError
from train.checkpoint import WRITE_ERRORS, Checkpoint, failure_of, remove_directory, same_shards
from train.command import UserError
from train.config import RunConfig
from train.distributed import from_rank_zero, gathered
from train.engine import Engine
from train.run_directory import CHECKPOINT_JSON, CheckpointRecord, RunDirectory

ASIDE = ".saving."  # begins the name of a directory that becomes a checkpoint


class Log(Protocol):
    """Where a row of metrics goes."""

    def __call__(self, step: int, **values: float) -> None:
        """Appends it."""
        ...


def remove_leftovers(directory: RunDirectory) -> None:
    """Removes what an attempt that died while saving or rotating left. Only the newest attempt may call it."""
    for parent in (directory.checkpoints, directory.restarts):
        for leftover in parent.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover)
    for restart in directory.restarts.glob("step*"):
        if not (restart / CHECKPOINT_JSON).exists():
            shutil.rmtree(restart)


class Saver:
    """The saves of one attempt. Every rank calls every method, at the same steps.

    A save is what one step leaves: averages, if any, and the checkpoint itself, committed last. It is written in a
    thread if the run says so. If it fails training goes on, and the copy that was made is written again after 1, 2, 4,
    ... steps. When the next save is due and the last attempt at this one fails too, training ends.

    Attributes:
        failures: saves of this attempt that failed at first, in words.
        learned: set by the loop when an update was made at a learning rate above zero; a save resets it.
    """

    def __init__(self, run: RunConfig, engine: Engine, directory: RunDirectory, attempt: Attempt, log: Log) -> None:
        self._run, self._engine, self._directory, self._attempt, self._log = run, engine, directory, attempt, log
        self._rank_zero = dist.get_rank() == 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._parts: list[Checkpoint] = []  # of the save that is not committed yet
        self._step = self._tries = self._again_at = 0
        self._writing: Future[None] | None = None
        self._began_at = self._stalled_seconds = 0.0
        self._asides: dict[Path, list[Path]] = {directory.checkpoints: [], directory.restarts: []}
        self._num_asides = 0
        self._last: CheckpointRecord | None = None  # on rank 0, the checkpoint before
        self._must_differ = False
        self.failures: list[str] = []
        self.learned = False
        if self._rank_zero:
            self._reserve()

    def follows(self, record: CheckpointRecord) -> None:
        """Says from which checkpoint training went on."""
        self._last = record

    def _reserve(self) -> None:
        """Makes the directories of the next save ahead: on a disk that is full by then they could not be made."""
        wanted = {self._directory.checkpoints: 1 + len(self._run.averages)}
        if self._run.saving.restart_every_steps:
            wanted[self._directory.restarts] = 1
        for parent, count in wanted.items():
            parent.mkdir(exist_ok=True)
            while len(self._asides[parent]) < count:
                self._asides[parent].append(self._make_aside(parent))

    def _make_aside(self, parent: Path) -> Path:
        self._num_asides += 1
        aside = parent / f"{ASIDE}attempt{self._attempt.number}.{self._num_asides}"
        parent.mkdir(exist_ok=True)
        aside.mkdir()
        return aside

    def _take_aside(self, final: Path) -> Path:
        """An empty directory beside `final`, the same on all ranks."""
        aside, failure = None, None
        if self._rank_zero:
            reserved = self._asides[final.parent]
            try:
                aside = reserved.pop() if reserved else self._make_aside(final.parent)
            except OSError as error:
                failure = failure_of(error)
        aside, failure = from_rank_zero((aside, failure))
        if aside is None:
            raise self._gave_up(final, str(failure))
        return Path(aside)

    def copy(self, final: Path, *, probe_BS: torch.Tensor, fields: dict[str, Any]) -> Checkpoint:
        """A copy of the engine's state as it is now, for `save`."""
        return Checkpoint(self._engine, final, self._take_aside(final), probe_BS=probe_BS, fields=fields)

    def save(self, step: int, parts: list[Checkpoint], *, copying_seconds: float) -> None:
        """Begins to write the parts of a step. The save before it must be committed: see `flush`."""
        assert not self._parts
        self._step, self._parts, self._tries = step, parts, 0
        self._began_at, self._stalled_seconds = time.monotonic() - copying_seconds, copying_seconds
        self._must_differ, self.learned = self.learned, False
        self._begin()

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._writing is not None and not self._writing.done()

    def advance(self, step: int, *, writing: bool) -> None:
        """After update `step`: commits what every rank has written (`writing` of none), repeats what failed."""
        if self._writing is not None and not writing:
            self._finish(step)
        elif self._parts and self._writing is None and step >= self._again_at:
            self._begin(step)

    def flush(self, step: int) -> None:
        """Waits until everything is committed, since the next save is due, or training at its end.

        Raises:
            UserError: it cannot be written; every earlier checkpoint is as it was.
        """
        if self._writing is not None:
            self._finish(step)
        if self._parts:
            self._begin()
            if self._writing is not None:
                self._finish(step)
        if self._parts:
            raise self._gave_up(self._parts[-1].final, self.failures[-1])

    def _begin(self, step: int | None = None) -> None:
        self._tries += 1
        self._writing = self._executor.submit(self._write)
        if not self._run.saving.asynchronous:
            self._finish(self._step if step is None else step)

    def _write(self) -> None:
        for part in self._parts:
            if not part.committed:
                part.write()

    def _finish(self, step: int) -> None:
        """Ends the write of this rank, then, if every rank wrote, commits."""
        began_at = time.monotonic()
        assert self._writing is not None
        failure: str | None = None
        try:
            self._writing.result()
        except WRITE_ERRORS as error:
            failure = failure_of(error)
        self._writing = None
        failure = next((failure for failure in gathered(failure) if failure), None)
        for part in self._parts:
            failure = failure or self._commit(part)
        self._stalled_seconds += time.monotonic() - began_at
        if failure:
            self._failed(step, failure)
        else:
            self._succeeded()

    def _commit(self, part: Checkpoint) -> str | None:
        """Why a part cannot be committed yet; UserError if it must not be."""
        if part.committed:
            return None
        failure = part.seal()
        if failure:
            return failure
        objection = None
        if self._rank_zero:
            successor = self._attempt.successor()
            objection = SupersededError(successor) if successor else self._stale(part)
        objection = from_rank_zero(objection)
        if objection:
            raise objection
        return part.publish()

    def _stale(self, part: Checkpoint) -> UserError | None:
        """An error if nothing but time lies between the last checkpoint and this one."""
        record, last = part.record, self._last
        assert record
        if record.average or not last or not self._must_differ or not same_shards(record, last.files):
            return None
        return UserError(
            f"step {record.step} is identical to step {last.step}: nothing was learned in between, or the engine wrote "
            f"the older weights again; look at grad_norm in {self._directory.metrics}"
        )

    def _succeeded(self) -> None:
        if self._rank_zero:
            record = self._parts[-1].record
            self._last = record
            with contextlib.suppress(OSError):  # then they are made when they are needed, or the save fails
                self._reserve()
            self._rotate()
        self._log(self._step, save_seconds=time.monotonic() - self._began_at, save_stall_seconds=self._stalled_seconds)
        self._parts = []

    def _rotate(self) -> None:
        for step in self._directory.complete_restarts()[: -self._run.saving.restart_keep]:
            remove_directory(self._directory.restart(step))

    def _failed(self, step: int, failure: str) -> None:
        self._again_at = step + 2 ** (self._tries - 1)
        if self._tries == 1:
            self.failures.append(failure)
        self.failures[-1] = failure
        if self._rank_zero:
            with contextlib.suppress(OSError):  # what cannot be removed is removed by the next attempt
                for part in self._parts:
                    if not part.committed:
                        part.clear()
            print(
                f"warning: step {self._step} could not be saved: {failure}; training goes on and tries again",
                file=sys.stderr,
                flush=True,
            )
        from_rank_zero(None)  # nobody writes again before it is cleared
        self._log(self._step, save_failed=1)

    def _gave_up(self, final: Path, failure: str) -> UserError:
        return UserError(
            f"could not save {final}: {failure}; free space there and run again, training goes on from the checkpoint "
            f"before it"
        )

    def close(self) -> None:
        """Removes every directory that became no checkpoint."""
        if self._rank_zero:
            for parent in self._asides:
                for aside in parent.glob(f"{ASIDE}attempt{self._attempt.number}.*"):
                    shutil.rmtree(aside, ignore_errors=True)
