"""The layers on megatron-core's linears: OLMo2's, with norms after its parts, and that of a Llama.

mcore builds the modules and shards their state; the forward pass is the layer's, the functions
between its matrix products are in `train.model.elementwise`.

Shapes: S tokens, B sequences, H hidden size, N heads of this rank, D head size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from train.model.accumulation import biased, embedded
from train.model.attention import attention_kernel
from train.model.config import ModelConfig
from train.model.documents import attention_in_documents, takes_packed
from train.model.elementwise import normed, normed_and_rotated, rotated_heads, swiglu
from train.model.recomputing import recomputed

FUSED_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


class Embedding(VocabParallelEmbedding):
    """mcore's embedding by `train.model.accumulation.embedded`."""

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return rows [B, S, H], under sequence parallelism [S, B, H] of this rank's tokens."""
        rows: Tensor
        if self.tp_group.size() == 1:
            rows = embedded(ids_BS, self.weight)
        else:
            # An id of another rank looks up row 0 and is zeroed: the sum over ranks has its row.
            elsewhere_BS = (ids_BS < self.vocab_start_index) | (ids_BS >= self.vocab_end_index)
            local_BS = (ids_BS - self.vocab_start_index).masked_fill(elsewhere_BS, 0)
            rows = embedded(local_BS, self.weight).masked_fill(elsewhere_BS.unsqueeze(-1), 0.0)

        if self.reduce_scatter_embeddings:
            # The reduce-scatter cuts the first axis, which has to be that of the tokens.
            rows = rows.transpose(0, 1).contiguous()
            rows = reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        else:
            rows = reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)
        return rows


class ColumnLinear(ColumnParallelLinear):
    """mcore's linear whose bias, if it has one, is added by `train.model.accumulation.biased`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.skip_bias_add = True  # it would round the bias's gradient, once a microbatch

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the output with its bias, and no bias to add."""
        output, bias = super().forward(*args, **kwargs)
        return output if bias is None else biased(output, bias), None


class RMSNorm(nn.Module):
    """RMSNorm over the last axis with a weight that every tensor-parallel rank holds whole."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism a rank sees some tokens: mcore sums gradients so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalise and add the residual in fp32; return the dtype of `x`."""
        return normed(x, self.weight, self.eps, residual)


def post_normed(linear: Any) -> Any:
    """Return a row-parallel linear that owns the norm of its output, as checkpoints name it."""

    class PostNormed(linear):  # type: ignore[misc]
        """A linear with `post_norm`, which the layer applies together with the residual."""

        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    return PostNormed


