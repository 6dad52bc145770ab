"""The largest eigenvalue of a symmetric operator by Lanczos iteration (Lanczos 1950) with full reorthogonalisation.

Shapes: P parameters, k iterations so far.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class TopEigenvalue(NamedTuple):
    """The algebraically largest Ritz pair, judged by one product with its own vector.

    Attributes:
        value: Rayleigh quotient x.Hx of the unit Ritz vector x.
        residual: |Hx - value x| / |value|; an eigenvalue lies within residual x |value| of `value`.
        converged: residual <= tolerance.
        iterations: products with the operator, the judging one included.
        vector_P: x.
    """

    value: float
    residual: float
    converged: bool
    iterations: int
    vector_P: Tensor


def top_eigenvalue(
    product: Callable[[Tensor], Tensor], start_P: Tensor, *, tolerance: float, max_iterations: int
) -> TopEigenvalue:
    """Largest eigenvalue in algebraic value, not in magnitude; at most `max_iterations` products.

    Steps 1..k build an orthonormal basis Q of the Krylov space and T = Q'HQ, tridiagonal. The Ritz pair (t, Qs) of T's
    largest eigenvalue has |HQs - tQs| = beta_k |s_k| (Parlett 1980, section 13.2), which decides when to stop; the
    residual that is reported is measured afresh. Every new vector is orthogonalised twice against all before it ('twice
    is enough', ibid. section 6.9): without that rounding breeds ghost copies of converged eigenvalues. Keeps one vector
    per iteration in memory.
    """
    if max_iterations < 2:
        raise ValueError(f"max_iterations {max_iterations} leaves no step beside the judging product; give 2 or more")
    basis_kP = start_P.new_empty(max_iterations - 1, start_P.numel())
    basis_kP[0] = start_P / start_P.norm()
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    ritz = start_P.new_ones(1, dtype=torch.float64)
    for k in range(max_iterations - 1):
        done_kP = basis_kP[: k + 1]
        w_P = product(basis_kP[k])
        diagonal.append(float(w_P @ basis_kP[k]))
        for _ in range(2):
            w_P = w_P - done_kP.T @ (done_kP @ w_P)
        beta = float(w_P.norm())
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        tridiagonal += sum(torch.diag(torch.tensor(off_diagonal, dtype=torch.float64), d) for d in (-1, 1)) if k else 0
        values, vectors = torch.linalg.eigh(tridiagonal)
        ritz = vectors[:, -1]
        small_enough = beta * abs(float(ritz[-1])) <= tolerance * abs(float(values[-1]))
        if small_enough or beta == 0.0 or k + 2 == max_iterations:
            break
        off_diagonal.append(beta)
        basis_kP[k + 1] = w_P / beta
    x_P = basis_kP[: len(ritz)].T @ ritz.to(basis_kP)
    x_P = x_P / x_P.norm()
    hx_P = product(x_P)
    value = float(x_P @ hx_P)
    distance = float((hx_P - value * x_P).norm())
    residual = distance / abs(value) if value else float("inf")
    return TopEigenvalue(value, residual, residual <= tolerance, len(ritz) + 1, x_P)
