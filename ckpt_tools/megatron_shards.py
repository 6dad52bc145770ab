"""Reading weights out of a megatron checkpoint of any TP, PP and DP, without megatron, a model or a process group."""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from train import layout
from train.command import UserError
from train.settings import ModelConfig

OPTIMIZER_PREFIXES = tuple(f"optimizer.state.{part}." for part in ("param", "exp_avg", "exp_avg_sq"))


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shape of every stored weight: mcore stacks the layers of a model along a new first axis."""
    shapes = {name: layout.whole_shape(name, model) for name in layout.OUTSIDE_LAYERS}
    for suffix in layout.INSIDE_LAYER:
        whole = layout.whole_shape(f"{layout.LAYERS}0.{suffix}", model)
        shapes[layout.LAYERS + suffix] = (model.num_hidden_layers, *whole)
    return shapes


def _check_keys(checkpoint: Path, metadata: Metadata, shapes: dict[str, tuple[int, ...]]) -> None:
    """UserError unless the stored keys are exactly the weights of this model and their optimizer state."""
    next_action = f"{checkpoint} is no checkpoint of the model in its checkpoint.json; give another"
    weights = {}
    for key, stored in metadata.state_dict_metadata.items():
        if "._extra_state" in key:  # mcore's place for Transformer Engine's fp8 scales, empty here
            continue
        for prefix in OPTIMIZER_PREFIXES:
            if key.startswith(prefix):
                key = key.removeprefix(prefix)
                break
        else:
            weights[key] = stored
        if key not in shapes:
            raise UserError(f"unknown key '{key}' in the shards: {next_action}")
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise UserError(f"key '{missing[0]}' is missing from the shards: {next_action}")
    for key, stored in weights.items():
        if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != shapes[key]:
            found = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else "no tensor"
            raise UserError(f"'{key}' is {found} in the shards, the model needs {shapes[key]}: {next_action}")


def read_hf_weights(checkpoint: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Every HF tensor of the model, as it was trained (dtype included), from a hash-checked checkpoint.

    Raises:
        UserError: a key or a shape of the shards is not the model's, or a key is missing.
    """
    reader = FileSystemReader(checkpoint)
    metadata = reader.read_metadata()
    shapes = expected_shapes(model)
    _check_keys(checkpoint, metadata, shapes)
    stored = {
        key: torch.empty(shape, dtype=metadata.state_dict_metadata[key].properties.dtype)  # type: ignore[union-attr]
        for key, shape in shapes.items()
    }
    with warnings.catch_warnings():  # torch announces that it reads in a single process, which is what no_dist asks
        warnings.simplefilter("ignore", UserWarning)
        load_shards(stored, storage_reader=reader, no_dist=True)
    weights: dict[str, Tensor] = {}
    for name in layout.megatron_names(model.num_hidden_layers):
        layer, suffix = layout.split_layer(name)
        whole = stored[name] if layer is None else stored[layout.LAYERS + suffix][layer]
        weights |= layout.to_hf(name, whole, model)
    return weights