class FullWidthNorm(nn.Module):
    """The weights of an RMSNorm over all heads of all tensor-parallel ranks, for this rank's heads.

    The layer builds it and applies it with the rotary embedding. mcore builds norms of queries and
    keys for `qk_layernorm` alone, and then sums the gradients of their weights over ranks as if all
    held the same ones.
    """

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.ones(width // ranks, dtype=config.params_dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the weight as split over tensor-parallel ranks, to be loaded at any layout."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            # The axis along which tensor ranks cut it.
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return sharded


class CausalAttention(nn.Module):
    """Causal softmax attention without dropout, by torch's fused kernels.

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
            bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            return attention_in_documents(query_SBND, key, value, bounds, longest)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key, value))
        grouped = query.shape[1] != key.shape[1]
        with _fused_kernels(query):
            out_BNSD = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=grouped
            )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


def kernel_of_attention(
    layer: "Olmo2Layer", length: int, sequences: int, *, documents: bool
) -> str:
    """Return the name of the kernel that `CausalAttention` takes in a layer for such sequences."""
    weight = layer.self_attention.linear_qkv.weight
    if documents and takes_packed(weight):
        return "flash, packed documents"
    qkv = torch.empty(length, sequences, len(weight), dtype=weight.dtype, device=weight.device)
    query, key, value = layer.heads(qkv)
    # The rotary embedding writes queries and keys to memory of their own.
    heads = (x.permute(1, 2, 0, 3) for x in (query.contiguous(), key.contiguous(), value))
    with _fused_kernels(query):
        return attention_kernel(*heads)


def _fused_kernels(query: Tensor) -> AbstractContextManager[Any]:
    """Have a GPU take cuDNN's attention, else flash attention, else raise RuntimeError.

    Torch would change to a slower kernel with S x S probabilities in silence. Neither takes fp32,
    which on a GPU is for comparisons.
    """
    if query.device.type == "cpu" or query.dtype == torch.float32:
        return nullcontext()
    return sdpa_kernel(FUSED_ATTENTION, set_priority=True)


class GatedLayer(TransformerLayer):
    """A layer of attention and a gated MLP, whose forward pass a kind of layer computes.

    With recompute "layers" it keeps its input only and runs forward once more in backward; with
    "selective" it keeps the outputs of matrix products and of attention, and computes the functions
    between them again. mcore's own recomputation saves and restores CUDA's random state; nothing
    here draws random numbers.
    """

    def __init__(self, *args: Any, model: ModelConfig, recompute: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model, self.recompute = model, recompute

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return the next hidden states [S, B, H], and no context of cross-attention."""
        inputs = hidden_states, attention_mask, packed_seq_params
        if self.recompute == "layers" and torch.is_grad_enabled():
            # Reentrant: the other kind hands a linear a copy of its weight in backward, which has
            # no gradient buffer, and DDP would not hear that the weight's gradient is complete.
            output = checkpoint(
                self._computed, *inputs, use_reentrant=True, preserve_rng_state=False
            )
        else:
            output = self._computed(*inputs)
        return output, None

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [S, B, N, D] of the first linear's output.

        Its features are grouped by key: the queries of the group, the key, the value.
        """
        attention = self.self_attention
        size, groups = (
            attention.hidden_size_per_attention_head,
            attention.num_query_groups_per_partition,
        )
        # [S, B, groups, features of a group].
        grouped = qkv.unflatten(-1, (groups, -1))
        query, key, value = grouped.split([grouped.shape[-1] - 2 * size, size, size], -1)
        return query.reshape(*query.shape[:2], -1, size), key, value

    def _computed(self, x: Tensor, mask: Tensor | None, packed: Any) -> Tensor:
        raise NotImplementedError

    def _recomputed(
        self, outputs: tuple[Tensor, ...], compute: Callable[[], tuple[Tensor, ...]]
    ) -> AbstractContextManager[None]:
        """Keep `compute` for backward instead of its outputs, where the run recomputes these."""
        selective = self.recompute == "selective"
        return recomputed(outputs, compute) if selective else nullcontext()


class Olmo2Layer(GatedLayer):
    """h = x + norm(attention(x)); h + norm(mlp(h))."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attention, size = self.self_attention, self.config.kv_channels
        attention.q_layernorm = FullWidthNorm(self.config, self.config.num_attention_heads * size)
        attention.k_layernorm = FullWidthNorm(self.config, self.config.num_query_groups * size)

    def _computed(self, x: Tensor, mask: Tensor | None, packed: Any) -> Tensor:
        attention, mlp = self.self_attention, self.mlp

        qkv, _ = attention.linear_qkv(x)
        query, key, value = self.heads(qkv)
        rotated = self._normed_and_rotated(query, key)
        # Attention keeps its inputs for backward; within the block it keeps how to compute them.
        with self._recomputed(rotated, lambda: self._normed_and_rotated(query, key)):
            context = attention.core_attention(
                *rotated, value, mask, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed
            )
        projected, _ = attention.linear_proj(context)

        attention_norm = attention.linear_proj.post_norm
        h = attention_norm(projected, x)
        with self._recomputed((h,), lambda: (attention_norm(projected, x),)):
            gate_up, _ = mlp.linear_fc1(h)

        product = swiglu(gate_up)
        with self._recomputed((product,), lambda: (swiglu(gate_up),)):
            y, _ = mlp.linear_fc2(product)
        output: Tensor = mlp.linear_fc2.post_norm(y, h)
        return output

    def _normed_and_rotated(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        attention, group = self.self_attention, parallel_state.get_tensor_model_parallel_group()
        return normed_and_rotated(
            query,
            key,
            attention.q_layernorm.weight,
            attention.k_layernorm.weight,
            rotary_base=self.model.rope_theta,
            rope_scaling=self.model.rope_scaling,
            eps=self.config.layernorm_epsilon,
            group=group if group.size() > 1 else None,
        )


class PreNormLayer(GatedLayer):
    """h = x + attention(norm(x)); h + mlp(norm(h)); some layers may have no rotary embedding."""

    def _computed(self, x: Tensor, mask: Tensor | None, packed: Any) -> Tensor:
        attention, mlp = self.self_attention, self.mlp

        normed_x = self.input_layernorm(x)
        with self._recomputed((normed_x,), lambda: (self.input_layernorm(x),)):
            qkv, _ = attention.linear_qkv(normed_x)
        query, key, value = self.heads(qkv)
        turned = self._turned(query, key)
        # From qkv, which the values keep: where queries share keys, `heads` copies the queries.
        with self._recomputed(turned, lambda: self._turned(*self.heads(qkv)[:2])):
            context = attention.core_attention(
                *turned, value, mask, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed
            )
        projected, _ = attention.linear_proj(context)
        h = x + projected

        normed_h = self.pre_mlp_layernorm(h)
        with self._recomputed((normed_h,), lambda: (self.pre_mlp_layernorm(h),)):
            gate_up, _ = mlp.linear_fc1(normed_h)
        product = swiglu(gate_up)
        with self._recomputed((product,), lambda: (swiglu(gate_up),)):
            y, _ = mlp.linear_fc2(product)
        output: Tensor = h + y
        return output

    def _turned(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, after the rotary embedding if this layer has it."""
        model = self.model
        if not model.rotates(self.layer_number - 1):  # counted from 1 in the whole model
            return query, key
        return rotated_heads(
            query, key, rotary_base=model.rope_theta, rope_scaling=model.rope_scaling
        )
