"""The points that weights are rounded to, and rounding to the nearest of them (RTN).

`Grid` is uniform. `Levels` are those of FP8, MXFP8, MXFP4, NVFP4 and binary, which are no integers;
compressed-tensors fits their scales. `gptq` rounds to the same points column by column.

Shapes: O output features (rows), I input features, G groups of a row, K weights that share a scale,
P levels. Weights that share a scale are along the first dimension, so one group [K, O] and all
groups [K, O, G] use the same code.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from base.errors import UserError
from quant_eval.group import Rounded
from quant_eval.numbers import E5M2, NUMBERS, Numbers
from quant_eval.quantizer import GridSpec

# compressed-tensors' presets whose rule makes the scales of weights; E5M2 has none.
PRESETS = {"fp8": "FP8_DYNAMIC", "mxfp8": "MXFP8A16", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}


@dataclass(frozen=True)
class Levels:
    """Points scale x number, as `Grid` has scale x step.

    Attributes:
        scale: fp32 [...], of each group, that of the tensor included.
        numbers: the format's.
        global_scale: fp32 [1] of NVFP4: its E4M3 scales are scale x global_scale.
    """

    scale: Tensor
    numbers: Numbers
    global_scale: Tensor | None = None

    def steps(self, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the number whose point is nearest to each fp32 weight."""
        quotients = torch.div(weights, self.scale, out=out)
        # In place: `gptq` passes a row of its steps as `out` and reads it afterwards.
        return quotients.copy_(self.numbers.nearest(quotients))

    def points(self, steps: Tensor) -> Tensor:
        """Return the points of numbers, as `Rounded.dense` has them."""
        return steps * self.scale

    def codes(self, steps: Tensor) -> Tensor:
        """Return the uint8 codes of numbers."""
        return self.numbers.codes(steps)

    def zeros(self) -> Tensor:
        """Return the code of 0, uint8 [...]; binary has none, and its points need none."""
        return torch.zeros_like(self.scale, dtype=torch.uint8)

    def of(self, index: int | Tensor) -> "Levels":
        """Return the grids of one or some groups, which are the first dimension."""
        return Levels(self.scale[index], self.numbers, self.global_scale)

    def copy_(self, other: "Levels", index: Tensor | slice = slice(None)) -> None:
        """Replace the grids of some groups."""
        self.scale[index] = other.scale


def fit_levels(weights: Tensor, spec: GridSpec, largest: Tensor) -> Levels:
    """Fit the levels of each group of fp32 weights [K, ...].

    Binary: the mean |w|, which is the best scale for signs (arXiv:1603.05279, eq. 6). E5M2: max|w|
    becomes its largest number, 57344, as compressed-tensors' rule makes it 448 for E4M3. The others
    by compressed-tensors: MX scales are powers of two by its rounding of max|w|; NVFP4's are E4M3
    numbers over one scale of the whole tensor. `largest`, fp32 [1], is max|w| of that tensor: of
    all linears that read the same input, since engines multiply them together. FP8 with static
    activations has one scale for all of it.

    Example: -1 and 1 times the mean of 1 and 3.
        >>> binary = GridSpec(bits=1, group_size=2, format="binary")
        >>> levels = fit_levels(torch.tensor([[1.0], [-3.0]]), binary, torch.tensor([3.0]))
        >>> (levels.scale * levels.numbers.table()).tolist()
        [-2.0, 2.0]
    """
    numbers = NUMBERS[spec.format]
    if spec.format == "binary":
        return Levels(mean_size(weights), numbers)
    if spec.format.startswith("fp8") and spec.static_activations:
        scale = _scale(-largest, largest, spec).expand(weights.shape[1:])
        return Levels(scale.contiguous(), numbers)
    global_scale = None
    if spec.format == "nvfp4":
        from compressed_tensors.quantization.utils import generate_gparam

        global_scale = generate_gparam(-largest, largest)
    scale = _scale(weights.amin(0), weights.amax(0), spec, global_scale)
    return Levels(scale, numbers, global_scale)


def mean_size(weights: Tensor) -> Tensor:
    """Return the mean |w| over the first dimension, fp32.

    Summed in float64, where fp32 weights of one group add up without rounding, so in any order.

    Args:
        weights: [K, ...], K of every group.

    Example:
        >>> mean_size(torch.tensor([[1.0], [-2.0]]))
        tensor([1.5000])
    """
    return weights.abs().sum(0, dtype=torch.float64).div_(len(weights)).float()


def _scale(low: Tensor, high: Tensor, spec: GridSpec, global_scale: Tensor | None = None) -> Tensor:
    """Return the scales that numbers are multiplied by, fp32, for weights from low to high."""
    scale: Tensor
    if spec.format == "fp8e5m2":
        scale = torch.maximum(-low, high) / E5M2.largest
        # A group of zeros: any positive scale keeps it at zeros, and 0 / 0 would not.
        return scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps)
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = preset_name_to_scheme(PRESETS[spec.format], ["Linear"]).weights
    scale = calculate_qparams(low, high, args, global_scale=global_scale)[0]
    if global_scale is not None:
        # compressed-tensors returns numbers of E4M3; `Levels.scale` includes the global scale.
        scale = scale / global_scale
    return scale.where(high.isfinite(), torch.nan)  # an exponent of E8M0 cannot say NaN


