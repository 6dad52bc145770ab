"""Names of libraries that a new version may change without a word: private, replaced or internal.

Whoever raises a version in the lock reads here what to look at. `tests/test_private_names.py` fails
where a name has gone, where another version is installed than the one it was read for, and where
the product uses a private name or replaces one that is not in the table.
"""

from typing import Any, NamedTuple

# Distributions to the versions that the names below were read for.
READ_FOR = {
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
    "gptqmodel": "7.6.0",
    "llmcompressor": "0.14.0.1",
    "lm_eval": "0.4.13",
    "megatron-core": "0.19.2",
    "torch": "2.14.0",
    "transformers": "5.17.0",
}


class Use(NamedTuple):
    """Names of one module or class of a library, the file of ours that uses them, and what for."""

    user: str
    owner: str
    names: tuple[str, ...]
    why: str


def replace(owner: Any, name: str, value: Any) -> Any:
    """Put a value in the place of a library's attribute, and return what was there.

    Raises:
        AttributeError: there is none of that name any more.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    return before


_CPU, _STATE = "train/megatron/cpu.py", "train/megatron/optimizer_state.py"
_SHARDED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_BOXES, _COST = "train/run/dcp_boxes.py", "curvature/cost/simulation.py"
_SDPA = "_scaled_dot_product_flash_attention_for_cpu"

USES = (
    # training: megatron-core
    Use(
        _CPU,
        "torch.cuda",
        ("current_device", "synchronize", "current_stream"),
        "replaced without CUDA: megatron-core asks for the device",
    ),
    Use(_CPU, "torch.Tensor", ("type",), "replaced without CUDA: it compares names of types"),
    Use(_CPU, "torch.Tensor", ("cuda",), "replaced without CUDA: it moves a copy of the embedding"),
    Use(_CPU, "torch", ("zeros", "tensor"), "replaced without CUDA: it makes tensors there"),
    Use(_CPU, "torch", ("compile",), "replaced while megatron-core is imported: saves 1.5 s"),
    Use(
        "train/megatron/weight_gradients.py",
        "megatron.core.tensor_parallel.layers",
        ("fused_weight_gradient_mlp_cuda", "_grad_accum_fusion_available", "HAVE_TE"),
        "stands in for Apex, and for Transformer Engine: torch adds gradients of weights in place",
    ),
    Use(
        "train/megatron/data_parallel.py",
        _BUFFERS,
        ("dist_all_gather_func", "dist_reduce_scatter_func"),
        "replaced over gloo, whose own copy everything",
    ),
    Use(
        "train/megatron/data_parallel.py",
        f"{_BUFFERS}._ParamAndGradBucketGroup",
        ("param_gather_handle", "param_gather_dispatched", "finish_param_sync"),
        "waits for the weights that a layer reads",
    ),
    Use(
        "train/megatron/engine.py",
        _SHARDED,
        ("_copy_main_params_to_model_params",),
        "makes the model compute with weights that were set",
    ),
    Use(
        _STATE,
        _SHARDED,
        ("buffers", "gbuf_ranges", "model_param_group_index_map", "data_parallel_group"),
        "finds the pieces of parameters on a rank",
    ),
    Use(
        _STATE,
        f"{_BUFFERS}._ParamAndGradBuffer",
        ("buckets", "param_index_map"),
        "finds the pieces of parameters on a rank",
    ),
    # training: DeepSpeed
    Use(
        "train/deepspeed/sharding.py",
        _ZERO,
        (
            *("round_robin_bit16_padding", "round_robin_bit16_groups"),
            *("single_partition_of_fp32_groups", "averaged_gradients", "all_grad_tensors"),
            *("scaled_global_norm", "update_lp_params"),
        ),
        "reads and sets what a rank holds of weights and gradients",
    ),
    Use(
        "train/deepspeed/sharded_weights.py",
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
        (
            *("fp16_groups", "fp32_partitioned_groups_flat", "averaged_gradients"),
            *("_get_norm_groups", "_partition_all_parameters"),
            "_reassign_or_swap_out_partitioned_parameters",
        ),
        "reads and sets what a rank holds of weights and gradients in stage 3",
    ),
    Use(
        "train/deepspeed/setup.py",
        "deepspeed.ops",
        ("__compatible_ops__",),
        "keeps DeepSpeed from compiling for minutes",
    ),
    # training: torch and datasets
    Use(
        "train/model/attention.py",
        "torch",
        ("_fused_sdp_choice",),
        "says which kernel attention takes",
    ),
    Use(
        "train/optimizers/adamw.py",
        "torch",
        ("_fused_adamw_",),
        "one kernel for all parameters, with one count of steps",
    ),
    Use(
        "train/megatron/optimizer.py",
        "torch",
        ("_foreach_norm", "_foreach_mul_"),
        "one kernel for all gradients",
    ),
    Use("train/distributed.py", "torch.distributed.distributed_c10d", ("_world",), "all groups"),
    Use(
        "train/running/watchdog.py",
        "torch._C._distributed_c10d",
        ("_dump_fr_trace",),
        "says in which collective a rank hangs",
    ),
    Use(
        "train/monitoring.py",
        "torch.cuda.memory",
        ("_record_memory_history", "_dump_snapshot"),
        "records the memory of a step; torch's documentation names no other way",
    ),
    Use(
        "train/data/documents.py",
        "datasets.config",
        ("TORCH_AVAILABLE",),
        "replaced: a worker that tokenizes need not import torch",
    ),
    # checkpoints and models
    Use(
        _BOXES,
        "torch._subclasses.fake_tensor",
        ("FakeTensorMode",),
        "reads where a tensor lies in a file, not the tensor",
    ),
    Use(_BOXES, "torch.distributed.checkpoint.utils", ("_create_file_view",), "a part of a file"),
    Use(
        _BOXES,
        "torch.storage.UntypedStorage",
        ("_checkpoint_offset",),
        "where a tensor's bytes begin",
    ),
    # curvature
    Use(_COST, "torch._subclasses.fake_tensor", ("FakeTensorMode",), "counts without computing"),
    Use(_COST, "torch.utils._python_dispatch", ("TorchDispatchMode",), "sees every operation"),
    Use(_COST, "torch.utils._pytree", ("tree_leaves",), "finds the tensors of an operation"),
    Use(_COST, "torch._ops.OpOverload", ("_overloadpacket",), "the operation of an overload"),
    Use(
        _COST,
        "torch.ops.aten",
        (_SDPA, f"{_SDPA}_backward", "_unsafe_view"),
        "operations that torch's own counter leaves out",
    ),
    # quantization
    Use(
        "quant_eval/casts/attention.py",
        "transformers.PreTrainedConfig",
        ("_attn_implementation",),
        "chooses the attention of one block",
    ),
    Use("quant_eval/casts/linear.py", "torch.Tensor", ("_version",), "tells a tensor written to"),
    Use(
        "quant_eval/libraries/run_gptqmodel.py",
        "gptqmodel.models._const",
        ("normalize_device",),
        "the device as its configuration holds it",
    ),
    Use(
        "quant_eval/libraries/run_gptqmodel.py",
        "gptqmodel.quantization.GPTQ",
        ("hessian_inverse",),
        "replaced: watched for Hessians that cannot be inverted",
    ),
    *(
        Use(
            "quant_eval/libraries/run_gptqmodel.py",
            f"gptqmodel.quantization.{name}",
            ("quantize",),
            "replaced: its weights, grids, loss and number of samples are kept",
        )
        for name in ("GPTQ", "GPTAQ")
    ),
    Use(
        "quant_eval/libraries/pcre.py",
        "gptqmodel.quantization.config",
        ("pcre",),
        "a module that stands in for PyPcre, which takes a compiler",
    ),
    Use(
        "quant_eval/libraries/run_llmcompressor.py",
        "llmcompressor.modifiers.transform.awq.base.AWQModifier",
        ("_compute_best_scale",),
        "overridden: notes the scales that were chosen",
    ),
    Use(
        "quant_eval/libraries/run_llmcompressor.py",
        "llmcompressor.pipelines.cache.IntermediatesCache",
        ("pin_memory",),
        "replaced: it fails without an accelerator",
    ),
    Use(
        "quant_eval/tasks/scoring.py",
        "lm_eval.models.huggingface.HFLM",
        ("_loglikelihood_tokens",),
        "overridden: shares requests among ranks",
    ),
    # the interpreter, any version
    Use("base/forks.py", "threading", ("_shutdown",), "awaits threads before a fork leaves"),
    Use("base/forks.py", "atexit", ("_run_exitfuncs",), "runs what is registered before it leaves"),
)
