"""What the server of `tests.forked` imports before it forks: what most commands import, and
nothing of the project.
"""

import gc
import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import mlflow  # noqa: F401  by deepspeed
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.tensor.experimental  # by megatron-core, as is the next
import torch.utils.cpp_extension  # noqa: F401
import transformers.models.olmo2.modeling_olmo2  # noqa: F401

gc.freeze()  # a collection in a fork would copy every page of what is imported here
