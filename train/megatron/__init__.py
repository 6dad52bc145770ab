"""The megatron-core engine, which runs without CUDA too, over gloo."""

import logging
import warnings

from train.megatron import cpu  # noqa: F401  stands in for CUDA before megatron-core is imported
from train.megatron.weight_gradients import use_torch

# megatron-core calls collectives by names that torch 2.14 has renamed; its shards of fp32 weights
# are views whose gradient it sets itself, and none where Muon has made the update.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
# It recommends a layout of buffers that is its default, and a place for common.pt (`shards`).
for _part in ("distributed.distributed_data_parallel", "dist_checkpointing.strategies.common"):
    logging.getLogger(f"megatron.core.{_part}").setLevel(logging.ERROR)

use_torch()
