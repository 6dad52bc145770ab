"""Which rank writes which box of a megatron checkpoint at a given layout, and in which order.

It follows from megatron-core 0.16:

    rank = tp + TP (dp + DP pp)                                 core/parallel_state.py, order tp-cp-ep-dp-pp
    chunk c of stage s holds the layers [(c PP + s) n, (c PP + s + 1) n)        core/transformer/transformer_layer.py
    a chunk's parameters lie in one flat buffer, the last first, each from a multiple of 64 on; the buffer is padded to
    a multiple of lcm(DP, 128) and cut evenly over the DP ranks             core/distributed/param_and_grad_buffer.py

A parameter, and its part of the optimizer's state, is written by the DP rank on which it begins
(train/megatron/optimizer_state.py); what tensor parallelism does not split, by the first TP rank.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_tools.formats.megatron_shards import OPTIMIZER, optimizer_part
from train import layout
from train.settings import ModelConfig, ParallelConfig

Shape = tuple[int, ...]
# The parameters in the order in which the modules register them.
BEFORE_LAYERS = ("embedding.word_embeddings.weight",)
IN_LAYER = (
    *("self_attention.linear_proj.weight", "self_attention.linear_proj.post_norm.weight"),
    *("self_attention.linear_qkv.weight", "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"),
    *("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.linear_fc2.post_norm.weight"),
)
BEHIND_LAYERS = ("decoder.final_layernorm.weight", "output_layer.weight")


class Box(NamedTuple):
    """A part of a tensor that one rank writes."""

    name: str  # in the source, where every layer has tensors of its own
    corner: Shape
    shape: Shape

    @property
    def stored(self) -> MetadataIndex:
        """Its key and corner in the checkpoint, where layers lie behind each other along a new first axis."""
        prefix, found, rest = self.name.partition(layout.LAYERS)
        if not found:
            return MetadataIndex(self.name, torch.Size(self.corner))
        layer, _, suffix = rest.partition(".")
        return MetadataIndex(f"{prefix}{layout.LAYERS}{suffix}", torch.Size((int(layer), *self.corner)))


def _chunk_names(model: ModelConfig, parallel: ParallelConfig, stage: int, chunk: int) -> list[str]:
    """The parameters of one model chunk of a pipeline stage, by global name, as its modules register them."""
    size = model.num_hidden_layers // (parallel.pipeline * parallel.virtual_pipeline)
    first = (chunk * parallel.pipeline + stage) * size
    names = [f"{layout.LAYERS}{layer}.{suffix}" for layer in range(first, first + size) for suffix in IN_LAYER]
    before = BEFORE_LAYERS if first == 0 else ()
    behind = BEHIND_LAYERS if first + size == model.num_hidden_layers else ()
    return [*before, *names, *behind]


def _parts(name: str, shape: Shape, rank: int, ranks: int) -> Iterator[tuple[Shape, Shape]]:
    """Corner and shape of what a tensor-parallel rank writes of a parameter of a shape."""
    axis = layout.shard_axis(name)
    if axis is None:
        if rank == 0:
            yield (0,) * len(shape), shape
        return
    _, suffix = layout.split_layer(name)
    # mcore keeps the gate's rows and the up rows of a rank apart: they do not lie next to each other in the whole.
    sections = 2 if suffix in layout.INSIDE_LAYER and layout.INSIDE_LAYER[suffix].fusion == "gate_up" else 1
    section = shape[axis] // sections
    for start in range(0, shape[axis], section):
        corner = [0] * len(shape)
        corner[axis] = start + rank * (section // ranks)
        yield tuple(corner), (*shape[:axis], section // ranks, *shape[axis + 1 :])


def _owners(names: list[str], shapes: dict[str, Shape], tensor: int, data: int) -> dict[str, int]:
    """The data-parallel rank on which each parameter of a chunk begins."""
    begins, end = {}, 0
    for name in reversed(names):
        begins[name] = -(-end // 64) * 64
        numel = math.prod(shapes[name])
        end = begins[name] + (numel if layout.shard_axis(name) is None else numel // tensor)
    alignment = math.lcm(data, 128)
    stretch = -(-end // alignment) * alignment // data
    return {name: begin // stretch for name, begin in begins.items()}


def boxes_of_ranks(names: list[str], model: ModelConfig, parallel: ParallelConfig, data: int) -> list[list[Box]]:
    """What every rank writes of the tensors `names`, in order."""
    shapes = {name: layout.whole_shape(name, model) for name in layout.megatron_names(model.num_hidden_layers)}
    # The model first, then parameter by parameter what the optimizer keeps of it.
    states = list(dict.fromkeys(found[0] for name in names if (found := optimizer_part(name, shapes))))
    held = set(names)
    ranks = []
    for stage in range(parallel.pipeline):
        chunks = [_chunk_names(model, parallel, stage, chunk) for chunk in range(parallel.virtual_pipeline)]
        owners = {
            name: owner for chunk in chunks for name, owner in _owners(chunk, shapes, parallel.tensor, data).items()
        }
        order = [("", name) for chunk in chunks for name in chunk]
        order += [(f"{OPTIMIZER}{state}.", name) for chunk in chunks for name in reversed(chunk) for state in states]
        for replica in range(data):
            mine = [(prefix, name) for prefix, name in order if owners[name] == replica and prefix + name in held]
            for rank in range(parallel.tensor):
                boxes = [
                    Box(prefix + name, *part)
                    for prefix, name in mine
                    for part in _parts(name, shapes[name], rank, parallel.tensor)
                ]
                ranks.append(_by_key(boxes))
    return ranks


def _by_key(boxes: list[Box]) -> list[Box]:
    """Groups what has the same key, where it first comes, as mcore does."""
    groups: dict[str, list[Box]] = {}
    for box in boxes:
        groups.setdefault(box.stored.fqn, []).append(box)
    return [box for group in groups.values() for box in group]


def object_rank(key: str, model: ModelConfig, parallel: ParallelConfig, data: int) -> int:
    """The rank that writes an object: the first of its pipeline stage."""
    stage = 0 if key.startswith(BEFORE_LAYERS[0].partition(".")[0]) else parallel.pipeline - 1
    if layout.LAYERS in key:
        size = model.num_hidden_layers // (parallel.pipeline * parallel.virtual_pipeline)
        stage = object_layer(key) // size % parallel.pipeline
    return stage * parallel.tensor * data


def object_layer(key: str) -> int:
    """`decoder.layers.mlp.linear_fc1._extra_state/shard_3_16` is of layer 3; 0 for what comes but once."""
    return int(key.rpartition("/shard_")[2].partition("_")[0])
