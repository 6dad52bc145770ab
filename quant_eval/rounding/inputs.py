"""Statistics of the inputs of a group of linears, over the tokens of all ranks.

`measuring.sequential` adds the inputs; rounding reads the Hessian, transforms the ranges as well.

Shapes: I input features.
"""

import torch
from torch import Tensor

from base.hessian import InputHessian
from base.ranks import Ranks


class InputStatistics:
    """The second moment of inputs and, if asked for, each feature's mean and range."""

    def __init__(
        self, width: int, device: torch.device, dtype: torch.dtype, has_ranges: bool
    ) -> None:
        """`dtype` is that of the inputs."""
        self._hessian = InputHessian(width, device, dtype)
        self._has_ranges = has_ranges
        self._sum_I = torch.zeros(width, dtype=torch.float64, device=device)
        # the largest x and the largest -x of each feature
        self._ends_2I = torch.full((2, width), -torch.inf, device=device)

    @torch.no_grad()
    def add(self, inputs: Tensor) -> None:
        """Add the tokens of a batch [..., I]."""
        self._hessian.add(inputs)
        if self._has_ranges:
            inputs_NI = inputs.flatten(0, -2)
            self._sum_I += inputs_NI.sum(0, dtype=torch.float64)
            ends_2I = torch.stack([inputs_NI.amax(0), -inputs_NI.amin(0)]).float()
            self._ends_2I = torch.maximum(self._ends_2I, ends_2I)

    def reduce(self, ranks: Ranks) -> None:
        """Reduce over the ranks.

        Each rank calls it once, after its last batch.
        """
        ranks.sum(self._hessian.sum_II)
        self._hessian.tokens = int(ranks.sum(torch.tensor(self._hessian.tokens)))
        if self._has_ranges:
            ranks.sum(self._sum_I)
            # Both ends are stored as maxima, so one reduction takes both.
            self._ends_2I = ranks.max(self._ends_2I)

    def hessian(self, name: str) -> Tensor:
        """Return the mean of x x^T, float64 [I, I].

        UserError with `name` if an entry is not finite.
        """
        return self._hessian.mean(name)

    def mean(self) -> Tensor:
        """Return the mean of x, float64 [I]."""
        assert self._has_ranges
        return self._sum_I / self._hessian.tokens

    def largest(self, shift_I: Tensor | None) -> Tensor:
        """Return max|x - shift|, float64 [I].

        Without a shift it is max|x|.
        """
        assert self._has_ranges
        above_I, below_I = self._ends_2I.double()
        if shift_I is not None:
            # The ends of x - b: max(x) - b, and max(-x) + b.
            above_I, below_I = above_I - shift_I, below_I + shift_I
        return torch.maximum(above_I, below_I)
