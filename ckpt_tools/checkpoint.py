"""Checkpoints of either engine, opened: hash-checked, of the run beside it, weights by HF name."""

from pathlib import Path

from pydantic import ValidationError

from base.errors import UserError, explain_validation
from base.frozen import fingerprint
from ckpt_tools.formats.deepspeed_weights import MainWeights, TrainedWeights
from ckpt_tools.formats.megatron_shards import MegatronWeights
from ckpt_tools.formats.parallel import first_damage_in_parallel
from ckpt_tools.formats.weights import DTYPES, Weights
from train.model.config import ModelConfig
from train.run.config import RunConfig, load_run
from train.run.directory import (
    CHECKPOINT_JSON,
    CheckpointRecord,
    RunDirectory,
    read_checkpoint_record,
)


def verified_record(checkpoint: Path, processes: int) -> CheckpointRecord:
    """Return the record of a checkpoint, if every file has the recorded size and hash.

    Nothing opens a file of a checkpoint before this has passed: sharded ones hold pickles.

    Raises:
        UserError: a file is missing or was changed.
    """
    record = read_checkpoint_record(checkpoint)
    damage = first_damage_in_parallel(checkpoint, record.files, processes)
    if damage:
        raise UserError(f"{damage}; restore it or give another checkpoint")
    return record


def run_of(checkpoint: Path, record: CheckpointRecord) -> tuple[RunDirectory, RunConfig]:
    """Return the run of a checkpoint RUN/checkpoints/NAME, from RUN/run.json.

    Raises:
        UserError: there is no run.json, or it is of another configuration.
    """
    directory = RunDirectory(checkpoint.resolve().parent.parent)
    run = load_run(directory.run_json)
    if fingerprint(run) != record.fingerprint:
        raise UserError(
            f"{checkpoint} is not of the run in {directory.run_json}; give it beside its own"
            " run.json"
        )
    return directory, run


def model_of(checkpoint: Path, record: CheckpointRecord) -> ModelConfig:
    """Return the architecture of a checkpoint."""
    try:
        return ModelConfig.model_validate(record.model)
    except ValidationError as error:
        raise explain_validation(str(checkpoint / CHECKPOINT_JSON), error) from None


def open_weights(checkpoint: Path, record: CheckpointRecord, *, main: bool = False) -> Weights:
    """Open the weights of a hash-checked checkpoint, in its precision, or the optimizer's fp32.

    Raises:
        UserError: its keys or shapes are not those of its model, or it has no main weights.
    """
    model = model_of(checkpoint, record)
    if record.engine == "megatron":
        return MegatronWeights(checkpoint, model, main=main)
    if main:
        return MainWeights(checkpoint, model)
    return TrainedWeights(checkpoint, model, DTYPES[record.precision])
