"""Extreme eigenvalues of a symmetric operator H by Lanczos iteration (Lanczos 1950) with full reorthogonalisation.

A vector may be spread over ranks, each of which calls the functions here with its part. All they decide follows from
`inner`, whose values are the same on every rank, so all ranks take the same steps.

Shapes: p the part of the parameters that lies on this rank, K steps at most, k steps so far.
"""

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from train.command import UserError

Product = Callable[[Tensor], Tensor]  # v_p -> (Hv)_p, a new tensor
Inner = Callable[[Tensor, Tensor], Tensor]  # a_kp, b_p -> a_k . b over all ranks, float64 [k]

ROUNDING = 10  # multiples of the vectors' epsilon, relative to |Hq|, up to which a remainder is nothing but rounding


class RitzPair(NamedTuple):
    """An approximate eigenvalue, judged by a product with its own unit vector x.

    Attributes:
        value: the Rayleigh quotient x.Hx.
        residual: |Hx - value x| / |value|. An eigenvalue lies within residual |value| of `value` (Parlett 1980, section
            4.5). None where value is 0 and Hx is not: no relative error exists.
        converged: residual <= the tolerance asked for.
    """

    value: float
    residual: float | None
    converged: bool


class Spectrum(NamedTuple):
    """Both ends of a spectrum.

    Attributes:
        largest: the algebraically largest pairs, descending.
        smallest: the algebraically smallest pairs, ascending.
        iterations: Krylov steps, one product each.
        products: all products, the judging ones included.
        top_vector_p: the unit vector of largest[0].
    """

    largest: list[RitzPair]
    smallest: list[RitzPair]
    iterations: int
    products: int
    top_vector_p: Tensor


class Ritz(NamedTuple):
    """Eigenvalues of T = Q'HQ, ascending, its eigenvectors in columns, and |HQs - tQs| = beta_k |s_k| of each."""

    values_k: Tensor
    vectors_kk: Tensor
    errors_k: Tensor


def norm(v_p: Tensor, inner: Inner) -> float:
    """|v| over all ranks."""
    return math.sqrt(float(inner(v_p[None], v_p)))


def judge(x_p: Tensor, hx_p: Tensor, inner: Inner, tolerance: float) -> RitzPair:
    """The pair of a unit vector x and its product."""
    value = float(inner(x_p[None], hx_p))
    distance = norm(hx_p - value * x_p, inner)
    if distance == 0.0:
        return RitzPair(value, 0.0, converged=True)
    if value == 0.0:
        return RitzPair(value, None, converged=False)
    return RitzPair(value, distance / abs(value), converged=distance <= tolerance * abs(value))


