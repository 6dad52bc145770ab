"""Sums over tokens that are kept in fp32, whatever the precision of what is added.

In bf16 a sum of many parts loses the small ones: its error would grow with the number of tokens in
a microbatch, and so `micro_batch_size` would change what a run learns. Gradients are summed here
in fp32; autograd rounds them to the `grad_dtype` of their weight, which is the weight's own unless
somebody sets another. The engines' models and the dual layers of `curvature` call what is here.

Shapes: C tokens of a chunk, N tokens in any arrangement, A and B features, V rows of an embedding,
H hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def sums_like(weight: Tensor) -> Tensor:
    """Return zeros of a weight's shape in fp32, or in its precision if that is higher."""
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))


def add_product(sums_AB: Tensor, left_CA: Tensor, right_CB: Tensor) -> None:
    """Add left' right to `sums_AB`, without rounding the product to the precision of its factors.

    Example: 256 + 1 is 256 in bf16.
        >>> sums = torch.zeros(1, 1)
        >>> for part in (256.0, 1.0):
        ...     row = torch.tensor([[part]], dtype=torch.bfloat16)
        ...     add_product(sums, row, torch.ones_like(row))
        >>> sums.item()
        257.0
    """
    if left_CA.is_cpu:  # no CPU kernel has a result wider than its factors
        left_CA, right_CB = left_CA.to(sums_AB.dtype), right_CB.to(sums_AB.dtype)
    if left_CA.dtype == sums_AB.dtype:
        torch.addmm(sums_AB, left_CA.t(), right_CB, out=sums_AB)
    else:
        torch.addmm(sums_AB, left_CA.t(), right_CB, out_dtype=sums_AB.dtype, out=sums_AB)


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_N: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.num_rows = len(weight_VH)
        return F.embedding(ids_N, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NH: Tensor) -> Any:  # type: ignore[override]
        (ids_N,) = ctx.saved_tensors
        wide_NH = gradient_NH.to(torch.promote_types(gradient_NH.dtype, torch.float32))
        if torch.are_deterministic_algorithms_enabled():  # the other kernel adds in any order
            sums_VH = wide_NH.new_zeros(ctx.num_rows, wide_NH.shape[-1])
            sums_VH.index_put_((ids_N,), wide_NH, accumulate=True)
        else:
            # -1 and False: no padding token, and no scaling by frequency.
            sums_VH = aten.embedding_dense_backward(wide_NH, ids_N, ctx.num_rows, -1, False)
        return None, sums_VH


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, bias_A: Tensor) -> Tensor:
        return x + bias_A

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return gradient, gradient.sum(tuple(range(gradient.ndim - 1)), dtype=wide)


def biased(x: Tensor, bias_A: Tensor) -> Tensor:
    """Return x [..., A] + bias; the bias's gradient sums all tokens in fp32.

    >>> biased(torch.zeros(2, 2), torch.tensor([1.0, 2.0]))
    tensor([[1., 2.],
            [1., 2.]])
    """
    result: Tensor = _Biased.apply(x, bias_A)
    return result


def embedded(ids_N: Tensor, weight_VH: Tensor) -> Tensor:
    """Return the rows of an embedding for token ids, [N, H], whose gradient is summed in fp32.

    torch's kernels for CPUs, and those it has for deterministic runs, add one token after another
    in the precision of the weight: at 65,536 tokens in bf16 half of the gradient is lost.
    """
    result: Tensor = _Embedded.apply(ids_N, weight_VH)
    return result


class SummedEmbedding(nn.Embedding):
    """An embedding of transformers by `embedded`; its class is set on the module that is there."""

    def forward(self, ids_N: Tensor) -> Tensor:
        """Return the rows; a padding token is a token as any other."""
        return embedded(ids_N, self.weight)
