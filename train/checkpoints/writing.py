"""One checkpoint on its way to the disk: copied, written, sealed, published.

The protocol is in `train.checkpoints`; `train.checkpoints.saver` says when. Until it is published
a checkpoint can be written again from the same copy.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from base.files import FileRecord, fsync_path, record_file, write_json
from train.distributed import from_rank_zero, gathered
from train.engine import Engine
from train.run.directory import CHECKPOINT_JSON, PROBE, CheckpointRecord, RunDirectory

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)
READ_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
    SafetensorError,
    CheckpointException,
)
TORCH_WRITER, TORCH_READER = "PytorchStreamWriter", "PytorchStreamReader"  # of torch's errors
UNFINISHED = ".unfinished."  # begins the name of a directory that is not complete yet


def failure_of(error: BaseException) -> str:
    """Return a write error as one line; raise it again if it is not about a file."""
    cause: BaseException | None = error
    # Closing the file, torch's writer hides what went wrong before.
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, RuntimeError) and cause is None and TORCH_WRITER not in str(error):
        raise error
    lines = str(cause or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def damage_of(error: BaseException) -> str | None:
    """Return a read error as one line; None if it is not about a file."""
    if isinstance(error, CheckpointException):
        causes = [damage_of(cause) for cause, _ in error.failures.values()]
        return next((cause for cause in causes if cause), None)
    if isinstance(
        error, OSError | EOFError | pickle.UnpicklingError | SafetensorError
    ) or TORCH_READER in str(error):
        return " ".join(str(error).split())[:300] or type(error).__name__
    return damage_of(error.__cause__) if error.__cause__ else None


class Checkpoint:
    """A copy of the engine's state as it is now, on its way to the directory `final`.

    Args:
        engine: every rank calls.
        final: directory of the complete checkpoint.
        attempt: number of this attempt.
        probe_BS: token ids [B, S] for which an export has to reproduce every module's output.
        fields: the fields of CheckpointRecord but `files`; those of an average say so.
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
        self._probe = {"input_ids": probe_BS.contiguous(), **engine.probe(probe_BS)}
        weights_only = fields.get("average") is not None
        self._snapshot = engine.snapshot(self._directory, weights_only=weights_only)
        self._written: dict[str, FileRecord] = {}  # by this rank
        self.complete = False

    def write(self) -> None:
        """Write and hash this rank's files, in a thread perhaps: no collective."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._written = self._recorded(self._snapshot.write())

    def _recorded(self, names: list[str]) -> dict[str, FileRecord]:
        return {name: record_file(self._directory / name) for name in names}

    def seal(self) -> str | None:
        """Write what ranks share, and checkpoint.json, once every rank has written.

        Every rank calls. Returns why it failed, on every rank.
        """
        failure, shared = None, {}
        try:
            shared = self._recorded(self._snapshot.seal())
        except WRITE_ERRORS as error:
            failure = failure_of(error)
        outcomes = gathered((failure, self._written | shared))
        failure = next((failure for failure, _ in outcomes if failure), None)
        if failure:
            return str(failure)
        files = {name: record for _, records in outcomes for name, record in records.items()}
        return _on_rank_zero(lambda: self._write_record(files))

    def _write_record(self, files: dict[str, FileRecord]) -> None:
        save_file(self._probe, self._directory / PROBE)
        (self._directory / PROBE).chmod(0o644)
        files = files | self._recorded([PROBE])
        present = {
            str(path.relative_to(self._directory))
            for path in self._directory.rglob("*")
            if path.is_file()
        }
        assert present <= files.keys(), f"{sorted(present - files.keys())} would be in no record"
        record = CheckpointRecord(**self._fields, files=dict(sorted(files.items())))
        write_json(self._directory / CHECKPOINT_JSON, record.model_dump(mode="json"))
        fsync_path(self._directory)

    def publish(self) -> str | None:
        """Rename the directory: the checkpoint is complete. Every rank calls; why it failed."""

        def rename() -> None:
            remove_checkpoint(self.final)  # of an earlier attempt, which came to this step too
            os.rename(self._directory, self.final)
            fsync_path(self.final.parent)

        failure = _on_rank_zero(rename)
        self.complete = failure is None
        return failure

    def remove_unfinished(self) -> None:
        """Remove what was written, on rank 0."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _on_rank_zero(action: Callable[[], None]) -> str | None:
    """Write on rank 0; return why that failed, on every rank."""
    failure = None
    if dist.get_rank() == 0:
        try:
            action()
        except WRITE_ERRORS as error:
            failure = failure_of(error)
    failure = from_rank_zero(failure)
    return None if failure is None else str(failure)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, checkpoint.json first: half of it must not pass for a complete one."""
    if checkpoint.exists():
        (checkpoint / CHECKPOINT_JSON).unlink(missing_ok=True)
        shutil.rmtree(checkpoint)


def remove_unfinished(directory: RunDirectory) -> None:
    """Remove what an attempt that died while saving or rotating left; for the newest attempt."""
    for parent in (directory.checkpoints, directory.restarts):
        for unfinished in parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(unfinished)
    for restart in directory.restarts.glob("step*"):
        if not (restart / CHECKPOINT_JSON).exists():
            shutil.rmtree(restart)
