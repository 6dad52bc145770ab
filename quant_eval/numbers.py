"""Numbers that are no integers: FP8, FP4 and signs, with the code of each.

`rounding.grid` scales them, `casts` rounds activations to them.

Shapes: P numbers of a format.
"""

import torch
from torch import Tensor


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
        # The sign is the highest of four bits, and that of -0 is kept.
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