def local_scales(scales: Tensor, global_scale: Tensor) -> Tensor:
    """Return NVFP4's scales without that of the tensor: numbers of E4M3, as fp32.

    Example: the global scale makes the largest scale 448, the largest number of E4M3.
        >>> local_scales(torch.tensor([0.5, 0.25]), torch.tensor([896.0])).tolist()
        [448.0, 224.0]
    """
    return (scales * global_scale).to(torch.float8_e4m3fn).float()


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

    def points(self, steps: Tensor) -> Tensor:
        """Return the points of steps, as `Rounded.dense` has them."""
        # The sum with 0 takes the sign off -0, which codes do not have either.
        return torch.addcmul(torch.zeros((), device=steps.device), steps, self.scale)

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


Points = Grid | Levels


def fit_points(weights: Tensor, spec: GridSpec, largest: Tensor) -> Points:
    """Fit the grid of a spec's format to each group of fp32 weights [K, ...].

    Ternary: -1, 0 and 1 times the mean |w| (arXiv:2402.17764, eq. 1 to 3); a group of zeros has
    scale 1.

    Args:
        weights: K weights of every group.
        spec: format and bits.
        largest: max|w|, fp32 [1], of all weights that share a scale of the tensor; see
            `fit_levels`.

    Example: ternary points of a group whose mean |w| is 1.5.
        >>> weights = torch.tensor([[1.0], [-2.0]])
        >>> spec = GridSpec(bits=2, group_size=2, format="ternary")
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


def fit_grid(weights: Tensor, spec: GridSpec) -> Grid:
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
        >>> grid = fit_grid(torch.tensor([[1.0], [-3.5]]), GridSpec(bits=3, group_size=2))
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

    # A whole code, so that 0 is a grid point; in steps of the scale as it was cut.
    zero = (
        torch.full_like(scale, 2 ** (spec.bits - 1)) if spec.symmetric else (-low / scale).round()
    )
    return Grid(scale.float(), -zero.float(), max_code - zero.float())


def round_to_nearest(weight_OI: Tensor, spec: GridSpec, largest: Tensor | None = None) -> Rounded:
    """Round every weight to the nearest point of the grid of its own group (RTN).

    Args:
        weight_OI: of any float dtype.
        spec: the numbers, and the inputs that share a scale.
        largest: fp32 [1], for formats with a scale of the tensor: max|w| of all linears that read
            the same input, on all ranks; None: of this weight.

    Raises:
        UserError: a weight is not finite, or a scale is beyond the spec's format.

    Example: a row of two groups, with scales 1 and 0.5.
        >>> weight_OI = torch.tensor([[1.2, -3.5, 0.3, -1.75]])
        >>> rounded = round_to_nearest(weight_OI, GridSpec(bits=3, group_size=2))
        >>> rounded.codes_OI.tolist(), rounded.dense().tolist()
        ([[5, 0, 5, 0]], [[1.0, -4.0, 0.5, -2.0]])
    """
    weight_KOG, grid = grouped_with_points(weight_OI, spec, largest)
    codes_OGK = grid.codes(grid.steps(weight_KOG)).permute(1, 2, 0)
    indices_I = torch.arange(weight_OI.shape[1], dtype=torch.int32, device=weight_OI.device)
    groups_I = indices_I // len(weight_KOG)
    return Rounded(
        codes_OGK.reshape(weight_OI.shape),
        grid.scale,
        grid.zeros(),
        groups_I,
        grid.numbers,
        grid.global_scale,
    )


def nearest_points(weight_OI: Tensor, spec: GridSpec, largest: Tensor | None = None) -> Tensor:
    """Return the point nearest to every weight, fp32 [O, I]: `round_to_nearest(...).dense()`.

    It makes no codes and reads no scale twice, for training rounds all weights at every update.

    Args:
        weight_OI: as of `round_to_nearest`.
        spec: as there.
        largest: as there.

    Raises:
        UserError: as there.
    """
    weight_KOG, grid = grouped_with_points(weight_OI, spec, largest)
    points_KOG = grid.points(grid.steps(weight_KOG))
    return points_KOG.permute(1, 2, 0).reshape(weight_OI.shape)


def grouped_with_points(
    weight_OI: Tensor, spec: GridSpec, largest: Tensor | None = None
) -> tuple[Tensor, Points]:
    """Return the weights by groups, fp32 [K, O, G], and the points of each group.

    Args:
        weight_OI: of any float dtype.
        spec: the numbers, and the inputs that share a scale.
        largest: as of `round_to_nearest`.

    Raises:
        UserError: a weight is not finite, or a scale is beyond the spec's format.
    """
    weight_KOG = in_groups(weight_OI, spec)
    grid = fit_points(weight_KOG, spec, largest_of(weight_OI) if largest is None else largest)
    check_scales(grid.scale, weight_OI, spec)
    return weight_KOG, grid


def in_groups(weight_OI: Tensor, spec: GridSpec) -> Tensor:
    """Return a weight in fp32 as the functions of this file have it, [K, O, G].

    Example: the groups of a row are along the last dimension.
        >>> in_groups(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), GridSpec(bits=3, group_size=2)).tolist()
        [[[1.0, 3.0]], [[2.0, 4.0]]]
    """
    rows, inputs = weight_OI.shape
    return weight_OI.float().reshape(rows, -1, spec.group_size or inputs).permute(2, 0, 1)


def largest_of(weight_OI: Tensor) -> Tensor:
    """Return max|w|, fp32 [1].

    Example:
        >>> largest_of(torch.tensor([[1.0, -3.0], [2.0, 0.0]]))
        tensor([3.])
    """
    # One pass, and exact: the norm of the largest is |w| itself.
    largest: Tensor = torch.linalg.vector_norm(weight_OI, math.inf)
    return largest.float().view(1)


def check_scales(scales: Tensor, weight_OI: Tensor, spec: GridSpec) -> None:
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