class Krylov:
    """An orthonormal basis Q of span{v, Hv, H^2 v, ...}, in which H is a tridiagonal T, grown by a product at a time.

    Every new vector is orthogonalised twice against all before it ('twice is enough', Parlett 1980, section 6.9). That
    costs memory for all of them and buys the absence of ghosts: the eigenvalues of T belong to orthogonal vectors, so
    two equal ones that both converged are two eigenvalues of H.

    Attributes:
        size: k, the number of steps taken.
        exhausted: H maps the span of Q into itself, as far as the precision of the vectors can tell: it holds all that
            the start vector can reach, and no step is left.
    """

    def __init__(self, product: Product, start_p: Tensor, inner: Inner, *, max_steps: int) -> None:
        """The memory of all `max_steps` basis vectors is taken here."""
        length = norm(start_p, inner)
        if length == 0.0:
            raise ValueError("the start vector is zero")
        self._product, self._inner = product, inner
        self._basis_Kp = start_p.new_empty(max_steps, len(start_p))
        self._basis_Kp[0] = start_p / length
        self._diagonal: list[float] = []
        self._off_diagonal: list[float] = []
        self.size = 0
        self.exhausted = False

    def step(self) -> None:
        """Raises UserError where the product is not finite, on every rank at once."""
        self.size += 1
        done_kp = self._basis_Kp[: self.size]
        w_p = self._product(done_kp[-1])
        in_span_k = self._inner(done_kp, w_p)
        w_p = torch.addmv(w_p, done_kp.T, in_span_k.to(w_p), alpha=-1)
        w_p = torch.addmv(w_p, done_kp.T, self._inner(done_kp, w_p).to(w_p), alpha=-1)
        beta = norm(w_p, self._inner)
        length = math.hypot(float(in_span_k.norm()), beta)
        if not math.isfinite(length):
            raise UserError(f"Hessian product {self.size} has norm {length}; give a checkpoint whose loss is finite")
        # Where Q spans all there is, two passes leave noise, which as a basis vector would come back as ghosts.
        self.exhausted = beta <= ROUNDING * torch.finfo(w_p.dtype).eps * length
        self._diagonal.append(float(in_span_k[-1]))
        self._off_diagonal.append(0.0 if self.exhausted else beta)
        if not self.exhausted and self.size < len(self._basis_Kp):
            self._basis_Kp[self.size] = w_p / beta

    def ritz(self) -> Ritz:
        """What the steps so far say of H."""
        diagonal_k, off_k = (torch.tensor(each, dtype=torch.float64) for each in (self._diagonal, self._off_diagonal))
        tridiagonal_kk = diagonal_k.diag() + off_k[:-1].diag(1) + off_k[:-1].diag(-1)
        values_k, vectors_kk = torch.linalg.eigh(tridiagonal_kk)
        return Ritz(values_k, vectors_kk, off_k[-1] * vectors_kk[-1].abs())

    def vector(self, s_k: Tensor) -> Tensor:
        """The unit vector along Qs."""
        x_p = self._basis_Kp[: self.size].T @ s_k.to(self._basis_Kp)
        return x_p / norm(x_p, self._inner)


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
    """The `largest` algebraically largest and `smallest` smallest eigenvalues that the start vector reaches.

    Steps are taken until beta_k |s_k| <= tolerance |t| for all pairs (t, s) asked for, or `max_iterations` were taken.
    Every pair is then judged by a product of its own, up to largest + smallest on top of `max_iterations`; what has not
    converged says so. An eigenvalue at 0 meets no relative tolerance unless its product is exactly zero.

    What the lists are not: a residual says how near *an* eigenvalue lies, not that none was passed over. One whose
    vectors are orthogonal to the start is never found; a random start misses none but by accident. A multiple
    eigenvalue is found once, as a start vector has one direction in its space (rounding brings in others, in time:
    then it comes again, with an orthogonal vector). If all that the start reaches is fewer pairs than were asked for,
    the lists are as short as that, and a pair may stand in both.

    Raises:
        UserError: a product is not finite.
    """
    if largest < 1 or smallest < 0 or max_iterations < largest + smallest:
        raise ValueError(f"largest {largest}, smallest {smallest}, max_iterations {max_iterations} ask for no spectrum")
    krylov = Krylov(product, start_p, inner, max_steps=max_iterations)
    while True:
        krylov.step()
        ritz, size = krylov.ritz(), krylov.size
        bottom, top = range(min(smallest, size)), range(max(size - largest, 0), size)
        wanted = sorted({*bottom, *top})
        small_enough = bool((ritz.errors_k <= tolerance * ritz.values_k.abs())[wanted].all())
        if krylov.exhausted or size == max_iterations or (size >= largest + smallest and small_enough):
            break
    by_value = operator.attrgetter("value")
    judged: dict[int, RitzPair] = {}
    top_vector_p = start_p
    for index in wanted:
        x_p = krylov.vector(ritz.vectors_kk[:, index])
        judged[index] = pair = judge(x_p, product(x_p), inner, tolerance)
        if pair.value == max(each.value for each in judged.values()):
            top_vector_p = x_p
    return Spectrum(
        largest=sorted((judged[index] for index in top), key=by_value, reverse=True),
        smallest=sorted((judged[index] for index in bottom), key=by_value),
        iterations=krylov.size,
        products=krylov.size + len(wanted),
        top_vector_p=top_vector_p,
    )
