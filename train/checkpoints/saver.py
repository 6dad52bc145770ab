"""Saving while training continues: one save at a time, written again once when it fails.

`train.loop` says when; `train.checkpoints.writing` writes. The protocol is in `train.checkpoints`.
"""

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from base.errors import UserError
from train.checkpoints.attempt import Attempt, SupersededError
from train.checkpoints.writing import WRITE_ERRORS, Checkpoint, failure_of, remove_checkpoint
from train.distributed import from_rank_zero, gathered
from train.engine import Engine
from train.run.config import SavingConfig
from train.run.directory import RunDirectory


class Log(Protocol):
    """The loop's log of metrics."""

    def __call__(self, step: int, **values: float) -> None:
        """Append a row."""
        ...


class Saver:
    """The saves of one attempt. Every rank calls every method, at the same steps.

    A save is all that one step leaves: averages, if any, and the checkpoint itself, published last.

    Attributes:
        failures: saves of this attempt that failed at first, in words.
    """

    def __init__(
        self,
        settings: SavingConfig,
        engine: Engine,
        directory: RunDirectory,
        attempt: Attempt,
        log: Log,
    ) -> None:
        self._settings, self._engine, self._log = settings, engine, log
        self._directory, self._attempt = directory, attempt
        self._rank_zero = dist.get_rank() == 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: list[Checkpoint] = []  # of the save that is not complete yet
        self._writing: Future[None] | None = None
        self._step = 0
        self._began_at = self._stalled_seconds = 0.0
        self.failures: list[str] = []

    def copy(self, final: Path, *, probe_BS: torch.Tensor, fields: dict[str, Any]) -> Checkpoint:
        """Return a copy of the engine's state as it is now, for `save`."""
        attempt = self._attempt.number
        return Checkpoint(self._engine, final, attempt=attempt, probe_BS=probe_BS, fields=fields)

    def save(self, step: int, checkpoints: list[Checkpoint], *, copying_seconds: float) -> None:
        """Begin to write the checkpoints of a step, once `flush` has ended the save before it."""
        assert not self._pending
        self._step, self._pending = step, checkpoints
        self._began_at, self._stalled_seconds = time.monotonic() - copying_seconds, copying_seconds
        self._begin()
        if not self._settings.asynchronous:
            self._finish()

    @property
    def writing(self) -> bool:
        """Return whether this rank is still writing."""
        return self._writing is not None and not self._writing.done()

    def advance(self, *, writing: bool) -> None:
        """Complete the save, after an update, unless any rank is `writing`."""
        if self._writing is not None and not writing:
            self._finish()

    def flush(self) -> None:
        """Wait until the last save is complete; write it once more if it failed.

        Raises:
            UserError: it cannot be written; every earlier checkpoint is as it was.
        """
        if self._writing is not None:
            self._finish()
        if self._pending:
            self._begin()
            self._finish()
        if self._pending:
            raise UserError(
                f"could not save {self._pending[-1].final}: {self.failures[-1]}; free space there"
                " and run again, training resumes from the checkpoint before it"
            )

    def _begin(self) -> None:
        self._writing = self._executor.submit(self._write)

    def _write(self) -> None:
        for checkpoint in self._pending:
            if not checkpoint.complete:
                checkpoint.write()

    def _finish(self) -> None:
        """Wait for this rank's write, then, if every rank has written, publish."""
        began_at = time.monotonic()
        assert self._writing is not None
        failure: str | None = None
        try:
            self._writing.result()
        except WRITE_ERRORS as error:
            failure = failure_of(error)
        self._writing = None
        failure = next((failure for failure in gathered(failure) if failure), None)
        for checkpoint in self._pending:
            if not failure and not checkpoint.complete:
                failure = self._publish(checkpoint)
        self._stalled_seconds += time.monotonic() - began_at
        if failure:
            self._failed(failure)
        else:
            self._succeeded()

    def _publish(self, checkpoint: Checkpoint) -> str | None:
        """Seal and publish; return why it failed. SupersededError if a newer attempt has begun."""
        failure = checkpoint.seal()
        if failure:
            return failure
        successor = from_rank_zero(self._attempt.successor() if self._rank_zero else None)
        if successor:
            raise SupersededError(successor)
        return checkpoint.publish()

    def _succeeded(self) -> None:
        if self._rank_zero:
            for step in self._directory.complete_restarts()[: -self._settings.restart_keep]:
                remove_checkpoint(self._directory.restart(step))
        self._pending = []
        self._log(
            self._step,
            save_seconds=time.monotonic() - self._began_at,
            save_stall_seconds=self._stalled_seconds,
        )

    def _failed(self, failure: str) -> None:
        self.failures.append(failure)
        if self._rank_zero:
            for checkpoint in self._pending:
                checkpoint.remove_unfinished()  # to make room
            print(
                f"warning: step {self._step} could not be saved: {failure}; training continues,"
                " and the next save writes it again",
                file=sys.stderr,
                flush=True,
            )
        from_rank_zero(None)  # no rank writes again before the directories are removed
        self._log(self._step, save_failed=1)
