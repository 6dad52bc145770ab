"""Transformer Engine: training against torch's kernels, and its 8-bit products against the same
products written out in torch. Not run on a GPU yet.

Shapes: T tokens, I inputs, O outputs; R, S rows of the two factors of a product, K the dimension
that it sums over.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from base.errors import UserError
from tests.gpu.figures import CheckedFigure, SkippedError
from tests.gpu.training import compared as compared_runs
from tests.gpu.workbench import Workbench
from train.model.precision import FP8_RECIPES

# Numbers that share a scale, in rows and along the sum: of activations and gradients, of weights.
# None is all of them. The recipes of transformer_engine.common.recipe in release 2.20.2.
BLOCKS: dict[str, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
    "fp8": (None, None),
    "fp8_blockwise": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (1, 32)),
}
Results = tuple[Tensor, Tensor, Tensor]  # output [T, O], gradients by inputs and by the weight
Linear = Callable[[Tensor, Tensor, Tensor, str], Results]
ACTIVATION, WEIGHT, GRADIENT = "activation", "weight", "gradient"
# Blocks of 128 that are not whole, and sums of at most 256 numbers.
TOKENS, INPUTS, OUTPUTS = 192, 256, 160
# The result is rounded to bf16, by at most 2^-9 of each number. Hopper's tensor cores keep 14 bits
# of a sum after every 32 numbers (DeepSeek-V3, arXiv 2412.19437, section 3.5.2): of 256 numbers
# 8 x 2^-14 = 2^-11. Both are below 2^-8. Products in bf16, or with the blocks of another recipe,
# are off by 2^-6 or more (`tests/rehearsal/test_eight_bits.py`).
MOST = 2.0**-8


# Losses of 12 steps from those in bf16 with torch's kernels, nats per token, at most. With products
# written out, on a CPU and with three seeds, they were within 6.5e-3, a third,
# (`tests/rehearsal/test_eight_bits.py`), and 5e-4 between two engines in bf16 on an H200.
APART = dict.fromkeys(("bf16", *FP8_RECIPES), 2e-2)


def rounded(factor_RK: Tensor, role: str, precision: str) -> Tensor:
    """Return the factor of a product as 8-bit numbers times their scales, fp32 [R, K].

    A scale puts the largest number of its block at the largest of the format; of blocks, it is the
    next power of two.
    """
    is_hybrid = FP8_RECIPES[precision][0] == "hybrid"
    dtype = torch.float8_e5m2 if role == GRADIENT and is_hybrid else torch.float8_e4m3fn
    rows, columns = factor_RK.shape
    r, k = BLOCKS[precision][role == WEIGHT] or (rows, columns)

    padded = torch.nn.functional.pad(factor_RK.float(), (0, -columns % k, 0, -rows % r))
    blocks = padded.unflatten(1, (-1, k)).unflatten(0, (-1, r))
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.finfo(dtype).max / largest
    if BLOCKS[precision][0]:
        scales = torch.exp2(torch.floor(torch.log2(scales)))
    scales = torch.where(largest == 0, 1.0, scales)
    numbers = (blocks * scales).to(dtype).float() / scales
    return numbers.flatten(2).flatten(0, 1)[:rows, :columns]


def product(left_RK: Tensor, right_SK: Tensor, roles: tuple[str, str], precision: str) -> Tensor:
    """Return left right' of 8-bit numbers, summed in fp32, [R, S]."""
    left, right = (
        rounded(factor, role, precision)
        for factor, role in zip((left_RK, right_SK), roles, strict=True)
    )
    return left @ right.t()


