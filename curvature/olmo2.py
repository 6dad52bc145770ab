"""Exact Hessian-vector products of an OLMo2 (arXiv 2501.00656) by dual layers.

Each layer maps (h, h_dot) to (h', h_dot'); the loss then comes with g.v, and one backward pass through g.v gives Hv:
about three times the work of one gradient, exact up to rounding.

Shapes: B sequences, S positions of a sequence, D hidden, H query heads, K key/value heads, G = H / K, E features of a
head, N = B S tokens, V vocabulary, P parameters.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from curvature.dual import Dual, causal_attention, linear, mean_cross_entropy, rematerialised, rms_norm, swiglu
from curvature.parameters import Parameters
from train.command import UserError

LAYER_WEIGHTS = (
    *(f"self_attn.{kind}" for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{kind}" for kind in ("gate_proj", "up_proj", "down_proj")),
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
OUTER_WEIGHTS = ("model.embed_tokens", "model.norm", "lm_head")


class HessianProduct(NamedTuple):
    """Hv of the mean cross-entropy over one batch, and that loss in nats per token."""

    hv_P: Tensor
    loss: float


def _rotate(x_SE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) over pairs (i, i + E/2), on the last two axes; linear in x."""
    first, second = x_SE.chunk(2, dim=-1)
    return x_SE * cos_SE + torch.cat((-second, first), dim=-1) * sin_SE


class DualOlmo2:
    """The Hessian of an Olmo2ForCausalLM's loss as an operator: (tokens, v) -> Hv.

    The model's own tensors are used, in their precision; its forward code is not, but its rotary tables are.

    Args:
        model: an Olmo2ForCausalLM.
        checkpointing: keep only the layers' inputs for the backward pass; half as much time again, far less memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        checkpointing: bool = False,
        queries_per_chunk: int = 512,
        tokens_per_chunk: int = 1024,
    ) -> None:
        self.parameters = Parameters(model)
        self._config = model.config
        self._rotary = model.model.rotary_emb
        self._checkpointing = checkpointing
        self._queries_per_chunk, self._tokens_per_chunk = queries_per_chunk, tokens_per_chunk
        self._check()

    def _check(self) -> None:
        layers = range(self._config.num_hidden_layers)
        known = [f"model.layers.{layer}.{weight}" for layer in layers for weight in LAYER_WEIGHTS]
        difference = {f"{name}.weight" for name in (*known, *OUTER_WEIGHTS)} ^ self.parameters.weights.keys()
        if difference:
            raise UserError(
                f"the dual layers know OLMo2 without biases and tied embeddings, this model differs in "
                f"{sorted(difference)[:3]}; use --route finite-difference"
            )
        if self._config.hidden_act != "silu":
            raise UserError(
                f"the dual layers know silu, this model uses {self._config.hidden_act}; use --route finite-difference"
            )

    def __call__(self, tokens_BS1: Tensor, v_P: Tensor) -> HessianProduct:
        """Hv and the loss over sequences of S inputs and S labels, int64 [B, S + 1]."""
        tangents = self.parameters.split(v_P)
        weights = {name: Dual(value, tangents[name]) for name, value in self.parameters.weights.items()}
        with torch.enable_grad():
            loss = self._loss(tokens_BS1, weights)
            hv = torch.autograd.grad(loss.tangent, list(self.parameters.weights.values()))
        return HessianProduct(self.parameters.join(hv), float(loss.value))

    def _loss(self, tokens_BS1: Tensor, weights: Mapping[str, Dual]) -> Dual:
        inputs_BS, labels_N = tokens_BS1[:, :-1], tokens_BS1[:, 1:].flatten()
        hidden = weights["model.embed_tokens.weight"].map(lambda table: F.embedding(inputs_BS, table))
        positions = torch.arange(inputs_BS.shape[1], device=inputs_BS.device)[None]
        cos_SE, sin_SE = (table[0].to(hidden.value.dtype) for table in self._rotary(hidden.value, positions))
        for index in range(self._config.num_hidden_layers):
            layer = {name: weights[f"model.layers.{index}.{name}.weight"] for name in LAYER_WEIGHTS}
            if self._checkpointing:
                hidden = rematerialised(self._layer, hidden, layer, cos_SE, sin_SE)
            else:
                hidden = self._layer(hidden, layer, cos_SE, sin_SE)
        hidden = rms_norm(hidden, weights["model.norm.weight"], self._config.rms_norm_eps)
        hidden_ND = hidden.map(lambda t: t.flatten(0, 1))
        return mean_cross_entropy(
            hidden_ND, weights["lm_head.weight"], labels_N, tokens_per_chunk=self._tokens_per_chunk
        )

    def _layer(self, hidden_BSD: Dual, weights: Mapping[str, Dual], cos_SE: Tensor, sin_SE: Tensor) -> Dual:
        epsilon = self._config.rms_norm_eps
        attended = self._attention(hidden_BSD, weights, cos_SE, sin_SE)
        hidden_BSD = hidden_BSD + rms_norm(attended, weights["post_attention_layernorm"], epsilon)
        gate = linear(hidden_BSD, weights["mlp.gate_proj"])
        up = linear(hidden_BSD, weights["mlp.up_proj"])
        fed_forward = linear(swiglu(gate, up), weights["mlp.down_proj"])
        return hidden_BSD + rms_norm(fed_forward, weights["post_feedforward_layernorm"], epsilon)

    def _attention(self, hidden_BSD: Dual, weights: Mapping[str, Dual], cos_SE: Tensor, sin_SE: Tensor) -> Dual:
        batch, positions, _ = hidden_BSD.value.shape
        num_heads, num_kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        head_dim = cos_SE.shape[-1]

        def projected(kind: str) -> Dual:
            return linear(hidden_BSD, weights[f"self_attn.{kind}_proj"])

        def normed(kind: str) -> Dual:
            """Query and key are normed over all heads at once, before the heads part."""
            return rms_norm(projected(kind), weights[f"self_attn.{kind}_norm"], self._config.rms_norm_eps)

        def heads(x_BSD: Tensor) -> Tensor:
            return x_BSD.view(batch, positions, -1, head_dim).transpose(1, 2)

        def rotated(x_BSD: Tensor) -> Tensor:
            return _rotate(heads(x_BSD), cos_SE, sin_SE)

        def grouped(x_BHSE: Tensor) -> Tensor:
            return x_BHSE.reshape(batch, num_kv_heads, num_heads // num_kv_heads, positions, head_dim)

        mixed_BKGSE = causal_attention(
            normed("q").map(rotated).map(grouped),
            normed("k").map(rotated),
            projected("v").map(heads),
            scale=head_dim**-0.5,
            queries_per_chunk=self._queries_per_chunk,
        )
        mixed_BSD = mixed_BKGSE.map(lambda t: t.flatten(1, 2).transpose(1, 2).flatten(2))
        return linear(mixed_BSD, weights["self_attn.o_proj"])
