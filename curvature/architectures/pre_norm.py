"""Blocks that norm the input of each part: Llama (arXiv 2302.13971) and those built like it.

Mistral and Qwen2 (which has biases) are Llama's; Qwen3 and Apertus norm queries and keys head by
head; SmolLM3 leaves some blocks without rotary embedding; OLMo's norms have no parameters; Apertus
has xIELU and no gate.

Shapes: B sequences, S positions of a sequence, D hidden, E features of a head.
"""

from collections.abc import Callable
from typing import Any

import torch

from curvature.architectures.parts import (
    Architecture,
    Block,
    Context,
    Norm,
    attended,
    gated_mlp,
    heads,
    parameter,
    project,
    rms_normed,
)
from curvature.products.dual import Dual, clipped, standardised, xielu

OLMO_EPSILON = 1e-5  # the code of OLMo's norm holds it, not the configuration


def _pre_norm(
    attention: Callable[[Any, Dual, Context], Dual],
    mlp: Callable[[Any, Dual, torch.dtype], Dual] = gated_mlp,
    norm: Norm = rms_normed,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> Block:
    """Return a block of two parts; `norms` are the names of theirs."""

    def block(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
        before_attention, before_mlp = (getattr(layer, name) for name in norms)
        read = norm(before_attention, hidden_BSD, context.dtype)
        hidden_BSD = hidden_BSD + attention(layer.self_attn, read, context)
        read = norm(before_mlp, hidden_BSD, context.dtype)
        return hidden_BSD + mlp(layer.mlp, read, context.dtype)

    return block


def _projected(attention: Any, x_BSD: Dual, dtype: torch.dtype) -> tuple[Dual, Dual, Dual]:
    """Return queries, keys and values, each [B, heads, S, E]."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (
        heads(project(one, x_BSD, dtype), attention.head_dim) for one in projections
    )
    return query, key, value


def _attention(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    return attended(attention, *_projected(attention, x_BSD, context.dtype), context)


def _some_without_rotary(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    return attended(
        attention, *_projected(attention, x_BSD, context.dtype), context, rotary=attention.use_rope
    )


def _normed_heads(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    query, key, value = _projected(attention, x_BSD, context.dtype)
    query = rms_normed(attention.q_norm, query, context.dtype)
    key = rms_normed(attention.k_norm, key, context.dtype)
    return attended(attention, query, key, value, context)


def _clipped(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    query, key, value = _projected(attention, x_BSD, context.dtype)
    if (limit := attention.config.clip_qkv) is not None:
        query, key, value = (clipped(one, limit) for one in (query, key, value))
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
SMOLLM3 = Architecture(_pre_norm(_some_without_rotary), rms_normed, SILU)
OLMO = Architecture(_pre_norm(_clipped, norm=_without_parameters), _without_parameters, SILU)
APERTUS = Architecture(
    _pre_norm(_normed_heads, _xielu_mlp, norms=("attention_layernorm", "feedforward_layernorm")),
    rms_normed,
    {"hidden_act": "xielu", "partial_rotary_factor": 1.0},
)
