"""The run configuration in DeepSpeed's terms."""

from typing import Any

from train.run.config import RunConfig

NEVER = 2**40  # steps
BUCKET_ELEMENTS = 500_000_000  # reduced at once


def deepspeed_config(run: RunConfig, data_parallel: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run at this number of ranks.

    Gradients are accumulated and reduced in fp32 at every precision. Stage 1 in bf16 reduces after
    the backward pass, without the buckets.
    """
    return {
        "train_batch_size": run.batch_size,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.batch_size // (run.micro_batch_size * data_parallel),
        "gradient_clipping": run.optimizer.clip_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": run.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": NEVER,
        "zero_optimization": {
            "stage": run.zero.stage,
            "overlap_comm": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "round_robin_gradients": False,
        },
    }
