"""The spectral density of a symmetric operator H by stochastic Lanczos quadrature.

For a Rademacher vector v and q = v / |v|, k Lanczos steps from q give nodes t_i (eigenvalues of T)
and weights w_i (first entries of its eigenvectors, squared) of the Gauss quadrature of q's spectral
measure: q'f(H)q = sum_i w_i f(t_i) for every polynomial f of degree up to 2k - 1 (Golub and Meurant
2010, chapter 6). The mean over v is tr f(H) / N (Lin, Saad, Yang 2016; for networks Ghorbani,
Krishnan, Xiao 2019).

Shapes: p the part of the parameters on this rank, N parameters, M start vectors.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from curvature.spectrum.lanczos import Inner, Krylov, Product


class MomentEstimate(NamedTuple):
    """A mean over M independent start vectors and its standard error, s / sqrt(M).

    There is no interval: where one eigenvalue carries most of a moment the values are skewed, and
    of a model whose top eigenvalue is 72% of the trace, 95% intervals by Student's t covered 86, 89
    and 92% with M = 8, 32 and 128.
    """

    mean: float
    standard_error: float


class NegativeShare(NamedTuple):
    """The share of the N eigenvalues that are negative: the mean weight of negative nodes.

    A step function is not a polynomial, so a node near 0 may count on the wrong side, by its whole
    weight: of a trained model with 41% negative eigenvalues the mean was anything from 0 to 80%
    with 5 to 60 steps. `least` and `most` bound the share for these start vectors whatever the
    steps (Chebyshev, Markov, Stieltjes; Szegoe 1939, section 3.41).
    """

    mean: float
    standard_error: float
    least: float
    most: float


class SpectralDensity(NamedTuple):
    """Quadrature rules of M start vectors, and moments of the spectrum.

    Attributes:
        nodes: by start vector, ascending, in the units of H.
        weights: of the nodes; they sum to 1.
        trace: tr H, from the first moment, Hutchinson's v'Hv.
        squared_norm: |H|_F^2, from the second, |Hv|^2.
        negative: share of eigenvalues below 0.
    """

    nodes: list[list[float]]
    weights: list[list[float]]
    trace: MomentEstimate
    squared_norm: MomentEstimate
    negative: NegativeShare


def density(
    product: Product, starts: Iterable[Tensor], inner: Inner, *, num_parameters: int, steps: int
) -> SpectralDensity:
    """Return the density from two or more `steps` for each of two or more Rademacher vectors.

    Keeps `steps` vectors in memory. A start vector that reaches fewer eigenvalues than `steps` has
    as many nodes.

    Example:
        >>> import torch
        >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> starts = [torch.ones(4), torch.tensor([1.0, -1.0, 1.0, -1.0])]
        >>> inner = lambda vectors, b: torch.stack([a.double() @ b.double() for a in vectors])
        >>> spread = density(matrix.mv, starts, inner, num_parameters=4, steps=4)
        >>> round(spread.trace.mean, 4), round(spread.squared_norm.mean, 4)
        (10.0, 30.0)

    Raises:
        UserError: a product is not finite.
    """
    rules = [_gauss_rule(product, start_p, inner, steps) for start_p in starts]
    nodes, weights = ([rule[part] for rule in rules] for part in (0, 1))
    # N times the mean of sum_i w_i t_i^k is tr H^k; of a symmetric H tr H^2 is |H|_F^2.
    moments = ([_dot([t**power for t in x], w) for x, w in rules] for power in (1, 2))
    trace, squared_norm = (
        _estimate([num_parameters * value for value in values]) for values in moments
    )
    negative = _share_below_zero(nodes, weights)
    return SpectralDensity(nodes, weights, trace, squared_norm, negative)


def _gauss_rule(
    product: Product, start_p: Tensor, inner: Inner, steps: int
) -> tuple[list[float], list[float]]:
    """Return nodes and weights, and free the basis."""
    krylov = Krylov(product, start_p, inner)
    while krylov.size < steps and not krylov.exhausted:
        krylov.step()
    ritz = krylov.ritz()
    return ritz.values_k.tolist(), ritz.vectors_kk[0].square().tolist()


def _share_below_zero(nodes: list[list[float]], weights: list[list[float]]) -> NegativeShare:
    # The spectral measure below a node is at least the weights before it; with the node itself it
    # is at most its own weight more. So the bounds at 0 are the sums up to the node before the last
    # negative one and up to the node after it.
    least, means, most = [], [], []
    for of_nodes, of_weights in zip(nodes, weights, strict=True):
        sums = [0.0, *itertools.accumulate(of_weights)]
        below = sum(node < 0.0 for node in of_nodes)
        least.append(sums[max(below - 1, 0)])
        means.append(sums[below])
        most.append(sums[min(below + 1, len(of_nodes))])
    return NegativeShare(*_estimate(means), statistics.fmean(least), statistics.fmean(most))


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _estimate(values: list[float]) -> MomentEstimate:
    return MomentEstimate(
        statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    )
