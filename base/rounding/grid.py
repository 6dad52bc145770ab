"""The grid a group of weights is rounded to, and rounding to the nearest point of it (RTN).

`Grid` is uniform; the points of formats such as FP8 are in `levels`.

Shapes: O output features (rows), I input features, G groups of a row, K weights that share a scale.
Weights that share a scale are along the first dimension, so one group [K, O] and all groups
[K, O, G] use the same code.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from base.errors import UserError
from base.ranks import Ranks
from base.rounding.levels import Levels, Numbers, fit_levels, mean_size
from base.rounding.spec import RoundingSpec


@dataclass(frozen=True)
class Grid:
    """Points scale x step, for steps lowest..highest; a step's code is step - lowest.

    Attributes:
        scale: fp32 [...], of each group; NaN where the spec's scales cannot hold it.
        lowest, highest: integers as fp32 [...].
    """

    scale: Tensor
    lowest: Tensor
    highest: Tensor
    numbers: ClassVar[None] = None
    global_scale: ClassVar[None] = None

    def steps(self, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the step nearest to each fp32 weight, clipped; halves go to the even step."""
        return torch.div(weights, self.scale, out=out).round_().clamp_(self.lowest, self.highest)

    def codes(self, steps: Tensor) -> Tensor:
        """Return the uint8 codes of steps."""
        return (steps - self.lowest).to(torch.uint8)

    def zeros(self) -> Tensor:
        """Return the code of 0, uint8 [...]."""
        return (-self.lowest).to(torch.uint8)

    def of(self, index: int | Tensor) -> "Grid":
        """Return the grids of one or some groups, which are the first dimension."""
        return Grid(self.scale[index], self.lowest[index], self.highest[index])

    def copy_(self, other: "Grid", index: Tensor | slice = slice(None)) -> None:
        """Replace the grids of some groups."""
        self.scale[index] = other.scale
        self.lowest[index] = other.lowest
        self.highest[index] = other.highest


@dataclass(frozen=True)
class Rounded:
    """A quantized linear: codes and their grids.

    Attributes:
        codes_OI: uint8, in the order of the input features.
        scales_OG: fp32 (values of fp16 where the spec says so).
        zeros_OG: uint8, the code of 0.
        groups_I: int32, the group of each input feature.
        numbers: names the number of each code where codes are not integers.
        global_scale: fp32 [1], of NVFP4; `scales_OG` contain it (`levels.local_scales`).
    """

    codes_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor
    groups_I: Tensor
    numbers: Numbers | None = None
    global_scale: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the weight, scale x (code - zero) or x number, fp32 [O, I]; rounded once."""
        groups_I = self.groups_I.long()
        if self.numbers is not None:
            table_P = self.numbers.table().to(self.codes_OI.device)
            return table_P[self.codes_OI.int()] * self.scales_OG[:, groups_I]
        return (self.codes_OI.float() - self.zeros_OG.float()[:, groups_I]) * self.scales_OG[
            :, groups_I
        ]

    def gathered(self, ranks: Ranks, rows: int) -> "Rounded":
        """Return all `rows`, from every rank's share of them; every rank has to call it."""
        return replace(
            self,
            codes_OI=ranks.gather(self.codes_OI, rows),
            scales_OG=ranks.gather(self.scales_OG, rows),
            zeros_OG=ranks.gather(self.zeros_OG, rows),
        )


Points = Grid | Levels


def fit_points(weights: Tensor, spec: RoundingSpec, largest: Tensor) -> Points:
    """Fit the grid of a spec's format to each group of fp32 weights [K, ...].

    Ternary: -1, 0 and 1 times the mean |w| (arXiv:2402.17764, eq. 1 to 3); a group of zeros has
    scale 1.

    Args:
        weights: K weights of every group.
        spec: format and bits.
        largest: max|w|, fp32 [1], of all weights that share a scale of the tensor; see
            `levels.fit_levels`.

    Example: ternary points of a group whose mean |w| is 1.5.
        >>> from base.rounding.spec import IntegerSpec
        >>> weights = torch.tensor([[1.0], [-2.0]])
        >>> spec = IntegerSpec("rtn", 2, 2, format="ternary")
        >>> fit_points(weights, spec, largest_of(weights)).scale
        tensor([1.5000])
    """
    if spec.format == "int":
        return fit_grid(weights, spec)
    if spec.format == "ternary":
        scale = mean_size(weights)
        scale = scale.masked_fill(scale == 0, 1.0)
        return Grid(scale, -torch.ones_like(scale), torch.ones_like(scale))
    return fit_levels(weights, spec, largest)


