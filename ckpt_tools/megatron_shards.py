"""Reading weights out of a megatron checkpoint of any TP, PP and DP, without megatron, a model or a process group."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from train import layout
from train.command import UserError
from train.settings import ModelConfig

OPTIMIZER = "optimizer.state."
MOMENTS = {"param", "exp_avg", "exp_avg_sq"}  # of the distributed optimizer: fp32 weights and Adam's averages
SLOT = "slot."  # begins the name of a copy of the weights that an average is made from


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shape of every stored weight: mcore stacks the layers of a model along a new first axis."""
    shapes = {name: layout.whole_shape(name, model) for name in layout.OUTSIDE_LAYERS}
    for suffix in layout.INSIDE_LAYER:
        whole = layout.whole_shape(f"{layout.LAYERS}0.{suffix}", model)
        shapes[layout.LAYERS + suffix] = (model.num_hidden_layers, *whole)
    return shapes


def _optimizer_part(key: str, shapes: dict[str, tuple[int, ...]]) -> tuple[str, str]:
    """'exp_avg' and the weight's key, for the key of an optimizer's tensor; KeyError for any other key."""
    rest = key.removeprefix(OPTIMIZER)
    for weight in shapes:
        part = rest.removesuffix(f".{weight}")
        if part != rest and (part in MOMENTS or part.startswith(SLOT)):
            return part, weight
    raise KeyError(key)


def _check_keys(checkpoint: Path, metadata: Metadata, shapes: dict[str, tuple[int, ...]]) -> None:
    """UserError unless the stored keys are exactly the weights of this model and the optimizer's state, whole or none.

    A checkpoint of an average holds no state of an optimizer.
    """
    next_action = f"{checkpoint} is no checkpoint of the model in its checkpoint.json; give another"
    weights: dict[str, Any] = {}
    state: dict[str, set[str]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if "._extra_state" in key:  # mcore's place for Transformer Engine's fp8 scales, empty here
            continue
        if key in shapes:
            weights[key] = stored
            continue
        try:
            part, weight = _optimizer_part(key, shapes)
        except KeyError:
            raise UserError(f"unknown key '{key}' in the shards: {next_action}") from None
        state.setdefault(part, set()).add(weight)
    wanted = set(shapes)
    if state:
        wanted |= {f"{OPTIMIZER}{part}.{weight}" for part in MOMENTS | state.keys() for weight in shapes}
    there = weights.keys() | {f"{OPTIMIZER}{part}.{weight}" for part, keys in state.items() for weight in keys}
    missing = sorted(wanted - there)
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
