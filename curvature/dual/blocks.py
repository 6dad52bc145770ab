"""Decoder blocks in dual numbers, put together from the arrangement that a family's row names.

transformers' modules are read as they are. A module's parameter and the tangent beside it (`weight`
and `weight_tangent`) are one dual number, cast to the precision of the computation where it is
used, so that a checkpointed block keeps no copy.

Shapes: B sequences, S positions of a sequence, D hidden, H query heads, K key/value heads,
    G = H / K, E features of a head, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

import torch
from torch import Tensor

from base.errors import UserError
from ckpt_tools.hf.configuration import by_kind
from curvature.dual.attention import causal_attention
from curvature.dual.elementwise import layer_norm, rms_norm, rotated, swiglu
from curvature.dual.numbers import Dual, clipped, gelu, linear, standardised, xielu
from train.model.families import family_of
from train.model.families.family import Family, NormKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TANGENT = "_tangent"  # ends the name of the tangent beside a parameter
BARE_EPSILON = 1e-5  # OLMo's code holds it, not the configuration


class Context(NamedTuple):
    """Rotary tables, the precision of the computation, and the queries that attend at once.

    `window` is the tokens that a query sees, its own included; None: all before.
    """

    cos_SE: Tensor
    sin_SE: Tensor
    dtype: torch.dtype
    queries_per_chunk: int
    window: int | None


# A decoder block, residual stream [B, S, D] and context to the next residual stream.
Block = Callable[[Any, Dual, Context], Dual]
# A norm's module, its input and the precision, then a residual that its output is added to.
Norm = Callable[[Any, Dual, torch.dtype, Dual | None], Dual]


def curved_family(config: PretrainedConfig) -> Family:
    """Return the row of a model.

    UserError if there is none, or the model has settings that the dual layers do not compute.
    """
    family = family_of(config)
    expected = {"is_causal": True, "hidden_act": family.hidden_act}
    if not family.rotates_parts:
        expected["partial_rotary_factor"] = 1.0
    # transformers 5 holds the settings of the rotary embedding in a dictionary of their own, and
    # those of several kinds of layers in one for each.
    rope = config.rope_parameters or {}
    for settings in by_kind(rope).values() or [rope]:
        stated = config.to_dict() | settings
        for name, value in expected.items():
            if stated.get(name) not in (None, value):
                raise UserError(
                    f"curvature knows {config.model_type} with {name} {value}, this model has"
                    f" {stated[name]}; give one without"
                )
    return family


def dual_block(family: Family) -> Block:
    """Return the block of a family."""
    norm = dual_norm(family.norm)

    def norms_before(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
        before_attention = getattr(layer, family.attention_norm)
        normed_BSD = norm(before_attention, hidden_BSD, context.dtype, None)
        written_BSD = hidden_BSD + _attention(family, layer, normed_BSD, context)
        match family.residual:
            case "sequential":
                source_BSD = written_BSD
            case "configured":
                # In parallel, attention and MLP read the same stream.
                source_BSD = hidden_BSD if layer.use_parallel_residual else written_BSD
            case _:
                assert_never(family.residual)
        normed_BSD = norm(getattr(layer, family.mlp_norm), source_BSD, context.dtype, None)
        return written_BSD + _mlp(family, layer, normed_BSD, context.dtype)

    def norms_after(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
        written_BSD = _attention(family, layer, hidden_BSD, context)
        after_attention, after_mlp = (
            getattr(layer, name) for name in (family.attention_norm, family.mlp_norm)
        )
        # The norm is of what attention writes; the stream is added after it.
        hidden_BSD = norm(after_attention, written_BSD, context.dtype, hidden_BSD)
        written_BSD = _mlp(family, layer, hidden_BSD, context.dtype)
        return norm(after_mlp, written_BSD, context.dtype, hidden_BSD)

    match family.norms:
        case "before":
            return norms_before
        case "after":
            return norms_after
        case _:
            assert_never(family.norms)


def dual_norm(kind: NormKind) -> Norm:
    """Return the function of a kind of norm, over the last axis."""
    match kind:
        case "rms":
            return _rms_normed
        case "layer":
            return _layer_normed
        case "bare":
            return _bare_normed
        case _:
            assert_never(kind)


def _rms_normed(module: Any, x: Dual, dtype: torch.dtype, residual: Dual | None = None) -> Dual:
    return rms_norm(x, parameter(module, dtype), module.variance_epsilon, residual)


def _layer_normed(module: Any, x: Dual, dtype: torch.dtype, residual: Dual | None = None) -> Dual:
    weight, bias = parameter(module, dtype), parameter(module, dtype, "bias")
    return _added(layer_norm(x, weight, bias, module.eps), residual)


def _bare_normed(_module: Any, x: Dual, _dtype: torch.dtype, residual: Dual | None = None) -> Dual:
    return _added(standardised(x, BARE_EPSILON), residual)


def _added(x: Dual, residual: Dual | None) -> Dual:
    return x if residual is None else residual + x


def _attention(family: Family, layer: Any, x_BSD: Dual, context: Context) -> Dual:
    """Return the attention's output, [B, S, D]."""
    attention = getattr(layer, family.attention)
    query, key, value = _queries_keys_values(family, attention, x_BSD, context.dtype)
    if (limit := getattr(attention.config, "clip_qkv", None)) is not None:
        query, key, value = (clipped(part, limit) for part in (query, key, value))
    if getattr(attention, "use_rope", True):  # SmolLM3 leaves some blocks without
        query, key = (
            rotated(part, context.cos_SE, context.sin_SE, context.dtype) for part in (query, key)
        )
    mixed_BSO = _attend(query, key, value, attention.scaling, context)
    return _project(getattr(attention, family.writing), mixed_BSO, context.dtype)


