"""The megatron-core engine, which runs without CUDA too, over gloo."""

import warnings

from train.megatron import cpu  # noqa: F401  stands in for CUDA before megatron-core is imported

# megatron-core calls collectives by names that torch 2.14 has renamed; its shards of fp32 weights
# are views whose gradient it sets itself, and none where Muon has made the update.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
