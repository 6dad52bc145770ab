"""Saving while training continues, one save at a time.

`train.loop` says when; `train.checkpoints.writing` writes. The protocol is in `train.checkpoints`.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoints.attempt import Attempt, SupersededError
from train.checkpoints.writing import Checkpoint, agreed, remove_checkpoint
from train.distributed import from_rank_zero
from train.engine import Engine
from train.run.directory import RunDirectory
from train.run.saving import SavingConfig


class Saver:
    """The saves of one attempt. Every rank calls every method, at the same steps.

    A save is all that one step leaves: averages, if any, and the checkpoint itself, published last.
    """

    def __init__(
        self,
        settings: SavingConfig,
        engine: Engine,
        directory: RunDirectory,
        attempt: Attempt,
        probe_BS: torch.Tensor,
        log: Callable[..., None],
    ) -> None:
        self._settings, self._engine, self._log = settings, engine, log
        self._directory, self._attempt, self._probe_BS = directory, attempt, probe_BS
        self._rank_zero = dist.get_rank() == 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: list[Checkpoint] = []
        self._writing: Future[None] | None = None  # of the save that is not complete yet
        self._step = 0
        self._began_at = self._stalled_seconds = 0.0

    def copy(self, final: Path, fields: dict[str, Any], *, weights_only: bool) -> Checkpoint:
        """Return a copy of the engine's weights, or of all its state, as it is now, for `save`."""
        return Checkpoint(
            self._engine,
            final,
            attempt=self._attempt.number,
            probe_BS=self._probe_BS,
            fields=fields | {"weights_only": weights_only},
        )

    def save(self, step: int, checkpoints: list[Checkpoint], *, copying_seconds: float) -> None:
        """Begin to write the checkpoints of a step, once `flush` has ended the save before it."""
        assert self._writing is None
        self._step, self._pending = step, checkpoints
        self._began_at, self._stalled_seconds = time.monotonic() - copying_seconds, copying_seconds
        self._writing = self._executor.submit(self._write)
        if not self._settings.asynchronous:
            self.flush()

    def _write(self) -> None:
        for checkpoint in self._pending:
            checkpoint.write()

    @property
    def writing(self) -> bool:
        """Return whether this rank is still writing."""
        return self._writing is not None and not self._writing.done()

    def advance(self, *, writing: bool) -> None:
        """Complete the save, after an update, unless any rank is `writing`."""
        if not writing:
            self.flush()

    def flush(self) -> None:
        """Wait until every rank has written the last save, then publish it.

        Raises:
            UserError: it cannot be written; every earlier checkpoint is as it was.
            SupersededError: a later attempt has begun.
        """
        if self._writing is None:
            return
        began_at = time.monotonic()
        agreed(self._writing.result, self._pending[-1].final)
        self._writing = None
        for checkpoint in self._pending:
            checkpoint.seal()
            successor = from_rank_zero(self._attempt.successor() if self._rank_zero else None)
            if successor:
                raise SupersededError(successor)
            checkpoint.publish()
        self._pending = []
        self._stalled_seconds += time.monotonic() - began_at

        self._rotate(self._settings.restart_keep)
        self._log(
            self._step,
            save_seconds=time.monotonic() - self._began_at,
            save_stall_seconds=self._stalled_seconds,
        )

    def end(self) -> None:
        """Remove the restart checkpoints of a run that has come to its end."""
        self._rotate(0)

    def _rotate(self, keep: int) -> None:
        if self._rank_zero:
            restarts = self._directory.complete_restarts()
            for step in restarts[: max(0, len(restarts) - keep)]:
                remove_checkpoint(self._directory.restart(step))
