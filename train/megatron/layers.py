"""OLMo2's layers that megatron-core lacks: reordered norms, a QK-norm over all heads, attention.

Shapes: S tokens, B sequences, H hidden size, N heads of this rank, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from train.megatron.packing import attention_in_documents
from train.model.rotary import rotated


class RMSNorm(nn.Module):
    """RMSNorm over the last axis with a weight that every tensor-parallel rank holds whole."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism a rank sees some tokens: mcore sums gradients so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in fp32; return the dtype of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def post_normed(linear: Any, norm: Any) -> Any:
    """Return a row-parallel linear with a norm of its reduced output, as OLMo2 has it."""

    class PostNormed(linear):  # type: ignore[misc]
        """Linear, reduction, norm."""

        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_norm = norm(config, output_size, config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            y, bias = super().forward(x)
            return self.post_norm(y), bias

    return PostNormed


class FullWidthNorm(nn.Module):
    """RMSNorm over all heads of all tensor-parallel ranks; a rank holds the weights of its heads.

    The sum of squares is all-reduced in forward and its gradient in backward: a plain all-reduce
    gets the forward pass right and the gradient wrong. mcore builds this as `q_layernorm` and
    `k_layernorm` with `qk_layernorm=False`; with True, it would sum the gradients of these weights
    over ranks as if all held the same ones.
    """

    def __init__(
        self, *, hidden_size: int, config: TransformerConfig, eps: float, num_heads: int
    ) -> None:
        super().__init__()
        self.eps = eps
        self.full_width = num_heads * hidden_size  # which mcore calls the size of a head
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.ones(self.full_width // ranks, dtype=config.params_dtype))

    def forward(self, x_SBND: Tensor) -> Tensor:
        """Normalise in fp32; return the dtype of the input."""
        x_SBH = x_SBND.flatten(2).float()
        squares_SB1 = x_SBH.square().sum(-1, keepdim=True)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            squares_SB1 = reduce_from_tensor_model_parallel_region(
                copy_to_tensor_model_parallel_region(squares_SB1)
            )
        normed_SBH = x_SBH * torch.rsqrt(squares_SB1 / self.full_width + self.eps)
        return (self.weight * normed_SBH).to(x_SBND.dtype).view(x_SBND.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the weight as split over tensor-parallel ranks, to be loaded at any layout."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return sharded


class RotarySelfAttention(SelfAttention):
    """mcore's self-attention, with `rotated` after the norms of queries and keys."""

    def __init__(self, *args: Any, rotary_base: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_base = rotary_base

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values [S, B, N, D]; positions count from 0."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return rotated(query, self.rotary_base), rotated(key, self.rotary_base), value


class CausalAttention(nn.Module):
    """Causal softmax attention without dropout, by torch's fused kernel.

    mcore's DotProductAttention forks the CUDA random state even at dropout 0; OLMo2 has no dropout.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query_SBND: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Return [S, B, N x D]; the mask is None, for attention is causal everywhere."""
        assert attention_mask is None
        if packed_seq_params is not None:
            return attention_in_documents(query_SBND, key, value, packed_seq_params)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key, value))
        grouped = query.shape[1] != key.shape[1]
        out_BNSD = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of [gate, up]; keeps its input only, writes its gradient in one piece."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        gradients = torch.empty_like(gate_up)
        of_gate, of_up = gradients.chunk(2, -1)
        torch.mul(gradient, F.silu(gate), out=of_up)
        of_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))
        return gradients


class SwiGluMLP(MLP):
    """mcore's MLP with the activation in one step; mcore splits and joins the halves again."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Apply linear, SwiGLU, linear."""
        assert per_token_scale is None
        gate_up, _ = self.linear_fc1(hidden_states)
        output, _ = self.linear_fc2(_SwiGlu.apply(gate_up))
        return output, None


class RecomputedLayer(TransformerLayer):
    """A layer that keeps its input only and runs forward once more in backward.

    mcore's own recomputation saves and restores CUDA's random state; nothing here draws random
    numbers.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run TransformerLayer's forward."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(
            super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )
