"""A weighted mean of models by the row, in memory that does not grow with their number.

Every operation is one of IEEE 754 that rounds once, in an order that is fixed: the same bits on
every machine.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from base.errors import UserError
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import Described


class AveragedWeights:
    """sum_i f_i theta_i / sum_i f_i, summed in the order of the models, rounded to `dtype` once.

    Each product and each sum is rounded to fp32 (no fused multiply-add), then the quotient. For n
    models and u = 2^-24 the error before the last rounding is at most (n + 2) u sum_i |f_i theta_i|
    / sum_i f_i to first order (Higham, Accuracy and Stability, section 4.2); factors of 1 multiply
    exactly.
    `ckpt_tools.formats.weights.Weights`.

    Args:
        models: of one architecture, oldest first.
        factors: f_i, with a positive sum.
        dtype: of the result.

    Raises:
        UserError: in `read`, if a number of the result is not finite.
    """

    def __init__(
        self, models: Sequence[HFWeights], factors: Sequence[float], dtype: torch.dtype
    ) -> None:
        self._models = models
        self._factors = [torch.tensor(factor, dtype=torch.float32) for factor in factors]
        self._sum = torch.tensor(math.fsum(factors), dtype=torch.float32)
        newest = models[-1].tensors
        self._tensors = {name: Described(tensor.shape, dtype) for name, tensor in newest.items()}

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Shape and type of every tensor, in the order of the last model."""
        return self._tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the mean."""
        shape, dtype = self._tensors[name]
        # Adding to -0 is exact, also for -0.
        total = torch.full((stop - start, *shape[1:]), -0.0, dtype=torch.float32)
        for model, factor in zip(self._models, self._factors, strict=True):
            wide = model.read(name, start, stop).float()
            total += wide if factor == 1 else wide * factor
        rows = total.div_(self._sum).to(dtype)
        if not rows.isfinite().all():
            self._refuse(name, start, stop)
        return rows

    def _refuse(self, name: str, start: int, stop: int) -> None:
        """Raise UserError naming the model whose rows are not finite, or the overflow."""
        for model in self._models:
            if not model.read(name, start, stop).isfinite().all():
                raise UserError(
                    f"'{name}' is not finite in {model.directory}; leave that model out"
                )
        raise UserError(f"'{name}' overflows in the average; give other models or --weights")
