"""Several comparisons of one call: which results stand beside which, and Holm's correction for their number."""

import itertools
from collections.abc import Sequence
from typing import Literal

Pairing = Literal["baseline", "successive", "all"]


def pairs_of(count: int, pairing: Pairing) -> list[tuple[int, int]]:
    """Which of `count` results stand beside which: each behind the first, behind the one before it, or all."""
    if pairing == "all":
        return list(itertools.combinations(range(count), 2))
    return [(0 if pairing == "baseline" else second - 1, second) for second in range(1, count)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given; those up to alpha keep the chance of any false finding below alpha.

    With p_(1) <= ... <= p_(m): max over j <= i of min(1, (m - j + 1) p_(j)). Holm 1979, "A simple sequentially
    rejective multiple test procedure"; it holds whatever the dependence, and pairs that share a result depend.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
