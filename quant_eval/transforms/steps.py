"""The transform T of W X^T = (W T) (T^-1 X^T), a sequence of fast steps that have inverses.

`fitting` and `learned` make transforms; the walk, `casts.linear` and `casts.attention` apply them.

A row of weights becomes w T and a token x T^-T, so each step multiplies rows from the right by T,
T^-1 or T^-T, and none makes an [I, I] matrix to do so. The dtype of the rows is kept: float64 is
computed in float64, all others in fp32. Values are kept in float64, and keep their gradient.

Shapes: O output features, I input features, G blocks of K features, A and B the factors of I = A B.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from base.hessian import mirror

ORTHOGONAL = 1e-10  # the largest entry of M M^T - 1 of a matrix whose inverse is its transpose
PART_ENTRIES = 1 << 17  # of rows on a CPU: three times as fast as 4,096 or 11,008 rows at once


class TransformStep(nn.Module):
    """One factor of a transform.

    `width` is the number of features it takes.
    """

    width: int

    def times(self, rows: Tensor) -> Tensor:
        """Return rows [..., I] times T."""
        raise NotImplementedError

    def times_inverse(self, rows: Tensor) -> Tensor:
        """Return rows [..., I] times T^-1."""
        raise NotImplementedError

    def times_inverse_transpose(self, rows: Tensor) -> Tensor:
        """Return rows [..., I] times T^-T."""
        raise NotImplementedError


class Diagonal(TransformStep):
    """T = diag(d), of factors that are not 0."""

    factors_I: Tensor

    def __init__(self, factors_I: Tensor) -> None:
        super().__init__()
        self.width = len(factors_I)
        self.register_buffer("factors_I", factors_I.double())

    def times(self, rows: Tensor) -> Tensor:
        """Multiply each feature by its factor."""
        return rows * self.factors_I.to(rows.dtype)

    def times_inverse(self, rows: Tensor) -> Tensor:
        """Divide each feature by its factor."""
        return rows / self.factors_I.to(rows.dtype)

    def times_inverse_transpose(self, rows: Tensor) -> Tensor:
        """Divide each feature by its factor."""
        return self.times_inverse(rows)


class Permutation(TransformStep):
    """Feature i of the result is feature order[i] of the rows."""

    order_I: Tensor
    back_I: Tensor

    def __init__(self, order_I: Tensor) -> None:
        super().__init__()
        self.width = len(order_I)
        self.register_buffer("order_I", order_I)
        # The argsort of a permutation is its inverse.
        self.register_buffer("back_I", order_I.argsort())

    def times(self, rows: Tensor) -> Tensor:
        """Reorder the features."""
        return rows.index_select(-1, self.order_I)

    def times_inverse(self, rows: Tensor) -> Tensor:
        """Restore their order."""
        return rows.index_select(-1, self.back_I)

    def times_inverse_transpose(self, rows: Tensor) -> Tensor:
        """Reorder the features."""
        return self.times(rows)


class Kronecker(TransformStep):
    """T = left x right, the Kronecker product of two invertible matrices, as two small products.

    With `repeats`, T is block-diagonal and has that product as each of its blocks.

    Example: two Hadamard matrices of size 2 make that of size 4, which spreads an outlier evenly.
        >>> matrix_AA = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double() / 2**0.5
        >>> step = Kronecker(matrix_AA, matrix_AA)
        >>> [round(x, 4) for x in step.times(torch.tensor([2.0, 0.0, 0.0, 0.0])).tolist()]
        [1.0, 1.0, 1.0, 1.0]
    """

    left_AA: Tensor
    right_BB: Tensor
    left_inverse_AA: Tensor
    right_inverse_BB: Tensor

    def __init__(self, left_AA: Tensor, right_BB: Tensor, repeats: int = 1) -> None:
        super().__init__()
        self.width = repeats * len(left_AA) * len(right_BB)
        self.register_buffer("left_AA", left_AA.double())
        self.register_buffer("right_BB", right_BB.double())
        self.register_buffer("left_inverse_AA", _inverse(self.left_AA))
        self.register_buffer("right_inverse_BB", _inverse(self.right_BB))

    def times(self, rows: Tensor) -> Tensor:
        """Multiply by both factors."""
        return _kronecker(rows, self.left_AA, self.right_BB)

    def times_inverse(self, rows: Tensor) -> Tensor:
        """Multiply by both inverses."""
        return _kronecker(rows, self.left_inverse_AA, self.right_inverse_BB)

    def times_inverse_transpose(self, rows: Tensor) -> Tensor:
        """Multiply by both inverses, transposed."""
        return _kronecker(rows, self.left_inverse_AA.T, self.right_inverse_BB.T)


class Blocks(TransformStep):
    """T is block-diagonal: successive K features are multiplied by an invertible matrix each."""

    blocks_GKK: Tensor
    inverses_GKK: Tensor

    def __init__(self, blocks_GKK: Tensor) -> None:
        super().__init__()
        self.width = len(blocks_GKK) * blocks_GKK.shape[-1]
        self.register_buffer("blocks_GKK", blocks_GKK.double())
        self.register_buffer("inverses_GKK", _inverse(self.blocks_GKK))

    def times(self, rows: Tensor) -> Tensor:
        """Multiply each block of features by its matrix."""
        return self._multiplied(rows, self.blocks_GKK)

    def times_inverse(self, rows: Tensor) -> Tensor:
        """Multiply each block of features by its inverse."""
        return self._multiplied(rows, self.inverses_GKK)

    def times_inverse_transpose(self, rows: Tensor) -> Tensor:
        """Multiply each block of features by its inverse, transposed."""
        return self._multiplied(rows, self.inverses_GKK.mT)

    @staticmethod
    def _multiplied(rows: Tensor, matrices_GKK: Tensor) -> Tensor:
        # Blocks come first, so that all of them are one batched product.
        blocks_GNK = rows.reshape(-1, *matrices_GKK.shape[:2]).transpose(0, 1)
        return (blocks_GNK @ matrices_GKK.to(rows.dtype)).transpose(0, 1).reshape(rows.shape)


class Transform(nn.Module):
    """T = T_1 T_2 ..., and a shift b of the inputs: y = Q_w(W T) Q_a(T^-1 (x - b)) + W b.

    Attributes:
        steps: T_1, T_2, ...; none for the identity.
        shift_I: b, float64, the mean of the inputs; None if they are not shifted.

    Example:
        >>> Transform(Diagonal(torch.tensor([2.0, 4.0]))).inputs(torch.tensor([6.0, 8.0]))
        tensor([3., 2.])
    """

    shift_I: Tensor | None

    def __init__(self, *steps: TransformStep, shift_I: Tensor | None = None) -> None:
        super().__init__()
        assert len({step.width for step in steps}) <= 1
        self.steps = nn.ModuleList(steps)
        self.register_buffer("shift_I", None if shift_I is None else shift_I.double())

    def weight(self, weight_OI: Tensor) -> Tensor:
        """Return W T."""
        return _computed(weight_OI, [step.times for step in self._sequence(weight_OI)])

    def inputs(self, x: Tensor) -> Tensor:
        """Return the tokens T^-1 (x - b), given and returned as rows [..., I]."""
        return _computed(
            x, self._turns(x) if self.shift_I is None else [self._shifted, *self._turns(x)]
        )

    def restored(self, weight_OI: Tensor) -> Tensor:
        """Return W T^-1."""
        return _computed(
            weight_OI, [step.times_inverse for step in reversed(self._sequence(weight_OI))]
        )

    def hessian(self, hessian_II: Tensor) -> Tensor:
        """Return the second moment of the transformed inputs, T^-1 (H - b b^T) T^-T, in float64.

        `hessian_II` is the mean of x x^T over the tokens whose mean is b.
        """
        turns, moment_II = self._turns(hessian_II), self.centred(hessian_II.double())
        if not turns:
            return moment_II
        # Rows times T^-T give H T^-T; its transpose T^-1 H, taken once more, gives T^-1 H T^-T.
        half_II = _computed(moment_II, turns)
        whole_II = _computed(half_II.T, turns)
        # symmetric but for rounding; a sum with its transpose would take as long as both products
        mirror(whole_II)
        return whole_II

    def centred(self, hessian_II: Tensor) -> Tensor:
        """Return H - b b^T, the second moment of the inputs less the shift, H without a shift."""
        if self.shift_I is None:
            return hessian_II
        return hessian_II - torch.outer(self.shift_I, self.shift_I)

    def _sequence(self, rows: Tensor) -> list[TransformStep]:
        """Return the steps, each of the width of the rows that it will read."""
        steps = [step for step in self.steps if isinstance(step, TransformStep)]
        for step in steps:
            # Unchecked, products take a multiple of their width for more blocks.
            assert rows.shape[-1] == step.width, (
                f"rows of {rows.shape[-1]} features for a step of {step.width}; correct"
                " sizes.site_widths, or the caller"
            )
        return steps

    def _turns(self, rows: Tensor) -> list[Callable[[Tensor], Tensor]]:
        return [step.times_inverse_transpose for step in self._sequence(rows)]

    def _shifted(self, x: Tensor) -> Tensor:
        assert self.shift_I is not None
        return x - self.shift_I.to(x.dtype)


def _computed(rows: Tensor, turns: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Return rows after all turns, in their dtype, fp32 in between unless they are float64.

    A CPU takes a few rows at a time through all turns, since those stay in its cache; but not where
    a gradient is to flow.
    """
    if rows.device.type != "cpu" or torch.is_grad_enabled():
        return _turned(rows, turns)
    turned = torch.empty(rows.shape, dtype=rows.dtype)
    width = rows.shape[-1]
    num_rows = max(1, PART_ENTRIES // width)
    parts = (tensor.reshape(-1, width).split(num_rows) for tensor in (rows, turned))
    for part, result in zip(*parts, strict=True):
        result.copy_(_turned(part, turns))
    return turned


def _turned(rows: Tensor, turns: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    turned = rows if rows.dtype == torch.float64 else rows.float()
    for turn in turns:
        turned = turn(turned)
    return turned.to(rows.dtype)


def _kronecker(rows: Tensor, left_AA: Tensor, right_BB: Tensor) -> Tensor:
    """Return r (left x right) = left^T R right of every row r, which is R [A, B] by rows."""
    rows_NAB = rows.reshape(-1, len(left_AA), len(right_BB))
    halfway_NAB = rows_NAB @ right_BB.to(rows.dtype)
    return (left_AA.T.to(rows.dtype) @ halfway_NAB).view(rows.shape)


def _inverse(matrices: Tensor) -> Tensor:
    """Return the inverses of matrices [..., K, K].

    The inverses of orthogonal matrices are their exact transposes.
    """
    identity_KK = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    is_orthogonal = (matrices @ matrices.mT - identity_KK).abs().amax() <= ORTHOGONAL
    return matrices.mT if bool(is_orthogonal) else torch.linalg.inv(matrices)
