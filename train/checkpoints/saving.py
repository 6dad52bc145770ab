"""Saving while training continues: each checkpoint is copied, written, sealed and published.

One save at a time. `train.loop` says when, the protocol is in `train.checkpoints`.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from base.environment import version
from base.errors import UserError
from base.files import (
    FileRecord,
    fsync_path,
    open_to_readers,
    record_file,
    remove_directory,
    write_sealed,
)
from train.checkpoints.attempt import Attempt, SupersededError
from train.distributed import from_rank_zero, gathered
from train.engine import Engine
from train.run.directory import CHECKPOINT_JSON, PROBE, CheckpointRecord, RunDirectory
from train.run.saving import SavingConfig

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)
TORCH_WRITER = "PytorchStreamWriter"  # of torch's errors
UNFINISHED = ".unfinished."  # begins the name of a directory that is not complete yet


def failure_of(error: BaseException) -> str:
    """Return a write error as one line; raise it again if it is not about a file."""
    cause: BaseException | None = error
    # Closing the file, torch's writer hides what went wrong before.
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    # Any other RuntimeError is a fault of the program, and keeps its traceback.
    if isinstance(error, RuntimeError) and cause is None and TORCH_WRITER not in str(error):
        raise error
    lines = str(cause or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def agreed[T](write: Callable[[], T], final: Path) -> list[T]:
    """Write on every rank; return all results. UserError on every rank if one could not."""
    result, failure = None, None
    try:
        result = write()
    except WRITE_ERRORS as error:
        failure = failure_of(error)
    # Exchanged before anyone raises: the other ranks would wait for a rank that had left.
    outcomes = gathered((result, failure))
    failure = next((failure for _, failure in outcomes if failure), None)
    if failure:
        raise UserError(
            f"could not save {final}: {failure}; free space there and run again, from the"
            " checkpoint before it"
        )
    return [result for result, _ in outcomes]


class PendingCheckpoint:
    """A copy of the engine's state as it is now, on its way to the directory `final`.

    Every rank calls every method.

    Args:
        engine: of the state.
        final: directory of the complete checkpoint.
        attempt: number of this attempt.
        probe_BS: token ids [B, S] for which an export has to reproduce every module's output.
        fields: the fields of CheckpointRecord but `files`.
    """

    def __init__(
        self,
        engine: Engine,
        final: Path,
        *,
        attempt: int,
        probe_BS: torch.Tensor,
        fields: dict[str, Any],
    ) -> None:
        self.final, self._fields = final, fields
        self._directory = final.parent / f"{UNFINISHED}{final.name}.attempt{attempt}"
        # The probe and the copy are of the same weights: an export is checked against the probe.
        self._probe = {"input_ids": probe_BS.contiguous(), **engine.probe(probe_BS)}
        self._snapshot = engine.snapshot(self._directory, weights_only=fields["weights_only"])
        self._written: dict[str, FileRecord] = {}  # by this rank

    def write(self) -> None:
        """Write and hash this rank's files, in a thread perhaps: no collective."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._written = self._recorded(self._snapshot.write())

    def _recorded(self, names: list[str]) -> dict[str, FileRecord]:
        return {name: record_file(self._directory / name) for name in names}

    def seal(self) -> None:
        """Write what ranks share, and checkpoint.json, once every rank has written."""
        outcomes = agreed(lambda: self._written | self._recorded(self._snapshot.seal()), self.final)
        files = {name: record for records in outcomes for name, record in records.items()}
        agreed(lambda: self._write_record(files) if dist.get_rank() == 0 else None, self.final)

    def _write_record(self, files: dict[str, FileRecord]) -> None:
        save_file(self._probe, self._directory / PROBE)
        open_to_readers(self._directory / PROBE)
        files = files | self._recorded([PROBE])
        # A file without a hash could be damaged unnoticed: none may be left out of the record.
        present = {
            str(path.relative_to(self._directory))
            for path in self._directory.rglob("*")
            if path.is_file()
        }
        assert present <= files.keys(), f"{sorted(present - files.keys())} would be in no record"
        files = dict(sorted(files.items()))
        record = CheckpointRecord(**self._fields, quantdyn=version(), files=files)
        # The record is last: a directory without it does not count as a checkpoint.
        write_sealed(self._directory / CHECKPOINT_JSON, record.model_dump(mode="json"))
        fsync_path(self._directory)

    def publish(self) -> None:
        """Rename the directory: the checkpoint is complete.

        One that is complete already stays: an earlier attempt came to this step, too, and what was
        measured of it is of its weights.
        """

        def rename() -> None:
            if dist.get_rank() != 0:
                return
            if (self.final / CHECKPOINT_JSON).exists():
                remove_directory(self._directory)
                return
            remove_checkpoint(self.final)  # half of one, which somebody removed
            os.rename(self._directory, self.final)
            fsync_path(self.final.parent)

        agreed(rename, self.final)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, checkpoint.json first: half of it must not pass for a complete one."""
    if checkpoint.exists():
        (checkpoint / CHECKPOINT_JSON).unlink(missing_ok=True)
        shutil.rmtree(checkpoint)


def remove_unfinished(directory: RunDirectory) -> None:
    """Remove what an attempt that died while saving or rotating left; for the newest attempt."""
    for parent in (directory.checkpoints, directory.restarts):
        for unfinished in parent.glob(f"{UNFINISHED}*"):
            remove_directory(unfinished)
    # Rotation removes checkpoint.json first: what has none is the rest of a checkpoint.
    for restart in directory.restarts.glob("step*"):
        if not (restart / CHECKPOINT_JSON).exists():
            shutil.rmtree(restart)


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
        self._pending: list[PendingCheckpoint] = []
        self._writing: Future[None] | None = None  # of the save that is not complete yet
        self._step = 0
        self._began_at = self._stalled_seconds = 0.0

    def copy(self, final: Path, fields: dict[str, Any], *, weights_only: bool) -> PendingCheckpoint:
        """Return a copy of the engine's weights, or of all its state, as it is now, for `save`."""
        return PendingCheckpoint(
            self._engine,
            final,
            attempt=self._attempt.number,
            probe_BS=self._probe_BS,
            fields=fields | {"weights_only": weights_only},
        )

    def save(
        self, step: int, checkpoints: list[PendingCheckpoint], *, copying_seconds: float
    ) -> None:
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

    def flush(self) -> None:
        """Wait until every rank has written the last save, then publish it.

        Raises:
            UserError: it cannot be written; every earlier checkpoint is as it was.
            SupersededError: a later attempt has begun.
        """
        if self._writing is None:
            return
        began_at = time.monotonic()
        # Waits for the thread of this rank, then for all ranks, whose files `seal` records.
        agreed(self._writing.result, self._pending[-1].final)
        self._writing = None
        for checkpoint in self._pending:
            checkpoint.seal()
            # Asked anew for each checkpoint, just before it becomes visible.
            successor = from_rank_zero(self._attempt.successor() if self._rank_zero else None)
            if successor:
                raise SupersededError(successor)
            checkpoint.publish()
        self._pending = []
        self._stalled_seconds += time.monotonic() - began_at

        # Older ones go only now, when a newer one is complete.
        self.rotate(self._settings.restart_keep)
        self._log(
            self._step,
            save_seconds=time.monotonic() - self._began_at,
            save_stall_seconds=self._stalled_seconds,
        )

    def rotate(self, keep: int) -> None:
        """Remove all restart checkpoints but the newest `keep`."""
        if self._rank_zero:
            restarts = self._directory.complete_restarts()
            for step in restarts[: max(0, len(restarts) - keep)]:
                remove_checkpoint(self._directory.restart(step))
