"""Muon for the hidden matrices: momentum, orthogonalised for a matrix as a whole; AdamW elsewhere.

(Jordan 2024, https://kellerjordan.github.io/posts/muon/.) The update has the root mean square of
AdamW's, so one learning rate serves both (Liu et al. 2025, arXiv 2502.16982). The momentum of a
matrix is in AdamW's first state. Queries, keys, values, gate and up are orthogonalised one by one,
as HF and OLMo2 have them: an engine that fuses them does so for its layout alone.
"""

import math
from typing import TYPE_CHECKING, Literal, override

from train.optimizers.adamw import AdamMoments
from train.optimizers.settings import GroupStep, MatrixOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(AdamMoments, MatrixOptimizer):
    """Muon (arXiv 2502.16982) for the hidden matrices, in their HF shapes; AdamW for the rest."""

    matrices: Literal["muon"] = "muon"

    @property
    def title(self) -> str:
        """Return name and constants in words."""
        return f"Muon and AdamW, {self.betas}"

    def accumulate(self, gradient: "Tensor", states: "dict[str, Tensor]") -> "Tensor":
        """Add to the momentum; return the sum that Nesterov's method looks ahead to."""
        momentum = states["exp_avg"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)

    def direction_flops(self, shape: tuple[int, ...]) -> float:
        """Return the FLOPs of the iterations: two products of short x long, one of short x short.

        Example:
            >>> Muon(peak_lr=0.0).direction_flops((3, 2)) / ITERATIONS
            64.0
        """
        short, long = sorted(shape)
        return float(ITERATIONS * 2 * short**2 * (2 * long + short))

    @override
    def whole_states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return none: the momentum is cut as the weights are."""
        return {}

    @override
    def temporaries(self, shape: tuple[int, ...], product_bytes: int) -> int:
        """Return the bytes of two copies in fp32 and of three for products."""
        return math.prod(shape) * (2 * 4 + 3 * product_bytes)

    @override
    def direction(
        self, matrix: "Tensor", dtype: "torch.dtype", states: "dict[str, Tensor]", step: GroupStep
    ) -> "Tensor":
        """Return the orthogonalised matrix."""
        return orthogonalized(matrix, dtype)


def orthogonalized(matrix: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Return U V^T, nearly, of a matrix U S V^T, times 0.2 sqrt(the longer side).

    Five Newton-Schulz iterations X <- a X + (b X X^T + c (X X^T)^2) X bring every singular value of
    X / ||X|| above 0.003 to between 0.68 and 1.21. They are computed in `dtype`.

    Example: a rotation times 5 becomes the rotation times 0.2 sqrt(2) = 0.28, but for 11%.
        >>> import torch
        >>> update = orthogonalized(torch.tensor([[0.0, 5.0], [-5.0, 0.0]]), torch.float32)
        >>> round(float(update[0, 1]), 2), round(float(update[1, 0]), 2), float(update[0, 0])
        (0.31, -0.31, 0.0)
    """
    import torch

    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    # The Gram matrix below is of the shorter side.
    x = (matrix.T if tall else matrix).to(dtype)
    # The Frobenius norm is at least the largest singular value: none is above 1 after this.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, factor, x, beta=a)  # summed in fp32 before it is rounded to bf16
    direction: Tensor = (x.T if tall else x).to(matrix.dtype)
    return direction * (0.2 * math.sqrt(max(matrix.shape)))
