"""The form of a model in megatron-core: its keys, the fusion of q, k, v and gate, up, its shards.

The names are those of the rows in `train.model.families`. The engine initialises with it and
`ckpt_tools` exports; no engine has to be installed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from train.model.config import ModelConfig, parameter_shapes
from train.model.families import TRAINED
from train.model.families.family import MEGATRON_OUTSIDE, MegatronParameter

LAYERS = "decoder.layers."
HF_LAYERS = "model.layers."


EMBEDDING = "embedding.word_embeddings.weight"  # every model has it
HEAD = "output_layer.weight"
# A name means the same in every family that has it.
INSIDE_LAYER = {
    name: entry for row in TRAINED.values() for name, entry in (row.megatron or {}).items()
}


def megatron_names(model: ModelConfig) -> list[str]:
    """Return the global megatron name of every parameter of the whole model."""
    inside = [
        f"{LAYERS}{layer}.{suffix}"
        for layer in range(model.num_hidden_layers)
        for suffix in inside_layer(model)
    ]
    return [*outside_layers(model), *inside]


def inside_layer(model: ModelConfig) -> list[str]:
    """Return the megatron names within a layer."""
    return list(model.training.megatron or {})


def outside_layers(model: ModelConfig) -> list[str]:
    """Return the megatron names outside the layers: a head that is the embedding has none."""
    tied = {HEAD} if model.tie_word_embeddings else set()
    return [name for name in MEGATRON_OUTSIDE if name not in tied]


def split_layer(name: str) -> tuple[int | None, str]:
    """Return layer and name within it; None and the whole name outside the layers."""
    if not name.startswith(LAYERS):
        return None, name
    layer, _, suffix = name.removeprefix(LAYERS).partition(".")
    return int(layer), suffix


def _entry(name: str) -> tuple[MegatronParameter, str]:
    """Return the entry of a global megatron name and the prefix of its HF names."""
    layer, suffix = split_layer(name)
    if layer is None:
        return MEGATRON_OUTSIDE[name], ""
    return INSIDE_LAYER[suffix], f"{HF_LAYERS}{layer}."


def hf_names(name: str) -> list[str]:
    """Return the HF keys that a global megatron name holds."""
    entry, prefix = _entry(name)
    return [prefix + hf_name for hf_name in entry.hf_names]


def from_hf(name: str, get_hf: Callable[[str], Tensor], model: ModelConfig) -> Tensor:
    """Return the whole megatron tensor `name`, from HF tensors by key."""
    entry, _ = _entry(name)
    parts = [get_hf(hf_name) for hf_name in hf_names(name)]
    if entry.fusion == "qkv":
        # Interleaved per query group: that group's query heads, its key head, its value head.
        groups = [part.unflatten(0, (model.num_key_value_heads, -1)) for part in parts]
        return torch.cat(groups, dim=1).flatten(0, 1)
    if entry.fusion == "gate_up":
        return torch.cat(parts)
    return parts[0]


def hf_rows(name: str, model: ModelConfig, size: int = 1) -> dict[str, list[tuple[int, int]]]:
    """Return the rows [start, stop) of the megatron tensor `name` that make up each HF tensor.

    They are the same in each of `size` shards of it: every one has a part of each HF tensor.
    """
    entry, _ = _entry(name)
    names = hf_names(name)
    rows = whole_shape(name, model)[0] // (size if entry.shard_axis == 0 else 1)
    if entry.fusion == "qkv":
        # Rows of a group: those of its query heads, of the key head, of the value head.
        query_rows = model.num_attention_heads // model.num_key_value_heads * model.head_size
        ends = [query_rows, query_rows + model.head_size, query_rows + 2 * model.head_size]
        groups = range(0, rows, ends[-1])
        spans = zip([0, *ends], ends, strict=False)
        return {
            hf_name: [(group + begin, group + end) for group in groups]
            for hf_name, (begin, end) in zip(names, spans, strict=True)
        }
    if entry.fusion == "gate_up":
        return {names[0]: [(0, rows // 2)], names[1]: [(rows // 2, rows)]}
    return {names[0]: [(0, rows)]}


def shard(name: str, weight: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of tensor rank `rank` of `size` in the whole megatron tensor `name`.

    Example: a fused weight has two gate rows, then two up rows.
        >>> weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> shard("decoder.layers.0.mlp.linear_fc1.weight", weight, rank=0, size=2).flatten()
        tensor([1., 3.])
    """
    entry, _ = _entry(name)
    if entry.shard_axis is None:
        return weight
    if entry.fusion == "gate_up":  # each rank holds its gate rows, then its up rows
        return torch.cat([half.chunk(size)[rank] for half in weight.chunk(2)])
    return weight.chunk(size, dim=entry.shard_axis)[rank]


def unshard(name: str, shards: list[Tensor]) -> Tensor:
    """Return the whole megatron tensor `name` of the parts that `shard` makes, by rank.

    Example:
        >>> parts = [torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]])]
        >>> unshard("decoder.layers.0.mlp.linear_fc1.weight", parts).flatten()
        tensor([1., 2., 3., 4.])
    """
    entry, _ = _entry(name)
    if entry.fusion == "gate_up":
        # Every shard has its gate rows first; the whole has all gates before all ups.
        gates, ups = zip(*(part.chunk(2) for part in shards), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(shards, dim=entry.shard_axis or 0)


def shard_axis(name: str) -> int | None:
    """Return the axis of `name` that tensor parallelism splits; None for a whole tensor."""
    return _entry(name)[0].shard_axis


def whole_shape(name: str, model: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a whole megatron tensor: its HF parts, stacked along their rows."""
    hf_shapes = parameter_shapes(model)
    shapes = [hf_shapes[hf_name] for hf_name in hf_names(name)]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
