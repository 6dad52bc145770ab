"""A weighted mean of models by the row, in memory that does not grow with their number.

Every operation is one of IEEE 754 that rounds once, in an order that is fixed: the same bits on
every machine.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from base.errors import UserError
from ckpt_tools.formats.weights import Described, Weights


class AveragedWeights:
    """sum_i f_i theta_i / sum_i f_i, summed in the order of the models, rounded to `dtype` once.

    Each product and each sum is rounded to fp32 (no fused multiply-add), then the quotient. For n
    models and u = 2^-24 the error before the last rounding is at most (n + 2) u sum_i |f_i theta_i|
    / sum_i f_i to first order (Higham, Accuracy and Stability, section 4.2); factors of 1 multiply
    exactly. An instance is a `ckpt_tools.formats.weights.Weights`.

    Args:
        models: of one architecture, by their directory, oldest first.
        factors: f_i, with a positive sum.
        dtype: of the result.

    Attributes:
        tensors: shape and type of every tensor, in the order of the last model.

    Raises:
        UserError: in `read`, if a number of the result is not finite.

    Example: 2 x 1.5 - 0.5, a step away from the older model.
        >>> class Stored:
        ...     def __init__(self, value):
        ...         self.tensors = {"w": torch.full((2, 1), value)}
        ...     def read(self, name, start, stop):
        ...         return self.tensors[name][start:stop]
        >>> models = {Path("older"): Stored(0.5), Path("newer"): Stored(1.5)}
        >>> AveragedWeights(models, (-1.0, 2.0), torch.float32).read("w", 0, 2).tolist()
        [[2.5], [2.5]]
    """

    def __init__(
        self, models: Mapping[Path, Weights], factors: Sequence[float], dtype: torch.dtype
    ) -> None:
        self._models = models
        self._factors = [torch.tensor(factor, dtype=torch.float32) for factor in factors]
        self._sum = torch.tensor(math.fsum(factors), dtype=torch.float32)
        newest = [*models.values()][-1].tensors
        self.tensors = {name: Described(tensor.shape, dtype) for name, tensor in newest.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the mean."""
        tensor = self.tensors[name]
        # Adding to -0 is exact, also for -0.
        total = torch.full((stop - start, *tensor.shape[1:]), -0.0, dtype=torch.float32)
        for model, factor in zip(self._models.values(), self._factors, strict=True):
            wide = model.read(name, start, stop).float()
            total += wide if factor == 1 else wide * factor
        rows = total.div_(self._sum).to(tensor.dtype)
        if not rows.isfinite().all():
            for path, model in self._models.items():
                if not model.read(name, start, stop).isfinite().all():
                    raise UserError(f"'{name}' is not finite in {path}; leave that model out")
            raise UserError(f"'{name}' overflows in the average; give other models or --weights")
        return rows
