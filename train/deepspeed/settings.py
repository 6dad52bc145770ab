"""The run configuration in DeepSpeed's terms."""

from typing import Any

import deepspeed
from deepspeed.runtime import constants, precision_config
from deepspeed.runtime.zero import config as zero_config

from train.command import UserError
from train.config import RunConfig

NEVER = 2**40  # steps


def deepspeed_config(run: RunConfig, data_parallel: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run at this number of ranks.

    Gradients are accumulated and reduced in fp32 at every precision. Stage 0, and stage 1 in bf16, reduce after the
    backward pass: neither buckets nor overlapping are theirs.

    Raises:
        UserError: the installed DeepSpeed does not know a key, which it would ignore.
    """
    config: dict[str, Any] = {
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
            "overlap_comm": run.zero.overlap_communication,
            "reduce_bucket_size": run.zero.bucket_elements,
            "allgather_bucket_size": run.zero.bucket_elements,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "round_robin_gradients": False,
        },
    }
    _check_keys(config)
    return config


def _check_keys(config: dict[str, Any]) -> None:
    """DeepSpeed refuses unknown keys within its sections but ignores them beside and within `data_types`."""
    known = {
        value
        for module in (constants, precision_config, zero_config)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    unknown = (config.keys() | config["data_types"].keys()) - known
    if unknown:
        raise UserError(
            f"deepspeed {deepspeed.__version__} does not know the settings {', '.join(sorted(unknown))}; install the "
            f"version that pyproject.toml names"
        )
