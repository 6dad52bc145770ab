"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): LayerNorms, biases, one matrix for QKV.

The MLP reads the residual stream before the attention writes to it (parallel) or after, as the
configuration says.

Shapes: B sequences, S positions of a sequence, D hidden, H heads, E features of a head.
"""

from typing import Any

import torch
from torch import Tensor

from curvature.architectures.parts import (
    Architecture,
    Context,
    attend,
    heads,
    layer_normed,
    project,
    rotated,
)
from curvature.products.dual import Dual, gelu


def _partly_rotated(x_BHSE: Tensor, context: Context) -> Tensor:
    """Apply rotary embedding to each head's first features; the others pass."""
    turning = context.cos_SE.shape[-1]
    return torch.cat((rotated(x_BHSE[..., :turning], context), x_BHSE[..., turning:]), dim=-1)


def _attention(attention: Any, x_BSD: Dual, context: Context) -> Dual:
    fused = heads(project(attention.query_key_value, x_BSD, context.dtype), 3 * attention.head_size)
    query, key, value = map(Dual, fused.value.chunk(3, dim=-1), fused.tangent.chunk(3, dim=-1))
    query, key = (one.map(lambda t: _partly_rotated(t, context)) for one in (query, key))
    return project(
        attention.dense, attend(query, key, value, attention.scaling, context), context.dtype
    )


def _mlp(mlp: Any, x_BSD: Dual, dtype: torch.dtype) -> Dual:
    return project(mlp.dense_4h_to_h, gelu(project(mlp.dense_h_to_4h, x_BSD, dtype)), dtype)


def _block(layer: Any, hidden_BSD: Dual, context: Context) -> Dual:
    dtype = context.dtype
    read = layer_normed(layer.input_layernorm, hidden_BSD, dtype)
    written = hidden_BSD + _attention(layer.attention, read, context)
    source = hidden_BSD if layer.use_parallel_residual else written
    return written + _mlp(
        layer.mlp, layer_normed(layer.post_attention_layernorm, source, dtype), dtype
    )


ARCHITECTURE = Architecture(
    _block,
    layer_normed,
    {"hidden_act": "gelu"},
    decoder="gpt_neox",
    embedding="embed_in",
    norm="final_layer_norm",
)
