"""Checkpoints of either engine, opened: hash-checked, of the run beside it, weights by HF name."""

from collections.abc import Collection
from pathlib import Path

from pydantic import ValidationError

from base.errors import UserError, explain_validation
from base.frozen import fingerprint
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.megatron_shards import MegatronWeights
from ckpt_tools.formats.parallel import verify_in_parallel
from ckpt_tools.formats.weights import Weights, check_tensors
from train.model.config import ModelConfig, parameter_shapes
from train.run.config import RunConfig, load_run
from train.run.dcp_metadata import METADATA
from train.run.directory import (
    CHECKPOINT_JSON,
    MODEL_WEIGHTS,
    CheckpointRecord,
    RunDirectory,
    read_checkpoint_record,
)


def verified_record(checkpoint: Path) -> CheckpointRecord:
    """Return the record of a checkpoint, if every file has the recorded size and hash.

    Raises:
        UserError: a file is missing or was changed.
    """
    record = read_checkpoint_record(checkpoint)
    verify_recorded(checkpoint, record, record.files)
    return record


def verify_recorded(checkpoint: Path, record: CheckpointRecord, names: Collection[str]) -> None:
    """Raise UserError unless files have the size and hash that checkpoint.json records of them."""
    for name in names:
        if name not in record.files:
            raise UserError(
                f"{checkpoint / name} is not in {CHECKPOINT_JSON}; restore both or give another"
                " checkpoint"
            )
    files = {name: record.files[name] for name in names}
    verify_in_parallel(checkpoint, files, "restore it or give another checkpoint")


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


def open_weights(checkpoint: Path, record: CheckpointRecord) -> Weights:
    """Open the weights of a checkpoint, which the model computed with, by HF name.

    Only files that are opened are hashed: `.metadata` before it is read, then the files of the
    weights. Optimizer state has files of its own, several times as large, that stay closed.

    Raises:
        UserError: a file was changed, or its keys or shapes are not those of its model.
    """
    model = model_of(checkpoint, record)
    if record.engine == "megatron":
        # Hashed before it is unpickled; only it says which files hold the weights.
        verify_recorded(checkpoint, record, [METADATA])
        sharded = MegatronWeights(checkpoint, model)
        verify_recorded(checkpoint, record, sharded.files)
        return sharded

    # DeepSpeed checkpoints and imports hold whole tensors.
    names = [name for name in record.files if name.startswith(Path(MODEL_WEIGHTS).stem)]
    verify_recorded(checkpoint, record, names)
    weights, shapes = HFWeights(checkpoint), parameter_shapes(model)
    check_tensors(weights.tensors, shapes, checkpoint, "give another checkpoint")
    # In the order of the model, as `Weights` has them.
    weights.tensors = {name: weights.tensors[name] for name in shapes}
    return weights
