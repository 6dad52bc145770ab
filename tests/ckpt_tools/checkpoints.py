"""Sealing checkpoints by hand: of untrained runs, or after a change that hashes must hide."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from base.files import record_files
from base.frozen import fingerprint
from ckpt_tools.checkpoint import open_weights
from ckpt_tools.formats.megatron_shards import MegatronWeights
from ckpt_tools.formats.weights import Weights, read_whole
from ckpt_tools.hf.directory import LINEAGE_JSON
from tests.sealing import reseal
from train.model.config import ModelConfig
from train.run.config import RunConfig
from train.run.directory import CHECKPOINT_JSON, CheckpointRecord, read_checkpoint_record


def all_of(weights: Weights) -> dict[str, Tensor]:
    """Every tensor, whole."""
    return {name: read_whole(weights, name) for name in weights.tensors}


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Every HF tensor of a checkpoint, as it was trained."""
    return all_of(open_weights(checkpoint, read_checkpoint_record(checkpoint)))


def read_shards(directory: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Every HF tensor of megatron's shards, sealed or not."""
    return all_of(MegatronWeights(directory, model))


def read_snapshot(directory: Path, run: RunConfig) -> dict[str, Tensor]:
    """Every HF tensor of what the ranks of a run's engine have written, without a record."""
    if run.engine == "megatron":
        return read_shards(directory, run.model)
    return {
        name: weight
        for path in directory.glob("model*.safetensors")
        for name, weight in load_file(path).items()
    }


def seal(checkpoint: Path, **changes: Any) -> None:
    """Writes checkpoint.json again, with the hashes of the files as they are now."""
    record = json.loads((checkpoint / CHECKPOINT_JSON).read_text())
    (checkpoint / CHECKPOINT_JSON).unlink()
    record["files"] = {name: file.model_dump() for name, file in record_files(checkpoint).items()}
    reseal(checkpoint / CHECKPOINT_JSON, record | changes)


def seal_export(hf_dir: Path, **changes: Any) -> None:
    """Writes lineage.json again or anew, with the hashes of the files as they are now."""
    path = hf_dir / LINEAGE_JSON
    lineage = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    files = {name: record.model_dump() for name, record in record_files(hf_dir).items()}
    reseal(path, lineage | changes | {"files": files})


def write_record(checkpoint: Path, run: RunConfig, step: int, **fields: Any) -> None:
    """The checkpoint.json of a run's step, over the files that are there."""
    values: dict[str, Any] = {
        "run": run.name,
        "fingerprint": fingerprint(run),
        "step": step,
        "tokens": step * run.tokens_per_step,
        "learning_rate": 1e-3,
        "train_loss": 5.0,
        "held_out_loss": 5.1,
        "engine": run.engine,
        "precision": run.precision,
        "world_size": 2,
        "layout": {"tensor": 1, "pipeline": 1, "data": 2},
        "attempt": 1,
        "data_sha256": {"train": "0" * 64, "held_out": "0" * 64},
        "model": run.model.model_dump(mode="json"),
    }
    record = CheckpointRecord(**(values | fields), files=record_files(checkpoint))
    reseal(checkpoint / CHECKPOINT_JSON, record.model_dump(mode="json"))
