"""A weighted mean of models by the row, in memory that does not grow with their number.

Every operation is one of IEEE 754 that rounds once, in an order that is fixed: the same bits on every machine.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ckpt_tools.averaging.ingredients import Ingredient
from ckpt_tools.formats.weights import Described
from train.command import UserError

PIECE_BYTES = 2 << 20  # of one tensor of the result at once: small enough for caches


class AveragedWeights:
    """sum_i f_i theta_i / sum_i f_i, summed in the order of the ingredients and rounded to the written type once.

    In `accumulate`, each product and each sum is rounded (no fused multiply-add), then the quotient. For n ingredients
    and u the unit roundoff of `accumulate` (2^-24, 2^-53), the error before the last rounding is at most
    (n + 2) u sum_i |f_i theta_i| / sum_i f_i to first order (Higham, Accuracy and Stability, section 4.2); factors of 1
    multiply exactly. `ckpt_tools.formats.weights.Weights`.

    Args:
        ingredients: of one architecture, oldest first.
        factors: f_i, with a positive sum.
        accumulate: torch.float32 or torch.float64.
        dtype: of the result.
        threads: that read and hash ingredients at once.

    Raises:
        UserError: in `read`, if a number of the result is not finite.
    """

    def __init__(
        self,
        ingredients: Sequence[Ingredient],
        factors: Sequence[float],
        *,
        accumulate: torch.dtype,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        self._ingredients, self._accumulate, self._threads = ingredients, accumulate, threads
        self._factors = [torch.tensor(factor, dtype=accumulate) for factor in factors]
        self._sum = torch.tensor(math.fsum(factors), dtype=accumulate)
        order = ingredients[-1].weights.tensors  # whose files, most often, are divided as all others are
        self._tensors = {name: Described(tensor.shape, dtype) for name, tensor in order.items()}

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every tensor, in the order of the last ingredient."""
        return self._tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the mean."""
        described = self._tensors[name]
        rows = torch.empty((stop - start, *described.shape[1:]), dtype=described.dtype)
        step = max(1, PIECE_BYTES // described.row_bytes)
        with ThreadPoolExecutor(self._threads) as pool:
            for begin in range(start, stop, step):
                end = min(begin + step, stop)
                rows[begin - start : end - start] = self._mean(pool, name, begin, end)
        if not rows.isfinite().all():
            for ingredient in self._ingredients:
                if not ingredient.weights.read(name, start, stop).isfinite().all():
                    raise UserError(f"'{name}' is not finite in {ingredient.path}; leave that model out")
            raise UserError(f"'{name}' overflows in the average; give --accumulate fp64 or another --dtype")
        return rows

    def _mean(self, pool: ThreadPoolExecutor, name: str, start: int, stop: int) -> Tensor:
        shape = (stop - start, *self._tensors[name].shape[1:])
        total = torch.full(shape, -0.0, dtype=self._accumulate)  # to which adding is exact, also -0
        for factor, rows in zip(self._factors, self._rows(pool, name, start, stop), strict=True):
            wide = rows.to(self._accumulate)
            total += wide if factor == 1 else wide * factor
        return narrow(total.div_(self._sum), self._tensors[name].dtype)

    def _rows(self, pool: ThreadPoolExecutor, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """The same rows of one ingredient after the other, while the threads read the next ones."""
        ahead: deque[Future[Tensor]] = deque()
        for ingredient in self._ingredients:
            ahead.append(pool.submit(ingredient.weights.read, name, start, stop))
            if len(ahead) > self._threads:
                yield ahead.popleft().result()
        yield from (rows.result() for rows in ahead)


def narrow(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 or fp64 numbers to the nearest of a type that is not wider, ties to even: rounded once.

    torch goes from fp64 to 16 bits by way of fp32. So that this is no second rounding, fp32 is rounded to odd: cut off,
    with the last bit set if anything was lost (Boldo and Melquiond 2008, IEEE Transactions on Computers 57).
    """
    if numbers.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return numbers.to(dtype)
    nearest = numbers.float()
    cut = nearest.view(torch.int32) - (nearest.abs().double() > numbers.abs()).int()
    return (cut | (nearest.double() != numbers).int()).view(torch.float32).to(dtype)
