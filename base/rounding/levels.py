"""Grids whose levels are not integers: FP8, MXFP8, MXFP4, NVFP4 and binary.

`grid` rounds to nearest on them and `gptq` column by column; compressed-tensors fits the scales.

Shapes: O output features (rows), K weights that share a scale, G groups of a row, P levels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from base.rounding.spec import RoundingSpec

# compressed-tensors' presets whose rule makes the scales of weights; E5M2 has none.
PRESETS = {"fp8": "FP8_DYNAMIC", "mxfp8": "MXFP8A16", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}


class Float8:
    """Eight-bit floats of torch, rounded half to even and clipped; a code is the number's bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.largest = dtype, torch.finfo(dtype).max

    def nearest(self, values: Tensor) -> Tensor:
        """Return the nearest number to each fp32 value."""
        return values.clamp(-self.largest, self.largest).to(self.dtype).float()

    def codes(self, numbers: Tensor) -> Tensor:
        """Return the uint8 codes of such numbers."""
        return numbers.to(self.dtype).view(torch.uint8)

    def table(self) -> Tensor:
        """Return the number of every code, fp32 [P]."""
        return torch.arange(256, dtype=torch.uint8).view(self.dtype).float()


class Float4:
    """The 16 numbers of E2M1, rounded half to even and clipped; a code is the number's bits."""

    SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def nearest(self, values: Tensor) -> Tensor:
        """Return the nearest number to each fp32 value.

        The spacing is a power of two, so an even multiple of it has an even mantissa.
        (compressed-tensors' function takes six times as long for a column on a CPU.)

        Example:
            >>> E2M1.nearest(torch.tensor([0.25, 2.4, 2.5, -7.0])).tolist()
            [0.0, 2.0, 2.0, -6.0]
        """
        sizes = values.abs()
        spacing = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
        return values.div(spacing).round_().mul_(spacing).clamp_(-6.0, 6.0)

    def codes(self, numbers: Tensor) -> Tensor:
        """Return the uint8 codes of such numbers."""
        sizes = torch.tensor(self.SIZES, device=numbers.device)
        positions = torch.searchsorted(sizes, numbers.abs().contiguous())
        return (positions + 8 * numbers.signbit()).to(torch.uint8)

    def table(self) -> Tensor:
        """Return the number of every code, fp32 [P]."""
        sizes = torch.tensor(self.SIZES)
        return torch.cat([sizes, -sizes])


class Signs:
    """The numbers -1 and 1, of codes 0 and 1; 0 becomes 1."""

    def nearest(self, values: Tensor) -> Tensor:
        """Return the sign of each fp32 value."""
        return torch.where(values < 0, -1.0, 1.0)

    def codes(self, numbers: Tensor) -> Tensor:
        """Return the uint8 codes of signs."""
        return (numbers > 0).to(torch.uint8)

    def table(self) -> Tensor:
        """Return the number of every code, fp32 [P]."""
        return torch.tensor([-1.0, 1.0])


Numbers = Float8 | Float4 | Signs
E4M3, E5M2, E2M1 = Float8(torch.float8_e4m3fn), Float8(torch.float8_e5m2), Float4()
NUMBERS: dict[str, Numbers] = {
    "fp8": E4M3,
    "fp8e5m2": E5M2,
    "mxfp8": E4M3,
    "mxfp4": E2M1,
    "nvfp4": E2M1,
    "binary": Signs(),
}


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
        return quotients.copy_(self.numbers.nearest(quotients))

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


def fit_levels(weights: Tensor, spec: RoundingSpec, largest: Tensor) -> Levels:
    """Fit the levels of each group of fp32 weights [K, ...].

    Binary: the mean |w|, which is the best scale for signs (arXiv:1603.05279, eq. 6). E5M2: max|w|
    becomes its largest number, 57344, as compressed-tensors' rule makes it 448 for E4M3. The others
    by compressed-tensors: MX scales are powers of two by its rounding of max|w|; NVFP4's are E4M3
    numbers over one scale of the whole tensor. `largest`, fp32 [1], is max|w| of that tensor: of
    all linears that read the same input, since engines multiply them together. FP8 with static
    activations has one scale for all of it.

    Example: -1 and 1 times the mean of 1 and 3.
        >>> from base.rounding.spec import IntegerSpec
        >>> binary = IntegerSpec("rtn", 1, 2, format="binary")
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


def _scale(
    low: Tensor, high: Tensor, spec: RoundingSpec, global_scale: Tensor | None = None
) -> Tensor:
    """Return the scales that numbers are multiplied by, fp32, for weights from low to high."""
    scale: Tensor
    if spec.format == "fp8e5m2":
        scale = torch.maximum(-low, high) / E5M2.largest
        return scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps)
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = preset_name_to_scheme(PRESETS[spec.format], ["Linear"]).weights
    scale = calculate_qparams(low, high, args, global_scale=global_scale)[0]
    if global_scale is not None:
        scale = scale / global_scale
    return scale.where(high.isfinite(), torch.nan)  # an exponent of E8M0 cannot say NaN


def local_scales(scales: Tensor, global_scale: Tensor) -> Tensor:
    """Return NVFP4's scales without that of the tensor: numbers of E4M3, as fp32.

    Example: the global scale makes the largest scale 448, the largest number of E4M3.
        >>> local_scales(torch.tensor([0.5, 0.25]), torch.tensor([896.0])).tolist()
        [448.0, 224.0]
    """
    return (scales * global_scale).to(torch.float8_e4m3fn).float()
