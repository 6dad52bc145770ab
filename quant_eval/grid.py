"""The uniform grid a group of weights is rounded to, and rounding to the nearest point of it (RTN).

Shapes: O output features (rows), I input features, G groups of a row, K weights that share a scale. Grids broadcast
over leading dimensions, so one column [O] and all groups [O, G, K] use the same code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_eval.specs import QuantSpec


@dataclass(frozen=True)
class Grid:
    """Points scale x (code - zero) for the integer codes 0..max_code.

    Attributes:
        scale, zero: float64 [..., 1], one pair per group; `scale` holds fp32 values, `zero` integers.
    """

    scale: Tensor
    zero: Tensor
    max_code: int

    def nearest(self, weights: Tensor) -> Tensor:
        """The grid point of each weight [..., K], float64; halves round to even, what lies outside is clipped."""
        codes = (weights / self.scale).round_().add_(self.zero).clamp_(0, self.max_code)
        return codes.sub_(self.zero).mul_(self.scale)


def fit_grid(weights: Tensor, bits: int, symmetric: bool) -> Grid:
    """The min-max grid of each group of weights, float64 [..., K].

    Symmetric: scale = 2 max|w| / (2^bits - 1) and zero = 2^(bits - 1), the convention of AutoGPTQ and gptqmodel: the
    positive end lies half a step inside max|w|, the negative end half a step outside. Asymmetric: from min(w, 0) to
    max(w, 0), so that zero is a grid point. A group of zeros gets the grid of [-1, 1], as there; it rounds to zeros.

    Scales are cut to fp32, towards zero: the weight -max|w| of a symmetric group lies midway between two points, and so
    it always takes the outer one, instead of the one that rounding noise would choose.
    """
    max_code = 2**bits - 1
    low, high = weights.amin(-1, keepdim=True).clamp(max=0), weights.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    is_empty = low == high
    low, high = low.masked_fill(is_empty, -1.0), high.masked_fill(is_empty, 1.0)
    exact = (high - low) / max_code
    nearest = exact.float()
    scale = torch.where(nearest > exact, nearest.nextafter(torch.zeros_like(nearest)), nearest).double()
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round()
    return Grid(scale, zero, max_code)


def round_to_nearest(weight_OI: Tensor, spec: QuantSpec) -> Tensor:
    """RTN: every weight goes to the nearest point of its own group's grid; float64 [O, I]."""
    num_outputs, num_inputs = weight_OI.shape
    weight_OGK = weight_OI.double().reshape(num_outputs, -1, spec.group_size or num_inputs)
    return fit_grid(weight_OGK, spec.bits, spec.symmetric).nearest(weight_OGK).reshape(num_outputs, num_inputs)
