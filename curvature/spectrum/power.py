"""Power iteration as arXiv:2510.06213 (section 6.2) ran it, with the error it leaves.

Shapes: p the part of the parameters that lies on this rank.
"""

from typing import NamedTuple

from torch import Tensor

from curvature.spectrum.lanczos import Inner, Product, RitzPair, judge, norm


class PowerIteration(NamedTuple):
    """The eigenvalue that is largest in magnitude, as far as the iteration came.

    Attributes:
        pair: value, and the residual of its own vector; `pair.converged` is residual <= tolerance.
        rule_met: the values of two successive vectors are near each other, which is when PyHessian stops. It says
            nothing of the distance to an eigenvalue: where the next eigenvalue is near in magnitude, values creep.
        iterations: products.
    """

    pair: RitzPair
    rule_met: bool
    iterations: int


def power_iteration(
    product: Product, start_p: Tensor, inner: Inner, *, tolerance: float, max_iterations: int
) -> PowerIteration:
    """PyHessian's `eigenvalues(maxIter=100, tol=1e-3)` for the first eigenvalue (github.com/amirgholami/PyHessian).

    With v the unit vector along the start or the last product, value = v.Hv. Stops when
    |value - last value| < tolerance (|last value| + 1e-6) and returns, as PyHessian does, the pair before the one that
    met this; after `max_iterations` products the last pair. PyHessian's defaults are 1e-3 and 100; its v is
    shorter than 1 by 1e-6 (it divides by norms + 1e-6), so its values are 2e-6 of themselves nearer to 0.
    """
    if max_iterations < 2:
        raise ValueError(f"max_iterations {max_iterations} leaves no two values to compare; give 2 or more")
    length = norm(start_p, inner)
    if length == 0.0:
        raise ValueError("the start vector is zero")
    v_p = start_p / length
    hv_p = product(v_p)
    pair = judge(v_p, hv_p, inner, tolerance)
    for iteration in range(2, max_iterations + 1):
        length = norm(hv_p, inner)
        if length == 0.0:  # v is an eigenvector of 0 and has no successor
            return PowerIteration(pair, rule_met=True, iterations=iteration - 1)
        v_p = hv_p / length
        hv_p = product(v_p)
        last, pair = pair, judge(v_p, hv_p, inner, tolerance)
        if abs(pair.value - last.value) < tolerance * (abs(last.value) + 1e-6):
            return PowerIteration(last, rule_met=True, iterations=iteration)
    return PowerIteration(pair, rule_met=False, iterations=max_iterations)
