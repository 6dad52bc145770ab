"""A model as a megatron-core GPTModel: an OLMo2 (arXiv 2501.00656, section 3.3), or a Llama.

OLMo2:   h = x + norm_attn(attention(x));   out = h + norm_mlp(mlp(h));   final norm, then lm_head
Llama:   h = x + attention(norm_attn(x));   out = h + mlp(norm_mlp(h));   final norm, then lm_head
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from train.engine import LinearPart
from train.megatron import transformer_engine
from train.megatron.layers import (
    CausalAttention,
    ColumnLinear,
    Embedding,
    Olmo2Layer,
    PreNormLayer,
    RMSNorm,
    post_normed,
)
from train.megatron.loss import Head
from train.megatron.weight_gradients import keep_fp32
from train.model import megatron_names
from train.model.config import ModelConfig, hidden_matrices
from train.model.precision import Precision, dtype_of
from train.run.config import RunConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARAMETER_DTYPE = {precision: DTYPES[dtype_of(precision)] for precision in get_args(Precision)}


def transformer_config(run: RunConfig) -> TransformerConfig:
    """Return megatron-core's configuration of this run. Fusions by kernels of Apex are off."""
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
        kv_channels=model.head_size,
        add_qkv_bias=bool(model.training.biases),
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # mcore draws no weights: `Engine.start_from` sets them, or a checkpoint.
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=True,  # by `train.megatron.weight_gradients`
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        **fields,
    )


def initialize_groups(run: RunConfig) -> None:
    """Make the process groups of this layout; the remaining ranks are data-parallel."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.parallel.tensor,
        pipeline_model_parallel_size=run.parallel.pipeline,
        create_gloo_process_groups=False,  # for mcore's own checkpoints
    )


def _block_spec(run: RunConfig, num_layers: int) -> TransformerBlockSubmodules:
    """Return the modules of one pipeline stage of `num_layers` layers."""
    kernels: dict[str, Any] = {
        "column": ColumnLinear,
        "row": RowParallelLinear,
        "attention": CausalAttention,
    }
    recompute = run.recompute
    if run.kernels == "transformer_engine":
        kernels = transformer_engine.kernels()
        recompute = "none" if recompute == "layers" else recompute  # mcore recomputes whole layers

    norms: dict[str, Any] = {}
    row = kernels["row"]
    if run.model.row.norms == "after":
        row = post_normed(row)
    else:
        norms = {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}

    attention = SelfAttentionSubmodules(
        linear_qkv=kernels["column"],
        core_attention=kernels["attention"],
        linear_proj=row,
    )
    mlp = MLPSubmodules(linear_fc1=kernels["column"], linear_fc2=row)
    layer = ModuleSpec(
        PreNormLayer if norms else Olmo2Layer,
        params={"model": run.model, "recompute": recompute},
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(SelfAttention, submodules=attention),
            mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
            **norms,
        ),
    )
    return TransformerBlockSubmodules([layer] * num_layers, RMSNorm)


def build_model(run: RunConfig, config: TransformerConfig, device: torch.device) -> GPTModel:
    """Return the layers of this rank's pipeline stage; `Engine.start_from` sets their weights."""
    model = GPTModel(
        config,
        _block_spec(run, config.num_layers // run.parallel.pipeline),
        vocab_size=run.model.vocab_size,
        max_sequence_length=run.data.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=run.model.tie_word_embeddings,
        position_embedding_type="none",  # the layer has it
        # Logits of its own rows of the vocabulary stay on each tensor rank.
        parallel_output=True,
    )
    # mcore takes no other classes for them.
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = Embedding
    if model.post_process:
        model.output_layer.__class__ = Head

    for name, parameter in global_parameters(model).items():
        axis = megatron_names.shard_axis(name)
        # By this the gradient norm counts every weight once; Transformer Engine sets it itself.
        if axis is not None and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    model.to(device)
    keep_fp32(model)
    return model


def global_parameters(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Return a stage's parameters by their names in the whole model: a stage counts from 0.

    The last of several stages has a copy of an embedding that is the head as well, by its name.
    """
    offset = get_transformer_layer_offset(model.config)
    parameters = {}
    for local_name, parameter in model.named_parameters():
        layer, suffix = megatron_names.split_layer(local_name)
        name = local_name if layer is None else f"{megatron_names.LAYERS}{layer + offset}.{suffix}"
        if model.share_embeddings_and_output_weights and name == megatron_names.HEAD:
            name = megatron_names.EMBEDDING
        parameters[name] = parameter
    return parameters


def linears(config: ModelConfig, model: GPTModel) -> Iterator[LinearPart]:
    """Yield this rank's part of every linear of a stage's layers, by its name in HF."""
    hidden = hidden_matrices(config)
    ranks = parallel_state.get_tensor_model_parallel_group()
    rank, size = ranks.rank(), ranks.size()
    for name, parameter in global_parameters(model).items():
        # A fused matrix is a hidden one if all HF matrices in it are.
        if not hidden.issuperset(megatron_names.hf_names(name)):
            continue
        weight, axis = parameter.detach(), megatron_names.shard_axis(name)
        for hf_name, spans in megatron_names.hf_rows(name, config, size).items():
            pieces = tuple(weight[begin:end] for begin, end in spans)
            rows = sum(map(len, pieces))
            yield LinearPart(
                hf_name,
                pieces,
                row=rank * rows if axis == 0 else 0,
                column=rank * weight.shape[1] if axis == 1 else 0,
                ranks=ranks if size > 1 else None,
            )


def weight_shard(name: str, read: Callable[[str], Tensor], model: ModelConfig) -> Tensor:
    """Return this rank's shard of the parameter `name`, from whole tensors by HF name."""
    weight = megatron_names.from_hf(name, read, model)
    rank = parallel_state.get_tensor_model_parallel_rank()
    return megatron_names.shard(
        name, weight, rank, parallel_state.get_tensor_model_parallel_world_size()
    )
