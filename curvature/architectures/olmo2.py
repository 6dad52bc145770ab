"""OLMo2 (arXiv 2501.00656): parts normed before the residual sum, queries and keys over all heads.

Shapes: B sequences, S positions of a sequence, D hidden.
"""

from typing import Any

from curvature.architectures.parts import (
    Architecture,
    Context,
    attended,
    gated_mlp,
    heads,
    project,
    rms_normed,
)
from curvature.products.dual import Dual


def _attention(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    dtype = context.dtype
    query = rms_normed(attention.q_norm, project(attention.q_proj, x_BSD, dtype), dtype)
    key = rms_normed(attention.k_norm, project(attention.k_proj, x_BSD, dtype), dtype)
    value = project(attention.v_proj, x_BSD, dtype)
    query, key, value = (heads(one, attention.head_dim) for one in (query, key, value))
    return attended(attention, query, key, value, context)


def _block(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
    dtype = context.dtype
    written = _attention(layer.self_attn, hidden_BSD, context)
    hidden_BSD = hidden_BSD + rms_normed(layer.post_attention_layernorm, written, dtype)
    written = gated_mlp(layer.mlp, hidden_BSD, dtype)
    return hidden_BSD + rms_normed(layer.post_feedforward_layernorm, written, dtype)


ARCHITECTURE = Architecture(
    _block, rms_normed, {"hidden_act": "silu", "partial_rotary_factor": 1.0}
)
