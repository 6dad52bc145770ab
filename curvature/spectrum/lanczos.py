"""Extreme eigenvalues of a symmetric operator by Lanczos iteration, fully reorthogonalised.

A vector may be spread over ranks, each of which calls the functions here with its part. All they
decide follows from `inner`, whose values are the same on every rank, so all ranks take the same
steps.

Shapes: p the part of the parameters on this rank, k steps so far.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from base.errors import UserError

Product = Callable[[Tensor], Tensor]  # v_p -> (Hv)_p, a new tensor
# k vectors a_p and a vector b_p -> all a . b over all ranks, float64 [k] on the CPU
Inner = Callable[[Sequence[Tensor], Tensor], Tensor]

# Multiples of the vectors' epsilon, relative to |Hq|, up to which a remainder is mere rounding.
ROUNDING = 10
ENTRIES_AT_ONCE = 1 << 20  # to which all basis vectors are added while they are in the cache


class RitzPair(NamedTuple):
    """An approximate eigenvalue, judged by a product with its own unit vector x.

    Attributes:
        value: the Rayleigh quotient x.Hx.
        residual: |Hx - value x| / |value|. An eigenvalue is within residual |value| of `value`
            (Parlett 1980, section 4.5). None where value is 0 and Hx is not: no relative error
            exists.
        converged: residual <= the tolerance asked for.
    """

    value: float
    residual: float | None
    converged: bool


class Spectrum(NamedTuple):
    """The algebraically largest pairs, descending, the smallest, ascending, and the steps taken."""

    largest: list[RitzPair]
    smallest: list[RitzPair]
    iterations: int


class Ritz(NamedTuple):
    """Eigenvalues t of T = Q'HQ, ascending, eigenvectors s in columns, and errors |HQs - tQs|."""

    values_k: Tensor
    vectors_kk: Tensor
    errors_k: Tensor


def norm(v_p: Tensor, inner: Inner) -> float:
    """Return |v| over all ranks.

    Example: on one rank.
        >>> norm(torch.tensor([3.0, 4.0]), lambda rows, v_p: torch.stack(rows) @ v_p)
        5.0
    """
    return math.sqrt(float(inner([v_p], v_p)))


def judge(x_p: Tensor, hx_p: Tensor, inner: Inner, tolerance: float) -> RitzPair:
    """Return the pair of a unit vector x and its product.

    Example: H = diag(1, 2) at x = (0.6, 0.8), which is not an eigenvector.
        >>> inner = lambda vectors, b: torch.stack([a.double() @ b.double() for a in vectors])
        >>> pair = judge(torch.tensor([0.6, 0.8]), torch.tensor([0.6, 1.6]), inner, tolerance=0.1)
        >>> round(pair.value, 4), round(pair.residual, 4), pair.converged
        (1.64, 0.2927, False)
    """
    value = float(inner([x_p], hx_p))
    distance = norm(torch.sub(hx_p, x_p, alpha=value), inner)
    if distance == 0.0:
        return RitzPair(value, 0.0, converged=True)
    if value == 0.0:
        return RitzPair(value, None, converged=False)
    return RitzPair(value, distance / abs(value), converged=distance <= tolerance * abs(value))


