"""Gradients of weights, added up over microbatches in fp32, by torch on a CPU and on a GPU.

megatron-core's linears leave the product of a weight's gradient to an extension of Apex, which adds
it to the fp32 buffer without rounding it to bf16. torch has such a product too, and it is the one
taken here, whether or not Apex is installed: the same run is the same on every machine. All other
weights hand their gradients, summed in fp32, to mcore's DDP, which adds them to the buffer. So
gradients depend on the micro batch by the order of fp32 sums alone.

Under kernels "transformer_engine" its own linears do the same.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from base.libraries.private_names import replace
from train.model.accumulation import add_product


def _accumulate(inputs_TI: Tensor, of_outputs_TO: Tensor, gradient_OI: Tensor) -> None:
    """Add the gradient of a linear's weight to the gradient buffer, in one pass."""
    add_product(gradient_OI, of_outputs_TO, inputs_TI)


def use_torch() -> None:
    """Give mcore's linears what they call of Apex under `gradient_accumulation_fusion`.

    Afterwards they hand DDP a gradient without values, so that it knows when a bucket is complete.
    Transformer Engine, which a container has, would keep these gradients on a GPU.
    """
    from megatron.core.tensor_parallel import layers

    replace(layers, "_grad_accum_fusion_available", True)
    replace(layers, "HAVE_TE", False)
    linears: Any = layers
    linears.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate)


def keep_fp32(model: nn.Module) -> None:
    """Have autograd leave the gradients of a model's weights in the precision they were summed in.

    It would round those of bf16 weights to bf16, once a microbatch.
    """
    for parameter in model.parameters():
        parameter.grad_dtype = None
