"""Decoder blocks in dual numbers, arrangement by arrangement.

Most norm the input of each part: Llama (arXiv 2302.13971), Mistral and Qwen2 (which has biases) are
the same; Qwen3 and Apertus norm queries and keys head by head; SmolLM3 leaves some blocks without
rotary embedding; OLMo's norms have no parameters; Apertus has xIELU and no gate.

OLMo2 (arXiv 2501.00656) norms parts before the residual sum, queries and keys over all heads.

GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373) have LayerNorms, biases and one matrix for QKV.
Their MLP reads the residual stream before the attention writes to it (parallel) or after, as the
configuration says.

Shapes: B sequences, S positions of a sequence, D hidden, H heads, E features of a head.
"""

from collections.abc import Callable
from typing import Any

import torch

from curvature.architectures.parts import (
    Architecture,
    Block,
    Context,
    Norm,
    attend,
    attended,
    gated_mlp,
    heads,
    layer_normed,
    parameter,
    project,
    rms_normed,
    turned,
)
from curvature.products.dual import Dual, clipped, gelu, standardised, xielu

OLMO_EPSILON = 1e-5  # the code of OLMo's norm holds it, not the configuration


def _pre_norm(
    attention: Callable[[Any, Dual, Context], Dual],
    mlp: Callable[[Any, Dual, torch.dtype], Dual] = gated_mlp,
    norm: Norm = rms_normed,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> Block:
    """Return a block of attention and MLP, whose norms have the names `norms`."""

    def block(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
        before_attention, before_mlp = (getattr(layer, name) for name in norms)
        normed_BSD = norm(before_attention, hidden_BSD, context.dtype)
        hidden_BSD = hidden_BSD + attention(layer.self_attn, normed_BSD, context)
        normed_BSD = norm(before_mlp, hidden_BSD, context.dtype)
        return hidden_BSD + mlp(layer.mlp, normed_BSD, context.dtype)

    return block


def _projected(attention: Any, x_BSD: Dual, dtype: torch.dtype) -> tuple[Dual, Dual, Dual]:
    """Return queries, keys and values, each [B, heads, S, E]."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (
        heads(project(projection, x_BSD, dtype), attention.head_dim) for projection in projections
    )
    return query, key, value


def _attention(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    return attended(attention, *_projected(attention, x_BSD, context.dtype), context)


def _normed_heads(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    query, key, value = _projected(attention, x_BSD, context.dtype)
    query = rms_normed(attention.q_norm, query, context.dtype)
    key = rms_normed(attention.k_norm, key, context.dtype)
    return attended(attention, query, key, value, context)


def _clipped(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    query, key, value = _projected(attention, x_BSD, context.dtype)
    if (limit := attention.config.clip_qkv) is not None:
        query, key, value = (clipped(part, limit) for part in (query, key, value))
    return attended(attention, query, key, value, context)


def _xielu_mlp(mlp: Any, x_BSD: Dual, dtype: torch.dtype) -> Dual:
    alpha_p, alpha_n = (parameter(mlp.act_fn, dtype, name) for name in ("alpha_p", "alpha_n"))
    risen = project(mlp.up_proj, x_BSD, dtype)
    return project(
        mlp.down_proj, xielu(risen, alpha_p, alpha_n, mlp.act_fn.beta, mlp.act_fn.eps), dtype
    )


def _without_parameters(_module: Any, x: Dual, _dtype: torch.dtype) -> Dual:
    return standardised(x, OLMO_EPSILON)


SILU = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
LLAMA = Architecture(_pre_norm(_attention), rms_normed, SILU)
MISTRAL = Architecture(_pre_norm(_attention), rms_normed, SILU | {"sliding_window": None})
QWEN3 = Architecture(_pre_norm(_normed_heads), rms_normed, SILU)
OLMO = Architecture(_pre_norm(_clipped, norm=_without_parameters), _without_parameters, SILU)
APERTUS = Architecture(
    _pre_norm(_normed_heads, _xielu_mlp, norms=("attention_layernorm", "feedforward_layernorm")),
    rms_normed,
    {"hidden_act": "xielu", "partial_rotary_factor": 1.0},
)


def _olmo2_attention(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    dtype = context.dtype
    query = rms_normed(attention.q_norm, project(attention.q_proj, x_BSD, dtype), dtype)
    key = rms_normed(attention.k_norm, project(attention.k_proj, x_BSD, dtype), dtype)
    value = project(attention.v_proj, x_BSD, dtype)
    query, key, value = (heads(part, attention.head_dim) for part in (query, key, value))
    return attended(attention, query, key, value, context)


def _olmo2_block(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
    dtype = context.dtype
    written = _olmo2_attention(layer.self_attn, hidden_BSD, context)
    hidden_BSD = rms_normed(layer.post_attention_layernorm, written, dtype, hidden_BSD)
    written = gated_mlp(layer.mlp, hidden_BSD, dtype)
    return rms_normed(layer.post_feedforward_layernorm, written, dtype, hidden_BSD)


OLMO2 = Architecture(_olmo2_block, rms_normed, SILU)


def _neox_attention(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    fused = heads(project(attention.query_key_value, x_BSD, context.dtype), 3 * attention.head_size)
    query, key, value = map(Dual, fused.value.chunk(3, dim=-1), fused.tangent.chunk(3, dim=-1))
    query, key = turned(query, context), turned(key, context)
    return project(
        attention.dense, attend(query, key, value, attention.scaling, context), context.dtype
    )


def _neox_mlp(mlp: Any, x_BSD: Dual, dtype: torch.dtype) -> Dual:
    return project(mlp.dense_4h_to_h, gelu(project(mlp.dense_h_to_4h, x_BSD, dtype)), dtype)


def _neox_block(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
    dtype = context.dtype
    normed_BSD = layer_normed(layer.input_layernorm, hidden_BSD, dtype)
    written = hidden_BSD + _neox_attention(layer.attention, normed_BSD, context)
    source = hidden_BSD if layer.use_parallel_residual else written
    return written + _neox_mlp(
        layer.mlp, layer_normed(layer.post_attention_layernorm, source, dtype), dtype
    )


GPT_NEOX = Architecture(_neox_block, layer_normed, {"hidden_act": "gelu"}, norm="final_layer_norm")
