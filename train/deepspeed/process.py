"""The settings of the process without which DeepSpeed compiles, prints and searches at import."""

import logging
import os
import warnings

import torch

from base.libraries.private_names import replace

# Read by DeepSpeed at its import, which announces the accelerator it finds by itself.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated")


def join(device: torch.device) -> None:
    """Let DeepSpeed use torch's process group, which must exist, and this rank's device."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import bf16_optimizer

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import sets another
    # DeepSpeed takes the device with this number; train.distributed may have chosen another one
    # than torchrun.
    os.environ.setdefault("LOCAL_RANK", "0")
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling takes minutes
    # It prints, whatever the level of the log.
    replace(bf16_optimizer, "see_memory_usage", lambda *_arguments, **_settings: None)
    deepspeed.init_distributed(dist_init_required=False)