def fit_grid(weights: Tensor, spec: RoundingSpec) -> Grid:
    """Fit the min-max grid of integers to each group of fp32 weights [K, ...].

    Symmetric: scale = 2 max|w| / (2^bits - 1) and zero = 2^(bits - 1), the convention of AutoGPTQ
    and gptqmodel: the positive end is half a step inside max|w|, the negative end half a step
    outside. Asymmetric: from min(w, 0) to max(w, 0), so that zero is a grid point. A group of zeros
    gets the grid of [-1, 1], as there; it rounds to zeros.

    Scales are cut to fp32 or fp16, towards zero: the weight -max|w| of a symmetric group lies
    midway between two points, and so it always takes the outer one, instead of the one that
    rounding noise would choose. A cut that takes half a step or more off the range is not rounding:
    such a scale, too small or too large for the format, becomes NaN.

    Example: 3 bits have 7 steps, here from -3.5 to 3.5; the points are -4 to 3.
        >>> from base.rounding.spec import IntegerSpec
        >>> grid = fit_grid(torch.tensor([[1.0], [-3.5]]), IntegerSpec("rtn", 3, 2))
        >>> grid.scale.tolist(), grid.lowest.tolist(), grid.highest.tolist()
        ([1.0], [-4.0], [3.0])
    """
    max_code = 2**spec.bits - 1

    # The range [low, high] of each group contains 0 and is never empty.
    low, high = weights.amin(0).double(), weights.amax(0).double()  # faster than aminmax
    low, high = low.clamp(max=0), high.clamp(min=0)
    if spec.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    is_empty = low == high
    low, high = low.masked_fill(is_empty, -1.0), high.masked_fill(is_empty, 1.0)

    # Round to the stored dtype, then step back where that went up; NaN where the cut is too large.
    exact = (high - low) / max_code
    nearest = exact.to(torch.float16 if spec.scales == "fp16" else torch.float32)
    scale = torch.where(
        nearest > exact, nearest.nextafter(torch.zeros_like(nearest)), nearest
    ).double()
    scale = scale.where((exact - scale) * max_code < scale / 2, torch.nan)

    zero = (
        torch.full_like(scale, 2 ** (spec.bits - 1)) if spec.symmetric else (-low / scale).round()
    )
    return Grid(scale.float(), -zero.float(), max_code - zero.float())


def round_to_nearest(
    weight_OI: Tensor, spec: RoundingSpec, largest: Tensor | None = None
) -> Rounded:
    """Round every weight to the nearest point of the grid of its own group (RTN).

    Args:
        weight_OI: of any float dtype.
        spec: the numbers, and the inputs that share a scale.
        largest: fp32 [1], for formats with a scale of the tensor: max|w| of all linears that read
            the same input, on all ranks; None: of this weight.

    Raises:
        UserError: a weight is not finite, or a scale is beyond the spec's format.

    Example: a row of two groups, with scales 1 and 0.5.
        >>> from base.rounding.spec import IntegerSpec
        >>> weight_OI = torch.tensor([[1.2, -3.5, 0.3, -1.75]])
        >>> rounded = round_to_nearest(weight_OI, IntegerSpec("rtn", 3, 2))
        >>> rounded.codes_OI.tolist(), rounded.dense().tolist()
        ([[5, 0, 5, 0]], [[1.0, -4.0, 0.5, -2.0]])
    """
    num_outputs, num_inputs = weight_OI.shape
    group_size = spec.group_size or num_inputs
    weight_KOG = weight_OI.float().reshape(num_outputs, -1, group_size).permute(2, 0, 1)
    grid = fit_points(weight_KOG, spec, largest_of(weight_OI) if largest is None else largest)
    check_scales(grid.scale, weight_OI, spec)
    codes_OGK = grid.codes(grid.steps(weight_KOG)).permute(1, 2, 0)
    groups_I = torch.arange(num_inputs, dtype=torch.int32, device=weight_OI.device) // group_size
    return Rounded(
        codes_OGK.reshape(num_outputs, num_inputs),
        grid.scale,
        grid.zeros(),
        groups_I,
        grid.numbers,
        grid.global_scale,
    )


def largest_of(weight_OI: Tensor) -> Tensor:
    """Return max|w|, fp32 [1].

    Example:
        >>> largest_of(torch.tensor([[1.0, -3.0], [2.0, 0.0]]))
        tensor([3.])
    """
    return weight_OI.abs().amax().float().view(1)


def check_scales(scales: Tensor, weight_OI: Tensor, spec: RoundingSpec) -> None:
    """Refuse unusable scales; the message says whether weights or the format are at fault."""
    if bool(scales.isfinite().all()):
        return
    if spec.scales == "fp16" and bool(weight_OI.isfinite().all()):
        raise UserError(
            f"spec {spec.name}: fp16 cannot hold the scale of every group; use a spec without -s16"
        )
    raise UserError(
        "weights hold NaN or infinity, or overflow; check the checkpoint with"
        " 'python -m ckpt_tools inspect --verify'"
    )