class EightBitLinear(torch.autograd.Function):
    """x W' with all three products of 8-bit numbers; results have the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, precision: str) -> Tensor:
        """Return [T, O]."""
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.precision = precision
        return product(x_TI, weight_OI, (ACTIVATION, WEIGHT), precision).to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """Return the gradients by inputs and weight."""
        x_TI, weight_OI = ctx.saved_tensors
        by_inputs = product(gradient_TO, weight_OI.t(), (GRADIENT, WEIGHT), ctx.precision)
        by_weight = product(gradient_TO.t(), x_TI.t(), (GRADIENT, ACTIVATION), ctx.precision)
        return by_inputs.to(x_TI.dtype), by_weight.to(weight_OI.dtype), None


def check_can_run(precision: str) -> None:
    """Raise SkippedError where Transformer Engine, or this precision, cannot run."""
    from train.megatron.transformer_engine import check_can_run

    try:
        check_can_run(precision)
    except UserError as error:
        raise SkippedError(str(error)) from None


def training(workbench: Workbench, precision: str) -> list[CheckedFigure]:
    """The same run with torch's kernels in bf16 and with Transformer Engine's, in any precision."""
    check_can_run(precision)
    return [
        compared_runs(
            workbench,
            f"torch in bf16 against Transformer Engine in {precision}",
            {"precision": "bf16", "kernels": "torch"},
            {"precision": precision, "kernels": "transformer_engine"},
            most=APART[precision],
        )
    ]


def linear(workbench: Workbench, precision: str) -> list[CheckedFigure]:
    """A linear of Transformer Engine, forward and backward, under the recipe of a run."""
    check_can_run(precision)
    return compared(workbench, precision, transformer_engines)


def compared(workbench: Workbench, precision: str, linear: Linear) -> list[CheckedFigure]:
    """The output and both gradients of a linear beside those of `EightBitLinear`.

    Tokens, inputs and outputs come in groups of 32 of two sizes, which cancel in every sum. A scale
    that a group shares with one of the other size rounds it away, so that each recipe gives other
    numbers.
    """
    of_tokens, of_inputs, of_outputs = (
        torch.exp2(14.0 * (torch.arange(count) // 32 % 2)) for count in (TOKENS, INPUTS, OUTPUTS)
    )
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(TOKENS, INPUTS, generator=generator)
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=generator)
    gradient_TO = torch.randn(TOKENS, OUTPUTS, generator=generator)
    sized = (
        x_TI * of_inputs / of_tokens[:, None],
        weight_OI / (of_outputs[:, None] * of_inputs),
        gradient_TO * of_outputs * of_tokens[:, None],
    )
    inputs, weight, gradient = (tensor.bfloat16().to(workbench.torch_device) for tensor in sized)
    expected = written_out(inputs, weight, gradient, precision)
    results = linear(inputs, weight, gradient, precision)

    # What the groups' sizes leave in a result is taken out.
    sizes = (
        of_tokens[:, None] * of_outputs,
        of_inputs / of_tokens[:, None],
        1 / (of_outputs[:, None] * of_inputs),
    )
    names = ("output", "gradient by inputs", "gradient by the weight")
    figures = []
    for name, size, result, wanted in zip(names, sizes, results, expected, strict=True):
        even = [(tensor.detach().cpu().double() * size) for tensor in (result, wanted)]
        error = float((even[0] - even[1]).norm() / even[1].norm())
        figures.append(
            CheckedFigure(f"8-bit linear in {precision}: {name}", error, "relative", most=MOST)
        )
    return figures


def written_out(x_TI: Tensor, weight_OI: Tensor, gradient_TO: Tensor, precision: str) -> Results:
    """Return the results of `EightBitLinear`."""
    x_TI, weight_OI = (tensor.clone().requires_grad_() for tensor in (x_TI, weight_OI))
    output_TO: Tensor = EightBitLinear.apply(x_TI, weight_OI, precision)
    by_inputs, by_weight = torch.autograd.grad(output_TO, (x_TI, weight_OI), gradient_TO)
    return output_TO, by_inputs, by_weight


def transformer_engines(
    x_TI: Tensor, weight_OI: Tensor, gradient_TO: Tensor, precision: str
) -> Results:
    """Return those of Transformer Engine's linear, in the context that mcore computes layers in."""
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.transformer.transformer_config import TransformerConfig

    number_format, recipe = FP8_RECIPES[precision]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=INPUTS,
        num_attention_heads=1,
        fp8=number_format,
        fp8_recipe=recipe,
    )
    linear = te.Linear(INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(weight_OI)
    x_TI = x_TI.clone().requires_grad_()
    with get_fp8_context(config):
        output_TO: Tensor = linear(x_TI)
    output_TO.backward(gradient_TO)
    assert x_TI.grad is not None
    return output_TO, x_TI.grad, linear.weight.grad
