"""OLMo2 as a megatron-core GPTModel: reordered norms and a QK-norm over all heads (arXiv 2501.00656, section 3.3).

h = x + norm_attn(attention(x));   out = h + norm_mlp(mlp(h));   final norm, then lm_head
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from train import layout
from train.command import UserError
from train.config import RunConfig
from train.initialization import initial_parameter
from train.megatron import transformer_engine
from train.megatron.layers import (
    CausalAttention,
    KeyNorm,
    PostNormRowParallelLinear,
    QueryNorm,
    RecomputedLayer,
    RMSNorm,
    SwiGluMLP,
)
from train.settings import ModelConfig

PARAMETER_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def check_kernels(run: RunConfig) -> None:
    """UserError where the run asks for kernels that are not here, or the kernels cannot do what it asks for."""
    if run.kernels == "transformer_engine":
        transformer_engine.check_installed()
    elif run.parallel.context > 1:
        raise UserError(
            f"parallel.context {run.parallel.context} needs a GPU and kernels 'transformer_engine'; set it to 1"
        )
    if run.parallel.context > 1 and run.data.document_masking:
        raise UserError("data.document_masking cannot be combined with parallel.context; set parallel.context to 1")


def transformer_config(run: RunConfig) -> TransformerConfig:
    """megatron-core's configuration of this run. Fusions that need Apex are off."""
    model, parallel, dtype = run.model, run.parallel, PARAMETER_DTYPE[run.precision]
    fields: dict[str, Any] = {}
    if run.kernels == "transformer_engine":
        fields = transformer_engine.config_fields(run)
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
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=_virtual_size(run),
        context_parallel_size=parallel.context,
        # In one batch an interleaved stage would send twice to, and receive twice from, its only neighbour of two.
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **fields,
    )


def _virtual_size(run: RunConfig) -> int | None:
    """How mcore says that a pipeline is not interleaved: None, not 1."""
    return run.parallel.virtual_pipeline if run.parallel.virtual_pipeline > 1 else None


def initialize_groups(run: RunConfig) -> None:
    """The process groups of this layout. The data-parallel size follows from the world size."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.parallel.tensor,
        pipeline_model_parallel_size=run.parallel.pipeline,
        virtual_pipeline_model_parallel_size=_virtual_size(run),
        context_parallel_size=run.parallel.context,
    )


def _block_spec(run: RunConfig, num_layers: int) -> TransformerBlockSubmodules:
    """The modules of one model chunk of `num_layers` layers."""
    kernels: dict[str, Any] = {
        "column": ColumnParallelLinear,
        "row": PostNormRowParallelLinear,
        "attention": CausalAttention,
        "norm": RMSNorm,
    }
    recomputed = run.recompute == "layers"
    if run.kernels == "transformer_engine":
        kernels, recomputed = transformer_engine.kernels(), False  # mcore recomputes these by itself
    mask = AttnMaskType.arbitrary if run.data.document_masking else AttnMaskType.causal
    attention = SelfAttentionSubmodules(
        linear_qkv=kernels["column"],
        core_attention=kernels["attention"],
        linear_proj=kernels["row"],
        q_layernorm=QueryNorm,
        k_layernorm=KeyNorm,
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=IdentityOp,
        self_attention=ModuleSpec(SelfAttention, params={"attn_mask_type": mask}, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=IdentityOp,
        mlp=ModuleSpec(SwiGluMLP, submodules=MLPSubmodules(linear_fc1=kernels["column"], linear_fc2=kernels["row"])),
        mlp_bda=get_bias_dropout_add,
    )
    layers = [ModuleSpec(RecomputedLayer if recomputed else TransformerLayer, submodules=layer)] * num_layers
    return TransformerBlockSubmodules(layers, kernels["norm"])


def build_chunks(run: RunConfig, config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """The parts of the model on one rank, one unless the pipeline is interleaved.

    They are initialised as `train.initialization` says, each parameter by its name.
    """
    parallel = run.parallel
    num_layers = config.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
    chunks = []
    for index in range(parallel.virtual_pipeline):
        stage = index if parallel.virtual_pipeline > 1 else None
        chunk = GPTModel(
            config,
            _block_spec(run, num_layers),
            vocab_size=run.model.vocab_size,
            max_sequence_length=run.data.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=run.model.rope_theta,
            parallel_output=True,
            vp_stage=stage,
        )
        _initialize(chunk, run)
        chunks.append(chunk.to(device))
    return chunks


def _initialize(chunk: GPTModel, run: RunConfig) -> None:
    with torch.no_grad():
        for name, parameter in global_parameters(chunk).items():
            parameter.copy_(
                weight_shard(name, lambda hf_name: initial_parameter(hf_name, run.model, run.seed), run.model)
            )
            axis = layout.shard_axis(name)
            # What the gradient norm goes by to count every weight once; Transformer Engine has set it already.
            if axis is not None and not getattr(parameter, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)


def global_parameters(chunk: GPTModel) -> dict[str, torch.nn.Parameter]:
    """The parameters of a chunk by their names in the whole model: a chunk counts layers from its own first one."""
    offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
    parameters = {}
    for local_name, parameter in chunk.named_parameters():
        layer, suffix = layout.split_layer(local_name)
        name = local_name if layer is None else f"{layout.LAYERS}{layer + offset}.{suffix}"
        parameters[name] = parameter
    return parameters


def weight_shard(name: str, read: Callable[[str], Tensor], model: ModelConfig) -> Tensor:
    """What this rank holds of the parameter `name`, from whole tensors by HF name."""
    whole = layout.from_hf(name, read, model)
    rank = parallel_state.get_tensor_model_parallel_rank()
    return layout.shard(name, whole, rank, parallel_state.get_tensor_model_parallel_world_size())
