"""Hutch++: the trace of a fixed matrix, its dominant part exactly (Meyer, Musco, Musco and Woodruff 2021, algorithm 1).

For one batch and a small model, whose product is exact: the error falls as 1 / products instead of the square root. A
third of the products sketch the dominant subspace, a third take the trace on it, a third estimate what is left.

Shapes: k vectors of a sketch, r of them independent, p the part of a vector that lies on this rank.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from train.command import UserError

Product = Callable[[Tensor], Tensor]  # v_p -> (Av)_p for a symmetric A
Probes = Callable[[int], Tensor]  # number -> a vector [p] of independent signs, the same whatever the number of ranks
Inner = Callable[[Tensor, Tensor], Tensor]  # [k, p], [p] -> [k] float64, summed over all ranks; k may be 0

DEPENDENT = 64  # a vector is dependent once less than this times its precision is left of it, rounding aside


class MatrixTrace(NamedTuple):
    """The trace of a fixed matrix.

    Attributes:
        mean: the estimate.
        standard_error: what its algorithm says of it.
        matvecs: products made; a sketch of low rank needs fewer than were asked for.
        method: 'hutch++' or 'xtrace'.
    """

    mean: float
    standard_error: float
    matvecs: int
    method: str


class Sketch(NamedTuple):
    """The factors of [A v_0, ..., A v_{k-1}] = basis' R with orthonormal rows of the basis.

    Attributes:
        basis_rp: of the sketched subspace.
        factor_rk: R; square and upper triangular where the vectors are independent.
    """

    basis_rp: Tensor
    factor_rk: Tensor


def sketch(product: Product, probes: Probes, inner: Inner, *, size: int) -> Sketch:
    """The matrix applied to probes 0..size-1, orthonormalised by Gram and Schmidt through `inner` alone.

    A vector is projected until a projection leaves more than half of its length (Daniel, Gragg, Kaufman and Stewart
    1976), which keeps the basis orthonormal to rounding; one of which nothing but rounding is left adds no direction.

    Raises:
        UserError: a product is not finite.
    """
    basis: Tensor | None = None
    columns: list[Tensor] = []
    rank = 0
    for index in range(size):
        y_p = product(probes(index))
        if basis is None:
            basis = y_p.new_empty(size, len(y_p))
        column_k = torch.zeros(size, dtype=torch.float64)
        whole = length = _length(y_p, inner)
        while length > DEPENDENT * torch.finfo(y_p.dtype).eps * whole:
            projection_r = inner(basis[:rank], y_p)
            y_p = y_p - projection_r.to(y_p) @ basis[:rank]
            column_k[:rank] += projection_r.cpu()
            before, length = length, _length(y_p, inner)
            if length > before / 2:
                column_k[rank] = length
                basis[rank] = y_p / length
                rank += 1
                break
        columns.append(column_k)
    assert basis is not None, "a sketch has one vector or more"
    return Sketch(basis[:rank], torch.stack(columns, dim=1)[:rank])


def _length(v_p: Tensor, inner: Inner) -> float:
    length = math.sqrt(float(inner(v_p[None], v_p)))
    if not math.isfinite(length):
        raise UserError("a Hessian-vector product is not finite; give a checkpoint and a batch with a finite loss")
    return length


def hutch_plus_plus(product: Product, probes: Probes, inner: Inner, *, matvecs: int) -> MatrixTrace:
    """tr(QQ'A) + (1/k) sum_i g_i'(1 - QQ')A(1 - QQ')g_i, with Q orthonormal to the range of A [s_1 .. s_k].

    The s_i are probes 0..k-1 and the g_i probes k..2k-1, k = matvecs / 3. Exact if the rank of A is k or less. The
    standard error is that of the sum, s / sqrt(k). It leaves nothing out: given the sketch the first term is exact and
    the sum unbiased for the rest, so the estimate is unbiased with this error under every sketch.

    Args:
        product: of a symmetric matrix.
        probes: independent signs.
        inner: products of vectors over all ranks.
        matvecs: the most products, a multiple of 3, 6 or more.

    Raises:
        UserError: another number of products, or a product that is not finite.
    """
    check_products(matvecs)
    size = matvecs // 3
    basis_rp = sketch(product, probes, inner, size=size).basis_rp
    dominant = math.fsum(float(inner(q_p[None], product(q_p))) for q_p in basis_rp)
    rest = []
    for index in range(size, 2 * size):
        g_p = probes(index)
        g_p = g_p - inner(basis_rp, g_p).to(g_p) @ basis_rp
        rest.append(float(inner(g_p[None], product(g_p))))
    standard_error = statistics.stdev(rest) / math.sqrt(size)
    return MatrixTrace(dominant + statistics.fmean(rest), standard_error, 2 * size + len(basis_rp), "hutch++")


def check_products(matvecs: int) -> None:
    """UserError for a number of products that Hutch++ does not make."""
    if matvecs < 6 or matvecs % 3:
        multiple = max(6, math.ceil(matvecs / 3) * 3)
        raise UserError(f"Hutch++ makes a multiple of 3 products, 6 or more, not {matvecs}; ask for {multiple}")
