"""OLMo2 as a megatron-core GPTModel: reordered norms and a QK-norm over all heads (arXiv 2501.00656, section 3.3).

    h = x + norm_attn(attention(x));   out = h + norm_mlp(mlp(h));   final norm, then lm_head

Shapes: S tokens, B sequences, H hidden size, N heads of this rank, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from train import layout
from train.config import RunConfig
from train.initialization import initial_parameter
from train.settings import ModelConfig

PARAMETER_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RMSNorm(nn.Module):
    """RMSNorm over the last axis with a weight that every tensor-parallel rank holds whole."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises in fp32 and returns the dtype of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PostNormRowParallelLinear(RowParallelLinear):
    """A row-parallel linear whose output, summed over tensor-parallel ranks, is then normalised: OLMo2's post-norm."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Linear, reduction, norm."""
        y, bias = super().forward(x)
        return self.post_norm(y), bias


class FullWidthNorm(nn.Module):
    """RMSNorm over all heads of all tensor-parallel ranks at once; each rank holds the weights of its own heads.

    The sum of squares is all-reduced in forward and its gradient in backward: with a plain all-reduce the forward pass
    is right and the gradient is not. mcore builds this as `q_layernorm` and `k_layernorm` with `qk_layernorm=False`;
    with it True, mcore would sum the gradients of these weights over ranks as if every rank held the same ones.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.full_width = num_heads * head_dim
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.ones(self.full_width // ranks, dtype=config.params_dtype))

    def forward(self, x_SBND: Tensor) -> Tensor:
        """Normalises in fp32 and returns the dtype of the input."""
        x_SBH = x_SBND.flatten(2).float()
        squares_SB1 = x_SBH.square().sum(-1, keepdim=True)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            squares_SB1 = reduce_from_tensor_model_parallel_region(copy_to_tensor_model_parallel_region(squares_SB1))
        normed_SBH = x_SBH * torch.rsqrt(squares_SB1 / self.full_width + self.eps)
        return (self.weight * normed_SBH).to(x_SBND.dtype).view(x_SBND.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight is split over tensor-parallel ranks; without this it could not be loaded at another layout."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return sharded


class QueryNorm(FullWidthNorm):
    """The norm over all query heads; mcore passes the head size as `hidden_size`."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(FullWidthNorm):
    """The norm over all key heads; mcore passes the head size as `hidden_size`."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config, config.num_query_groups, hidden_size, eps)


class CausalAttention(nn.Module):
    """Causal softmax attention without dropout, by torch's fused kernel.

    mcore's DotProductAttention forks the CUDA random state even at dropout 0; OLMo2 has no dropout.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query_SBND: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        """Returns [S, B, N x D]. The mask must be None: causality is built in."""
        assert attention_mask is None
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key, value))
        out_BNSD = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


def transformer_config(run: RunConfig) -> TransformerConfig:
    """megatron-core's configuration of this run. Fusions that need Apex or Transformer Engine are off."""
    model, dtype = run.model, PARAMETER_DTYPE[run.precision]
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        qk_layernorm=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=run.parallel.tensor,
        pipeline_model_parallel_size=run.parallel.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=run.precision == "bf16",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=PostNormRowParallelLinear,
        q_layernorm=QueryNorm,
        k_layernorm=KeyNorm,
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=IdentityOp,
        self_attention=ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=IdentityOp,
        mlp=ModuleSpec(
            MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=PostNormRowParallelLinear)
        ),
        mlp_bda=get_bias_dropout_add,
    )
    num_layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules([ModuleSpec(TransformerLayer, submodules=layer)] * num_layers, RMSNorm)


def build_model(run: RunConfig, config: TransformerConfig, device: torch.device) -> GPTModel:
    """Build this rank's part of the model, initialised as `train.initialization` says, on `device`."""
    model = GPTModel(
        config,
        _block_spec(config),
        vocab_size=run.model.vocab_size,
        max_sequence_length=run.data.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=run.model.rope_theta,
        parallel_output=True,
    )
    with torch.no_grad():
        for local_name, parameter in model.named_parameters():
            name = global_name(local_name, config)
            parameter.copy_(_initial_shard(name, run.model, run.seed))
            axis = layout.shard_axis(name)
            if axis is not None:  # what the gradient norm goes by to count every weight once
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    return model.to(device)


def global_name(name: str, config: TransformerConfig) -> str:
    """A parameter's name in the whole model: layers are counted from this pipeline stage's first one in `name`."""
    layer, suffix = layout.split_layer(name)
    return name if layer is None else f"{layout.LAYERS}{layer + get_transformer_layer_offset(config)}.{suffix}"


def _initial_shard(name: str, model: ModelConfig, seed: int) -> Tensor:
    whole = layout.from_hf(name, lambda hf_name: initial_parameter(hf_name, model, seed), model)
    rank = parallel_state.get_tensor_model_parallel_rank()
    return layout.shard(name, whole, rank, parallel_state.get_tensor_model_parallel_world_size())
