"""One checkpoint on its way to the disk: copied, written, sealed, published.

The protocol is in `train.checkpoints`; `train.checkpoints.saver` says when.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from base.environment import version
from base.errors import UserError
from base.files import FileRecord, fsync_path, open_to_readers, record_file, write_sealed
from train.distributed import gathered
from train.engine import Engine
from train.run.directory import CHECKPOINT_JSON, PROBE, CheckpointRecord, RunDirectory

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)
TORCH_WRITER = "PytorchStreamWriter"  # of torch's errors
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


def agreed[T](write: Callable[[], T], final: Path) -> list[T]:
    """Write on every rank; return all results. UserError on every rank if one could not."""
    result, failure = None, None
    try:
        result = write()
    except WRITE_ERRORS as error:
        failure = failure_of(error)
    outcomes = gathered((result, failure))
    failure = next((failure for _, failure in outcomes if failure), None)
    if failure:
        raise UserError(
            f"could not save {final}: {failure}; free space there and run again, from the"
            " checkpoint before it"
        )
    return [result for result, _ in outcomes]


class Checkpoint:
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
        present = {
            str(path.relative_to(self._directory))
            for path in self._directory.rglob("*")
            if path.is_file()
        }
        assert present <= files.keys(), f"{sorted(present - files.keys())} would be in no record"
        files = dict(sorted(files.items()))
        record = CheckpointRecord(**self._fields, quantdyn=version(), files=files)
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
                shutil.rmtree(self._directory)
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
            shutil.rmtree(unfinished)
    for restart in directory.restarts.glob("step*"):
        if not (restart / CHECKPOINT_JSON).exists():
            shutil.rmtree(restart)
