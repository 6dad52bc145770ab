"""The start of a run from imported weights, `RunConfig.start_from`, instead of drawn ones.

`python -m ckpt_tools import` makes the checkpoint: weights in HF's form and the logits that
transformers computes with them.
"""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from base.digests import digest_of
from base.errors import UserError
from base.files import sha256_of
from train.data.tokenizer import TOKENIZER_JSON
from train.distributed import from_rank_zero
from train.engine import Engine
from train.model.config import ModelConfig
from train.model.precision import dtype_of
from train.run.config import RunConfig
from train.run.directory import (
    CHECKPOINT_JSON,
    IMPORTED_FROM,
    PROBE,
    CheckpointRecord,
    RunDirectory,
)

# Norm of the logits' difference over the norm of the logits. In fp32 it is the order of sums; in
# bf16 activations are rounded to 8 bits of mantissa.
LOGIT_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2}
DRAWING = {"initializer", "initializer_range"}  # of a model: how weights are drawn


def imported_checkpoint(run: RunConfig, directory: RunDirectory) -> Path:
    """Return the checkpoint that a run starts from; UserError unless run.json names this one."""
    assert run.start_from
    checkpoint = directory.resolve(run.start_from.checkpoint)
    path = checkpoint / CHECKPOINT_JSON
    if not path.is_file():
        raise UserError(
            f"start_from names no checkpoint, {checkpoint}; make it with 'ckpt_tools import'"
        )
    if sha256_of(path) != run.start_from.sha256:
        raise UserError(f"{path} has another SHA-256 than start_from names; import the model again")
    return checkpoint


def start(
    engine: Engine,
    run: RunConfig,
    directory: RunDirectory,
    checkpoint: Path,
    record: CheckpointRecord,
) -> None:
    """Load the weights of an imported checkpoint, whose hashes were checked. All ranks call.

    Raises:
        UserError: it is of another model or tokenizer, or the engine computes other logits from its
            weights.
    """
    if record.imported is None:
        raise UserError(
            f"{checkpoint} was not imported; name a run's checkpoint in branch_from instead"
        )
    own, imported = run.model, ModelConfig.model_validate(record.model)
    for key in type(own).model_fields:
        if key not in DRAWING and getattr(own, key) != getattr(imported, key):
            raise UserError(
                f"model.{key} is {getattr(own, key)} in run.json, {getattr(imported, key)} in"
                f" {checkpoint}; set it so"
            )
    tokenizer = record.files.get(f"{IMPORTED_FROM}/{TOKENIZER_JSON}")
    own_tokenizer = directory.resolve(run.data.tokenizer) / TOKENIZER_JSON
    if tokenizer and digest_of(own_tokenizer, tokenizer.algorithm) != tokenizer.digest:
        raise UserError(
            f"{own_tokenizer} is not the tokenizer of {checkpoint}; set data.tokenizer to"
            f" {checkpoint / IMPORTED_FROM} and prepare the data with it"
        )
    engine.start_from(_reader(checkpoint))
    _check_logits(engine, run, checkpoint)


def _reader(checkpoint: Path) -> Callable[[str], Tensor]:
    """Return a reader of whole tensors in fp32 by HF name."""
    places: dict[str, Path] = {}
    for path in sorted(checkpoint.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)

    def read(name: str) -> Tensor:
        with safe_open(places[name], "pt") as file:
            weight: Tensor = file.get_tensor(name)
            return weight.float()

    return read


def _check_logits(engine: Engine, run: RunConfig, checkpoint: Path) -> None:
    """Raise UserError unless the engine computes the logits that transformers did at import."""
    probe = load_file(checkpoint / PROBE)
    length = run.data.sequence_length
    logits = engine.probe(probe["input_ids"][:, :length]).get("logits")
    ratio = 0.0
    if dist.get_rank() == 0:
        assert logits is not None
        expected = probe["logits"][:, :length]
        ratio = ((logits - expected).norm() / expected.norm()).item()
    ratio = float(from_rank_zero(ratio))
    allowed = LOGIT_TOLERANCE[dtype_of(run.precision)]  # of a probe, which has no 8-bit products
    if not ratio <= allowed:
        raise UserError(
            f"the engine's logits differ from those of {checkpoint} by {ratio:.3g} of their norm,"
            f" allowed is {allowed:g}; report it"
        )
