"""The parts of all decoder blocks: transformers' modules read as dual numbers.

A module's parameter and the tangent beside it (`weight` and `weight_tangent`) are one dual number,
cast to the precision of the computation where it is used, so that a checkpointed block keeps no
copy.

Shapes: B sequences, S positions of a sequence, D hidden, H query heads, K key/value heads,
    G = H / K, E features of a head, O output features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.fused.attention import causal_attention
from curvature.fused.elementwise import layer_norm, rms_norm, rotated, swiglu
from curvature.products.dual import Dual, linear
from curvature.products.parameters import TANGENT


class Context(NamedTuple):
    """Rotary tables, the precision of the computation, and the queries that attend at once."""

    cos_SE: Tensor
    sin_SE: Tensor
    dtype: torch.dtype
    queries_per_chunk: int


Block = Callable[[Any, Dual, Context], Dual]
Norm = Callable[[Any, Dual, torch.dtype], Dual]


@dataclass(frozen=True)
class Architecture:
    """A causal language model of transformers, in dual numbers.

    Attributes:
        block: decoder block, residual stream [B, S, D] and context to the next residual stream.
        final_norm: module and residual stream to its normed version.
        settings: what `block` spells out, by name in the configuration or its rope_parameters;
            every entry of a list has to agree.
        norm: name of the final norm in the decoder.
    """

    block: Block
    final_norm: Norm
    settings: Mapping[str, object]
    norm: str = "norm"


def parameter(module: Any, dtype: torch.dtype, name: str = "weight") -> Dual:
    """Return a module's parameter and its tangent."""
    return Dual(getattr(module, name), getattr(module, name + TANGENT)).map(lambda t: t.to(dtype))


def project(module: Any, x: Dual, dtype: torch.dtype) -> Dual:
    """Apply a torch.nn.Linear, with bias or without."""
    y = linear(x, parameter(module, dtype))
    return y if module.bias is None else y + parameter(module, dtype, "bias")


def rms_normed(module: Any, x: Dual, dtype: torch.dtype, residual: Dual | None = None) -> Dual:
    """Apply an RMSNorm over the last axis, and add the residual if there is one."""
    return rms_norm(x, parameter(module, dtype), module.variance_epsilon, residual)


def layer_normed(module: Any, x: Dual, dtype: torch.dtype) -> Dual:
    """Apply a torch.nn.LayerNorm over the last axis."""
    return layer_norm(x, parameter(module, dtype), parameter(module, dtype, "bias"), module.eps)


def heads(x_BSO: Dual, head_dim: int) -> Dual:
    """Return features parted into heads, [B, heads, S, E]."""
    batch, positions, _ = x_BSO.value.shape
    return x_BSO.map(lambda t: t.view(batch, positions, -1, head_dim).transpose(1, 2))


def turned(x_BHSE: Dual, context: Context) -> Dual:
    """Apply the model's rotary embedding."""
    return rotated(x_BHSE, context.cos_SE, context.sin_SE, context.dtype)


def attend(
    query_BHSE: Dual, key_BKSE: Dual, value_BKSE: Dual, scale: float, context: Context
) -> Dual:
    """Return causal attention of all heads, [B, S, H E].

    H / K heads of queries share a head of keys and values.
    """
    batch, num_kv_heads, positions, head_dim = key_BKSE.value.shape
    return causal_attention(
        query_BHSE.map(
            lambda t: t.to(context.dtype).reshape(batch, num_kv_heads, -1, positions, head_dim)
        ),
        key_BKSE.map(lambda t: t.to(context.dtype)),
        value_BKSE,
        scale=scale,
        queries_per_chunk=context.queries_per_chunk,
    )


def attended(
    attention: Any, query_BHSE: Dual, key_BKSE: Dual, value_BKSE: Dual, context: Context
) -> Dual:
    """Return an attention's output [B, S, D] of queries and keys before their rotary embedding."""
    if getattr(attention, "use_rope", True):  # SmolLM3 leaves some blocks without
        query_BHSE, key_BKSE = turned(query_BHSE, context), turned(key_BKSE, context)
    mixed_BSO = attend(query_BHSE, key_BKSE, value_BKSE, attention.scaling, context)
    return project(attention.o_proj, mixed_BSO, context.dtype)


def gated_mlp(mlp: Any, x_BSD: Dual, dtype: torch.dtype) -> Dual:
    """Return the output of an MLP with a gate, [B, S, D]."""
    gated = swiglu(project(mlp.gate_proj, x_BSD, dtype), project(mlp.up_proj, x_BSD, dtype))
    return project(mlp.down_proj, gated, dtype)
