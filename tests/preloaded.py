"""Imports of the server of `tests.forked` before it forks: what most commands import, and
nothing of the project.
"""

import gc
import os
import warnings

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import mlflow  # noqa: F401  by deepspeed
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.tensor.experimental  # by megatron-core, as is the next
import torch.utils.cpp_extension
import transformers.models.olmo2.modeling_olmo2  # noqa: F401

# As train.megatron.cpu does, and with the warnings that it filters. Functions that ask CUDA for
# anything are called later, when it has put others in their place.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.compile, compiler = lambda function: function, torch.compile  # type: ignore[assignment,misc]
    import megatron.core  # noqa: F401

    torch.compile = compiler

gc.freeze()  # a collection in a fork would copy every page of what is imported here