class Krylov:
    """An orthonormal basis Q of span{v, Hv, H^2 v, ...}, in which H is a tridiagonal T.

    It grows by a vector, of one product, at a time. Every new vector is orthogonalised twice
    against all before it ('twice is enough', Parlett 1980, section 6.9), so that two equal
    eigenvalues of T that both converged are two of H, and no ghosts.

    Attributes:
        size: k, the number of steps taken.
        exhausted: Q spans all that the start vector can reach, as far as its precision can tell.
    """

    def __init__(self, product: Product, start_p: Tensor, inner: Inner) -> None:
        self._product, self._inner = product, inner
        self._basis = [start_p / norm(start_p, inner)]
        self._next_p: Tensor | None = None  # becomes a basis vector if there is another step
        self._diagonal: list[float] = []
        self._off_diagonal: list[float] = []
        self.size = 0
        self.exhausted = False

    def step(self) -> None:
        """Take a step, or raise UserError on every rank if the product is not finite."""
        self.size += 1
        if self._next_p is not None:
            self._basis.append(self._next_p)
            self._next_p = None
        w_p = self._product(self._basis[-1])
        # In exact arithmetic w has parts along the last two vectors alone; rounding brings in parts
        # along all, which grow as eigenvalues converge. The second pass takes out the first's.
        in_span_k = self._inner(self._basis, w_p)
        _add(w_p, self._basis, -in_span_k)
        _add(w_p, self._basis, -self._inner(self._basis, w_p))
        beta = norm(w_p, self._inner)
        # |Hq| from its parts within and beside Q, as w itself was overwritten.
        length = math.hypot(float(in_span_k.norm()), beta)
        if not math.isfinite(length):
            raise UserError(
                f"Hessian product {self.size} has norm {length}; give a checkpoint whose loss is"
                " finite"
            )
        # Where Q spans all there is, two passes leave noise, which as a basis vector would come
        # back as ghosts.
        self.exhausted = beta <= ROUNDING * torch.finfo(w_p.dtype).eps * length
        # The part along the newest q is q.Hq, the diagonal of T.
        self._diagonal.append(float(in_span_k[-1]))
        # A 0 closes T, and makes the errors of its Ritz pairs 0.
        self._off_diagonal.append(0.0 if self.exhausted else beta)
        if not self.exhausted:
            self._next_p = w_p.div_(beta)

    def ritz(self) -> Ritz:
        """Return the eigenpairs of H in the span of the steps so far."""
        diagonal_k, off_k = (
            torch.tensor(each, dtype=torch.float64) for each in (self._diagonal, self._off_diagonal)
        )
        tridiagonal_kk = diagonal_k.diag() + off_k[:-1].diag(1) + off_k[:-1].diag(-1)
        values_k, vectors_kk = torch.linalg.eigh(tridiagonal_kk)
        # HQ = QT + beta_k q_{k+1} e_k', so HQs - tQs = beta_k s_k q_{k+1}: no product is needed.
        return Ritz(values_k, vectors_kk, off_k[-1] * vectors_kk[-1].abs())

    def vector(self, s_k: Tensor) -> Tensor:
        """Return the unit vector along Qs."""
        x_p = _add(torch.zeros_like(self._basis[0]), self._basis, s_k)
        return x_p.div_(norm(x_p, self._inner))


def _add(sum_p: Tensor, vectors: list[Tensor], factors_k: Tensor) -> Tensor:
    """Add vectors times factors to `sum_p`, in place, rounding once."""
    factors = factors_k.tolist()
    for start in range(0, len(sum_p), ENTRIES_AT_ONCE):
        part = slice(start, start + ENTRIES_AT_ONCE)
        wide = sum_p[part].double()
        for vector_p, factor in zip(vectors, factors, strict=True):
            wide.add_(vector_p[part], alpha=factor)
        sum_p[part] = wide
    return sum_p


def lanczos(
    product: Product,
    start_p: Tensor,
    inner: Inner,
    *,
    largest: int,
    smallest: int,
    tolerance: float,
    max_iterations: int,
) -> Spectrum:
    """Return the largest and smallest eigenvalues that the start vector reaches.

    Steps are taken until beta_k |s_k| <= tolerance |t| for all pairs (t, s) asked for, or
    `max_iterations` were taken. Every pair is then judged by a product of its own, up to largest +
    smallest on top of `max_iterations`; what has not converged says so. An eigenvalue at 0 meets no
    relative tolerance unless its product is exactly zero.

    A residual bounds the distance to *an* eigenvalue; it does not show that none was passed over. A
    multiple eigenvalue is found once, as a start vector has one direction in its space (in time
    rounding brings in others: then it comes again, with an orthogonal vector). If the start reaches
    fewer pairs than were asked for, the lists are shorter, and a pair may be in both.

    The start vector is not 0 and of any length.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0]))
        >>> inner = lambda vectors, b: torch.stack([a.double() @ b.double() for a in vectors])
        >>> ends = {"largest": 1, "smallest": 1, "tolerance": 1e-3, "max_iterations": 3}
        >>> spectrum = lanczos(matrix.mv, torch.ones(3), inner, **ends)
        >>> round(spectrum.largest[0].value, 4), round(spectrum.smallest[0].value, 4)
        (5.0, 1.0)

    Raises:
        UserError: a product is not finite.
    """
    krylov = Krylov(product, start_p, inner)
    while True:
        krylov.step()
        ritz, size = krylov.ritz(), krylov.size
        bottom, top = range(min(smallest, size)), range(max(size - largest, 0), size)
        ends = sorted({*bottom, *top})
        small_enough = bool((ritz.errors_k <= tolerance * ritz.values_k.abs())[ends].all())
        # With fewer steps than pairs the two ends overlap, and one pair would stand for two.
        converged = size >= largest + smallest and small_enough
        if converged or krylov.exhausted or size == max_iterations:
            break

    # every pair by a product of its own
    by_value = operator.attrgetter("value")
    judged: dict[int, RitzPair] = {}
    for index in ends:
        x_p = krylov.vector(ritz.vectors_kk[:, index])
        judged[index] = judge(x_p, product(x_p), inner, tolerance)
    return Spectrum(
        largest=sorted((judged[index] for index in top), key=by_value, reverse=True),
        smallest=sorted((judged[index] for index in bottom), key=by_value),
        iterations=krylov.size,
    )
