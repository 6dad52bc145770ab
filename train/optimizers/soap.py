"""SOAP for the hidden matrices (Vyas et al. 2024, arXiv 2409.11321); AdamW elsewhere.

Adam's second moment of a gradient G is kept in the eigenbases of averages of G G^T and G^T G, the
two sides of Shampoo's preconditioner. A step of orthogonal iteration follows them every few
updates. The momentum stays in the basis of the weights.

This is the paper's algorithm 3 after a first gradient that gives bases alone, as in the authors'
code. That code also sorts a basis by eigenvalue before it is refreshed.

Queries, keys, values, gate and up have bases one by one, as HF and OLMo2 have them.
"""

from typing import TYPE_CHECKING, ClassVar, Literal, override

from pydantic import Field

from train.optimizers.adamw import AdamMoments
from train.optimizers.settings import GroupStep, MatrixOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SIDES = ("left", "right")


class Soap(AdamMoments, MatrixOptimizer):
    """SOAP (arXiv 2409.11321) for the hidden matrices, in their HF shapes; AdamW for the rest."""

    # Neither rule of the powers of the width is known to hold for it.
    RATE_BY_WIDTH: ClassVar = None
    KEEPS_MATRICES_WHOLE: ClassVar = True

    matrices: Literal["soap"] = "soap"
    beta1: float = Field(default=0.95, ge=0, lt=1)
    refresh_updates: int = Field(
        default=10, gt=0, description="updates from one refresh of the eigenbases to the next"
    )
    max_width: int = Field(
        default=10_000,
        gt=0,
        description="rows or columns of a matrix up to which that side has an eigenbasis",
    )

    @property
    def title(self) -> str:
        """Return name and constants in words."""
        return f"SOAP and AdamW, {self.betas}, bases every {self.refresh_updates} updates"

    @override
    def whole_states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the moments, and for each side a Gram matrix and its eigenbasis.

        Example:
            >>> list(Soap(peak_lr=0.0, max_width=2).whole_states((3, 2)))
            ['exp_avg', 'exp_avg_sq', 'right_gram', 'right_basis']
        """
        states = {"exp_avg": shape, "exp_avg_sq": shape}
        for side, width in zip(SIDES, shape, strict=True):
            if width <= self.max_width:
                states |= dict.fromkeys((f"{side}_gram", f"{side}_basis"), (width, width))
        return states

    @override
    def temporaries(self, shape: tuple[int, ...], product_bytes: int) -> int:
        """Return the bytes of five matrices of the shape, and of a side's refresh, in fp32."""
        rows, columns = shape
        side = max((width for width in shape if width <= self.max_width), default=0)
        return 4 * (5 * rows * columns + 3 * side**2)

    @override
    def accumulate(self, gradient: "Tensor", states: "dict[str, Tensor]") -> "Tensor":
        """Return the gradient: the states are of the whole matrix."""
        return gradient

    @override
    def direction_flops(self, shape: tuple[int, ...]) -> float:
        """Return the FLOPs of the products: by each basis four, a refresh in its share of updates.

        A side with a basis takes its product with gradient and momentum, that back, and the Gram
        matrix.
        """
        rows, columns = shape
        preconditioned = [width for width in shape if width <= self.max_width]
        return sum(
            8.0 * width * rows * columns + 2 * width**3 / self.refresh_updates
            for width in preconditioned
        )

    @override
    def direction(
        self, matrix: "Tensor", dtype: "torch.dtype", states: "dict[str, Tensor]", step: GroupStep
    ) -> "Tensor":
        """Return Adam's update of a gradient in the eigenbases, and update its states.

        The first gradient gives the bases and no direction, so that no basis is of the gradient
        that it turns. Everything is in fp32.
        """
        if step.number == 1:
            self._add_to_grams(matrix, states)
            for side in _sides(states):
                states[f"{side}_basis"].copy_(_eigenbasis(states[f"{side}_gram"]))
            return matrix.new_zeros(matrix.shape)

        updates = step.number - 1
        first, second = states["exp_avg"], states["exp_avg_sq"]
        first.lerp_(matrix, 1 - self.beta1)
        turned = _into_bases(matrix, states)
        second.lerp_(turned.square_(), 1 - self.beta2)

        mean = _into_bases(first, states).div_(1 - self.beta1**updates)
        scale = second.div(1 - self.beta2**updates).sqrt_().add_(self.eps * step.epsilon)
        direction = _out_of_bases(mean.div_(scale), states)

        # The bases of the next update: those of this one do not contain its gradient.
        self._add_to_grams(matrix, states)
        if updates % self.refresh_updates == 0:
            for side in _sides(states):
                basis = states[f"{side}_basis"]
                basis.copy_(_refreshed(states[f"{side}_gram"], basis))
        return direction

    def _add_to_grams(self, gradient: "Tensor", states: "dict[str, Tensor]") -> None:
        for side in _sides(states):
            of_side = gradient if side == "left" else gradient.T
            states[f"{side}_gram"].lerp_(of_side @ of_side.T, 1 - self.beta2)


def _sides(states: "dict[str, Tensor]") -> list[str]:
    """Return the sides that have a basis."""
    return [side for side in SIDES if f"{side}_basis" in states]


def _into_bases(matrix: "Tensor", states: "dict[str, Tensor]") -> "Tensor":
    """Return Q_L^T X Q_R of a matrix X, a new tensor."""
    turned = states["left_basis"].T @ matrix if "left_basis" in states else matrix.clone()
    return turned @ states["right_basis"] if "right_basis" in states else turned


def _out_of_bases(matrix: "Tensor", states: "dict[str, Tensor]") -> "Tensor":
    """Return Q_L X Q_R^T of a matrix X in the bases."""
    if "left_basis" in states:
        matrix = states["left_basis"] @ matrix
    return matrix @ states["right_basis"].T if "right_basis" in states else matrix


def _eigenbasis(gram: "Tensor") -> "Tensor":
    """Return the eigenvectors by falling eigenvalue, in which orthogonal iteration has them."""
    import torch

    basis: Tensor = torch.linalg.eigh(gram).eigenvectors.flip(1)
    return basis


def _refreshed(gram: "Tensor", basis: "Tensor") -> "Tensor":
    """Return the basis after a step of orthogonal iteration: Q of the QR of P Q."""
    import torch

    refreshed: Tensor = torch.linalg.qr(gram @ basis).Q
    return refreshed
