"""Operators whose whole spectrum is known, without the imports of a model.

Shapes: P parameters, k vectors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Known(NamedTuple):
    """A float64 matrix and its eigenvalues, ascending, by a dense solver."""

    matrix_PP: Tensor
    values_P: Tensor

    def product(self, v_P: Tensor) -> Tensor:
        return self.matrix_PP.to(v_P.dtype) @ v_P


def inner(vectors: Sequence[Tensor], b_P: Tensor) -> Tensor:
    return torch.stack(list(vectors)).double() @ b_P.double()


def signs(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A Rademacher vector."""
    return (
        torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)).to(dtype) * 2
        - 1
    )


def designed(eigenvalues: list[float]) -> Known:
    """A matrix of these eigenvalues in a random basis."""
    values_P = torch.tensor(eigenvalues, dtype=torch.float64)
    square = torch.randn(
        len(values_P),
        len(values_P),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    basis_PP = torch.linalg.qr(square).Q
    matrix_PP = basis_PP * values_P @ basis_PP.T
    return Known((matrix_PP + matrix_PP.T) / 2, values_P.sort().values)
