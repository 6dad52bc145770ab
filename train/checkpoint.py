"""One checkpoint on its way to disk: copied, written aside by every rank, sealed by rank 0, then renamed.

A checkpoint is complete or not there. Whatever fails before the rename can be tried again from the same copy.
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

from train.distributed import from_rank_zero, gathered
from train.engine import Engine
from train.run_directory import (
    CHECKPOINT_JSON,
    PROBE,
    CheckpointRecord,
    FileRecord,
    fsync_path,
    record_file,
    write_json,
)

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)
READ_ERRORS = (OSError, EOFError, RuntimeError, pickle.UnpicklingError, SafetensorError, CheckpointException)
TORCH_WRITER, TORCH_READER = "PytorchStreamWriter", "PytorchStreamReader"  # begin torch's errors about a file
SHARDS = (".distcp", ".safetensors")  # what holds tensors


def failure_of(error: BaseException) -> str:
    """One line on a write that failed; raises the error again if it is about something else than a file."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):  # torch's writer, closing the file, hides what went wrong before
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, RuntimeError) and cause is None and TORCH_WRITER not in str(error):
        raise error
    lines = str(cause or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def damage_of(error: BaseException) -> str | None:
    """One line on a file that cannot be read; None if the error is about something else."""
    if isinstance(error, CheckpointException):
        causes = [damage_of(cause) for cause, _ in error.failures.values()]
        return next((cause for cause in causes if cause), None)
    if isinstance(error, OSError | EOFError | pickle.UnpicklingError | SafetensorError) or TORCH_READER in str(error):
        return " ".join(str(error).split())[:300] or type(error).__name__
    return damage_of(error.__cause__) if error.__cause__ else None


class Checkpoint:
    """A copy of the engine's state as it is now, to become the directory `final`.

    Args:
        engine: every rank calls.
        final: where the checkpoint is to lie.
        aside: an empty directory on the same file system.
        probe_BS: token ids [B, S] for which an export has to reproduce what every module puts out.
        fields: the fields of CheckpointRecord but `files`; those of an average say so.
    """

    def __init__(
        self, engine: Engine, final: Path, aside: Path, *, probe_BS: torch.Tensor, fields: dict[str, Any]
    ) -> None:
        self.final = final
        self._fields, self._aside = fields, aside
        self._probe = {"input_ids": probe_BS.contiguous(), **engine.probe(probe_BS)}
        self._snapshot = engine.snapshot(aside, weights_only=fields.get("average") is not None)
        self._written: dict[str, FileRecord] = {}  # by this rank
        self.record: CheckpointRecord | None = None  # on rank 0, once sealed
        self.committed = False

    def write(self) -> None:
        """Writes and hashes this rank's part. No collective: it may run in a thread while training goes on."""
        self._aside.mkdir(exist_ok=True)
        self._written = self._hashed(self._snapshot.write())

    def _hashed(self, names: list[str]) -> dict[str, FileRecord]:
        return {name: record_file(self._aside / name) for name in names}

    def seal(self) -> str | None:
        """Makes it whole, once every rank has written its part. Every rank calls; why it failed, on every rank."""
        failure, written = None, {}
        try:
            written = self._hashed(self._snapshot.seal())
        except WRITE_ERRORS as error:
            failure = failure_of(error)
        parts = gathered((failure, self._written | written))
        failures = [str(failure) for failure, _ in parts if failure]
        if failures:
            return failures[0]

        def write_record() -> None:
            save_file(self._probe, self._aside / PROBE)
            (self._aside / PROBE).chmod(0o644)
            files = {name: file for _, files in parts for name, file in files.items()} | self._hashed([PROBE])
            present = {str(path.relative_to(self._aside)) for path in self._aside.rglob("*") if path.is_file()}
            assert present <= files.keys(), f"{sorted(present - files.keys())} would be in no record"
            self.record = CheckpointRecord(**self._fields, files=dict(sorted(files.items())))
            write_json(self._aside / CHECKPOINT_JSON, self.record.model_dump(mode="json"))
            fsync_path(self._aside)

        return _on_rank_zero(write_record)

    def publish(self) -> str | None:
        """Gives it its name. Every rank calls; why it failed, on every rank."""

        def rename() -> None:
            remove_directory(self.final)  # what an earlier attempt left there; this one has come to the step again
            os.rename(self._aside, self.final)
            fsync_path(self.final.parent)

        failure = _on_rank_zero(rename)
        self.committed = failure is None
        return failure

    def clear(self) -> None:
        """Removes what was written, to make room. The directory stays: a full disk might not let it come back."""
        for path in self._aside.iterdir() if self._aside.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _on_rank_zero(action: Callable[[], None]) -> str | None:
    """Writes on rank 0; why that failed, on every rank."""
    failure = None
    if dist.get_rank() == 0:
        try:
            action()
        except WRITE_ERRORS as error:
            failure = failure_of(error)
    failure = from_rank_zero(failure)
    return None if failure is None else str(failure)


def remove_directory(checkpoint: Path) -> None:
    """Removes a checkpoint, its seal first: half of it must not pass for a whole one."""
    if checkpoint.exists():
        (checkpoint / CHECKPOINT_JSON).unlink(missing_ok=True)
        shutil.rmtree(checkpoint)


def same_shards(record: CheckpointRecord, other: dict[str, FileRecord]) -> bool:
    """Whether all tensors of a checkpoint are those of another one, byte for byte."""

    def shards(files: dict[str, FileRecord]) -> dict[str, str]:
        return {name: file.sha256 for name, file in files.items() if name.endswith(SHARDS) and name != PROBE}

    return bool(shards(record.files)) and shards(record.files) == shards(other)