def _queries_keys_values(
    family: Family, attention: Any, x_BSD: Dual, dtype: torch.dtype
) -> tuple[Dual, Dual, Dual]:
    """Return queries, keys and values with their norms, each [B, heads, S, E]."""
    projected = [_project(getattr(attention, name), x_BSD, dtype) for name in family.reading]
    if len(projected) == 1:  # one matrix, whose rows are a head's query, key and value
        fused = _heads(projected[0], 3 * attention.head_size)
        query, key, value = map(Dual, fused.value.chunk(3, dim=-1), fused.tangent.chunk(3, dim=-1))
        return query, key, value

    query, key, value = projected
    # A norm over the features of all heads comes before they are parted, one of each head after.
    match family.query_key_norm:
        case "none":
            query, key = (_heads(part, attention.head_dim) for part in (query, key))
        case "whole":
            query = _heads(_rms_normed(attention.q_norm, query, dtype), attention.head_dim)
            key = _heads(_rms_normed(attention.k_norm, key, dtype), attention.head_dim)
        case "heads":
            query = _rms_normed(attention.q_norm, _heads(query, attention.head_dim), dtype)
            key = _rms_normed(attention.k_norm, _heads(key, attention.head_dim), dtype)
        case _:
            assert_never(family.query_key_norm)
    return query, key, _heads(value, attention.head_dim)


def _heads(x_BSO: Dual, head_dim: int) -> Dual:
    """Return features parted into heads, [B, heads, S, E]."""
    batch, positions, _ = x_BSO.value.shape
    return x_BSO.map(lambda t: t.view(batch, positions, -1, head_dim).transpose(1, 2))


def _attend(
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
        window=context.window,
    )


def _mlp(family: Family, layer: Any, x_BSD: Dual, dtype: torch.dtype) -> Dual:
    """Return the MLP's output, [B, S, D]."""
    mlp = getattr(layer, family.mlp)
    first, *gated = (_project(getattr(mlp, name), x_BSD, dtype) for name in family.mlp_reading)
    match family.activation:
        case "swiglu":
            (up,) = gated
            inner = swiglu(first, up)
        case "gelu":
            inner = gelu(first)
        case "xielu":
            module = mlp.act_fn
            alpha_p, alpha_n = (parameter(module, dtype, name) for name in ("alpha_p", "alpha_n"))
            inner = xielu(first, alpha_p, alpha_n, module.beta, module.eps)
        case _:
            assert_never(family.activation)
    return _project(getattr(mlp, family.mlp_writing), inner, dtype)


def parameter(module: Any, dtype: torch.dtype, name: str = "weight") -> Dual:
    """Return a module's parameter and its tangent."""
    return Dual(getattr(module, name), getattr(module, name + TANGENT)).map(lambda t: t.to(dtype))


def _project(module: Any, x: Dual, dtype: torch.dtype) -> Dual:
    """Apply a torch.nn.Linear, with bias or without."""
    y = linear(x, parameter(module, dtype))
    return y if module.bias is None else y + parameter(module, dtype, "bias")
