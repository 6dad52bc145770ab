"""Choices ranked by a figure of their rows, with paired differences to the best."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from base.statistics import holm
from quant_eval.estimate import Estimate
from study.results.paired import Paired, Weighted


class Ranked(NamedTuple):
    """One of several choices, with its figure.

    Attributes:
        label: its name.
        estimate: the figure.
        excess: over that of the best; None of the best itself.
        p_adjusted: of no such excess.
    """

    label: str
    estimate: Estimate
    excess: Estimate | None = None
    p_adjusted: float | None = None


def ranked(
    choices: Mapping[str, Sequence[Weighted]], paired: Paired, spec: str, figure: str
) -> list[Ranked]:
    """Return the choices by rising figure, each with its paired excess over the lowest.

    A choice is a weighted sum of rows for every seed, the same seeds in the same order for all.
    Holm's correction is over every pair, for the data choose which is the lowest.
    """
    estimates = {
        label: paired.estimate(replicates, spec, figure) for label, replicates in choices.items()
    }
    order = sorted(choices, key=lambda label: estimates[label].value)
    pairs = {
        (low, high): paired.estimate(_differences(choices[low], choices[high]), spec, figure)
        for low, high in combinations(order, 2)
    }
    adjusted = dict(
        zip(pairs, holm([difference.p_value() for difference in pairs.values()]), strict=True)
    )
    best, *others = order
    return [
        Ranked(best, estimates[best]),
        *(
            Ranked(label, estimates[label], pairs[best, label], adjusted[best, label])
            for label in others
        ),
    ]


def _differences(low: Sequence[Weighted], high: Sequence[Weighted]) -> list[Weighted]:
    """Return high - low for every seed."""
    return [
        [*second, *((row, -weight) for row, weight in first)]
        for first, second in zip(low, high, strict=True)
    ]
