"""Rank correlation of a few runs, with its exact test."""

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

# All of them up to 8 runs, a draw of as many beyond; a draw's p-value is not below its reciprocal.
PERMUTATIONS = 50_000


def kendall(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return Kendall's tau (1938), concordant minus discordant over all pairs, and its p-value.

    The p-value is the share of the orders of the runs, were the second
    independent of the first, that give a tau as far from 0. Its unit is the run: it holds for other
    runs of the same settings, where a comparison paired over documents holds for other documents.

    Args:
        first: a value of each run.
        second: another value of each, in the same order.

    Example: two of the 24 orders of four runs have a tau of 1 or -1.
        >>> tau, p_value = kendall([1, 2, 3, 4], [10, 20, 30, 40])
        >>> tau, round(p_value, 4)
        (1.0, 0.0833)
    """
    i, j = np.triu_indices(len(first), 1)
    sign_P = np.sign(np.subtract(np.take(first, j), np.take(first, i)))

    def tau(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        moved = np.moveaxis(values, axis, -1)
        signs = np.sign(moved[..., j] - moved[..., i]) @ sign_P
        return np.asarray(signs / comb(len(first), 2), dtype=np.float64)

    result = permutation_test(
        (np.asarray(second, dtype=np.float64),),
        tau,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
    return float(result.statistic), float(result.pvalue)
