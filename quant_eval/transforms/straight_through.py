"""Rounding with a gradient: straight through the rounding, but not past the scale.

`learned` descends by it. Rounding takes x to s c with codes c = round(x / s). Its derivative is 0
almost everywhere. Straight through (Bengio et al. 2013, arXiv:1308.3432) takes that of round for 1,
which gives dQ = dx + (Q - x) ds / s: a larger scale makes all errors of its group larger. The scale
follows max|x| of the group, and to make that smaller is what a rotation is for. Without the second
term the rotations of `learned` learn nothing (`tests/quant_eval/transforms/test_learned.py`).

Shapes: G groups, K numbers that share a scale; tokens are rows [..., I].
"""

from typing import Any

import torch
from torch import Tensor, nn

from base.rounding.grid import round_to_nearest
from quant_eval.casts.activations import activation_cast
from quant_eval.specs import QuantSpec


class _StraightThrough(torch.autograd.Function):
    """The rounded numbers as they are, with the gradient of rounding at a scale of max|x|."""

    @staticmethod
    def forward(context: Any, x: Tensor, rounded: Tensor, size: int) -> Tensor:
        x_GK = x.reshape(-1, size)
        largest_G1, where_G1 = x_GK.abs().max(1, keepdim=True)
        errors_GK = (rounded.reshape(-1, size) - x_GK).div_(largest_G1)
        errors_GK.masked_fill_(largest_G1 == 0, 0.0)  # a group of zeros
        context.save_for_backward(errors_GK, where_G1, x_GK.gather(1, where_G1).sign())
        return rounded

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        errors_GK, where_G1, signs_G1 = context.saved_tensors
        gradient_GK = gradients[0].reshape(errors_GK.shape)
        of_largest_G1 = (gradient_GK * errors_GK).sum(1, keepdim=True) * signs_G1
        return gradient_GK.scatter_add(1, where_G1, of_largest_G1).view_as(gradients[0]), None, None


def straight_through(x: Tensor, rounded: Tensor, size: int) -> Tensor:
    """Return `rounded`, as a function of x.

    Args:
        x: any shape.
        rounded: what x is rounded to; constant.
        size: successive numbers of x that share a scale in proportion to their max|x|, as on
            min-max grids. Where a format has other scales that is an approximation.

    Example: the largest, -2, moves the scale too, by which its error of -0.5 grows or shrinks.
        >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> straight_through(x, torch.tensor([1.0, -2.5]), size=2).sum().backward()
        >>> x.grad.tolist()
        [1.0, 1.25]
    """
    result: Tensor = _StraightThrough.apply(x, rounded, size)
    return result


def rounded_weight(weight_OI: Tensor, spec: QuantSpec) -> Tensor:
    """Return Q_w of fp32 weights that read the same input, by rounding to nearest.

    UserError if they are not finite.

    Example: 3 bits have 7 steps, here from -3.5 to 3.5; the points are -4 to 3.
        >>> from quant_eval.specs import parse_spec
        >>> weight_OI = torch.tensor([[1.2, -3.5]])
        >>> rounded_weight(weight_OI, parse_spec("rtn-b3-g2")).tolist()
        [[1.0, -4.0]]
    """
    if spec.method == "none":
        return weight_OI
    with torch.no_grad():
        rounded_OI = round_to_nearest(weight_OI, spec).dense()
    return straight_through(weight_OI, rounded_OI, spec.group_size or weight_OI.shape[1])


class StraightThroughCast(nn.Module):
    """The cast Q_a of a spec, with a gradient.

    The range of a static cast is that of the present batch.
    """

    def __init__(self, spec: QuantSpec, width: int) -> None:
        super().__init__()
        self._spec, self._width = spec, width

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs [..., I] cast and back, in their dtype."""
        cast = activation_cast(self._spec, self._width)
        if cast is None:
            return x
        if cast.needs_range:
            cast.observe(x)
            cast.fix()
        group = cast.args.group_size if cast.args else None
        size = x.numel() if cast.is_static else group or self._width
        with torch.no_grad():
            rounded = cast(x)
        return straight_through(x, rounded, size)
