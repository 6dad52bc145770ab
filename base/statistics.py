"""Several comparisons at once: the pairs of results, and Holm's correction for their number."""

import itertools
from collections.abc import Sequence
from typing import Literal

Pairing = Literal["baseline", "successive", "all"]
Verdict = Literal["higher", "lower", "not significant"]

# Intervals and tests over fewer documents are refused. Of two models alike, over documents of
# lognormal lengths, a nominal 5% test finds a difference in 13 to 15% of samples with 3 documents,
# 8 to 9% with 5, 5 to 9% with 12, and 4 to 7% with 20 (`tests/quant_eval/test_coverage.py`).
LEAST_DOCUMENTS = 20
INTERVAL_LEVEL = 0.95  # coverage of all intervals


def pairs_of(count: int, pairing: Pairing) -> list[tuple[int, int]]:
    """Return the compared pairs of `count` results: with the first, with the one before, or all.

    Example:
        >>> pairs_of(3, "baseline"), pairs_of(3, "successive"), pairs_of(3, "all")
        ([(0, 1), (0, 2)], [(0, 1), (1, 2)], [(0, 1), (0, 2), (1, 2)])
    """
    if pairing == "all":
        return list(itertools.combinations(range(count), 2))
    return [(0 if pairing == "baseline" else second - 1, second) for second in range(1, count)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: at alpha, any false finding has at most that chance.

    With p_(1) <= ... <= p_(m): max over j <= i of min(1, (m - j + 1) p_(j)). Holm 1979, "A simple
    sequentially rejective multiple test procedure"; it holds whatever the dependence, and pairs
    that share a result depend.

    Returns:
        Adjusted p-values in the order given.

    Example: of four tests the smallest p-value is multiplied by 4, the next by 3, and so on.
        >>> [round(p, 4) for p in holm([0.01, 0.04, 0.03, 0.005])]
        [0.03, 0.06, 0.06, 0.02]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        # The running maximum: a larger p-value never gets a smaller adjusted one.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def verdict_of(difference: float, p_adjusted: float, level: float) -> Verdict:
    """Return the direction of a difference that is significant at 1 - level, by its adjusted p.

    Example:
        >>> verdict_of(0.2, 0.04, level=0.95), verdict_of(0.2, 0.06, level=0.95)
        ('higher', 'not significant')
    """
    if p_adjusted > 1 - level:
        return "not significant"
    return "higher" if difference > 0 else "lower"
