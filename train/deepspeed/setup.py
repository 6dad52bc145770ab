"""DeepSpeed's configuration of a run, and the settings of the process that it needs.

Without these it compiles, prints and searches at import.
"""

import logging
import os
import warnings
from typing import Any

import torch

from train.planning.memory import ZERO_BUCKET_ELEMENTS, ZERO_PREFETCH_ELEMENTS, parameter_count
from train.run.config import RunConfig

NEVER = 2**40  # steps

# Read by DeepSpeed at its import, which announces the accelerator it finds by itself.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated")


def join(device: torch.device) -> None:
    """Let DeepSpeed use torch's process group, which must exist, and this rank's device."""
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import sets another
    # DeepSpeed takes the device with this number; train.distributed may have chosen another one
    # than torchrun.
    os.environ.setdefault("LOCAL_RANK", "0")
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling takes minutes
    deepspeed.init_distributed(dist_init_required=False)


def deepspeed_config(run: RunConfig, data_parallel: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run at this number of ranks.

    To DeepSpeed every run is in fp32, as are weights, and gradients when they are accumulated and
    reduced: the model rounds the factors of products itself. DeepSpeed's `torch_autocast` would be
    torch's autocast too, but around the training step alone, and reduces gradients in bf16.
    """
    # DeepSpeed allocates all of it, whatever it fills.
    reduced = min(ZERO_BUCKET_ELEMENTS, parameter_count(run))
    return {
        "train_batch_size": run.batch_size,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.batch_size // (run.micro_batch_size * data_parallel),
        "gradient_clipping": run.optimizer.clip_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # DeepSpeed takes an optimizer that it does not know only if told to.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": NEVER,
        "zero_optimization": {
            # All parts of a group are updated at once, and no parameter stays gathered between
            # passes, whose weights may have changed.
            "sub_group_size": NEVER,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": ZERO_PREFETCH_ELEMENTS,
            "stage": run.zero.stage,
            "overlap_comm": True,
            "reduce_bucket_size": reduced,
            "allgather_bucket_size": ZERO_BUCKET_ELEMENTS,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "round_robin_gradients": False,
        },
    }
