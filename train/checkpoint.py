"""The commit of a checkpoint: written aside by all ranks, sealed by rank 0 with checkpoint.json, then renamed."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from train.command import UserError
from train.distributed import from_rank_zero
from train.engine import Engine
from train.run_directory import (
    CHECKPOINT_JSON,
    PROBE,
    CheckpointRecord,
    RunDirectory,
    fsync_path,
    record_files,
    step_name,
    verify_checkpoint,
    write_json,
)

PROBE_SEQUENCES, PROBE_TOKENS = 2, 64
TORCH_WRITER = "PytorchStreamWriter"  # what torch.save's errors of a full disk begin with


def remove_leftovers(directory: RunDirectory) -> None:
    """Removes what an attempt that died while saving left aside. Only the holder of the run's lock may call it."""
    for leftover in directory.checkpoints.glob(".step*"):
        shutil.rmtree(leftover)


def commit_checkpoint(engine: Engine, directory: RunDirectory, probe_BS: torch.Tensor, fields: dict[str, Any]) -> None:
    """Saves the engine's state and the probe (logits of a fixed batch) as a complete checkpoint, or not at all.

    Args:
        engine: every rank calls.
        directory: the run's.
        probe_BS: token ids [B, S] whose logits an export has to reproduce.
        fields: the fields of CheckpointRecord but `files`.

    Raises:
        UserError: the shards could not be written; nothing is left behind and older checkpoints are untouched.
    """
    rank_zero, final = dist.get_rank() == 0, directory.checkpoint(fields["step"])
    aside: Path | None = None
    try:
        if rank_zero:
            directory.checkpoints.mkdir(exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{step_name(fields['step'])}.", dir=directory.checkpoints))
            aside.chmod(0o755)
        aside = from_rank_zero(aside)
        assert aside is not None
        snapshot = engine.snapshot(aside, weights_only=False)
        snapshot.write()
        dist.barrier()
        snapshot.seal()
        probe = {"input_ids": probe_BS.contiguous(), "logits": engine.logits(probe_BS)}
        if rank_zero:
            save_file(probe, aside / PROBE)
            (aside / PROBE).chmod(0o644)
            record = CheckpointRecord(**fields, files=record_files(aside))
            write_json(aside / CHECKPOINT_JSON, record.model_dump(mode="json"))
            if final.exists():  # without its checkpoint.json, or it would not be saved again: it does not exist
                shutil.rmtree(final)
            os.rename(aside, final)
            fsync_path(directory.checkpoints)
        dist.barrier()
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, RuntimeError) and TORCH_WRITER not in str(error):
            raise  # no failed write
        cause = str(error).strip().splitlines()
        raise UserError(
            f"could not save {final}: {cause[-1] if cause else type(error).__name__}; free space there and run again, "
            f"training goes on from the checkpoint before it"
        ) from error


def resume(engine: Engine, directory: RunDirectory, fingerprint: str, data_sha256: dict[str, str]) -> int | None:
    """Loads the newest complete checkpoint, hash-checked; returns its step, or None for a run that has none.

    Raises:
        UserError: it is of another configuration or other data, or a file of it was changed.
    """
    newest, failure = None, None
    if dist.get_rank() == 0:  # one rank looks: on a shared file system they might not all see the same
        try:
            newest = _newest_checkpoint(directory, fingerprint, data_sha256)
        except UserError as error:
            failure = str(error)
    newest, failure = from_rank_zero((newest, failure))
    if failure:
        raise UserError(failure)
    if newest is None:
        return None
    engine.load(directory.checkpoint(newest))
    return int(newest)


def _newest_checkpoint(directory: RunDirectory, fingerprint: str, data_sha256: dict[str, str]) -> int | None:
    """Step of the newest complete checkpoint, after every check that needs no engine."""
    steps = directory.complete_steps()
    if not steps:
        return None
    newest = directory.checkpoint(steps[-1])
    record = verify_checkpoint(newest)
    if record.fingerprint != fingerprint:
        raise UserError(
            f"{newest} belongs to fingerprint {record.fingerprint}, run.json has {fingerprint}; "
            f"use another run name for another configuration"
        )
    if record.data_sha256 != data_sha256:
        raise UserError(f"{newest} was trained on other data than {directory.run_json} now points to; restore it")
    return steps[-1]
