"""Ratios of a figure between models, and their mean over trainings."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.special import stdtr

from base.statistics import INTERVAL_LEVEL
from curvature.trace.estimates import estimate_mean
from dynamics.mechanism.correlation import LEAST_TRAININGS


class Ratio(NamedTuple):
    """A geometric mean of ratios over trainings, its interval, and the two-sided p-value of 1."""

    value: float
    low: float
    high: float
    p_value: float
    trainings: int

    def __str__(self) -> str:
        """Return 'x 1.25 [1.1, 1.42]'."""
        return f"x {self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mean_ratio(logarithms: Mapping[str, Sequence[float]]) -> Ratio | None:
    """Return the mean of some logarithms of ratios by training; None with too few trainings.

    The unit is the training: those of one are averaged first, and Student's interval is over the
    averages.

    Args:
        logarithms: natural, by training.

    Example: 2, the geometric mean 4 of 2 and 8, and 8.
        >>> log = math.log
        >>> mean = mean_ratio({"a": [log(2)], "b": [log(2), log(8)], "c": [log(8)]})
        >>> round(mean.value, 4), mean.trainings
        (4.0, 3)
    """
    means = [math.fsum(values) / len(values) for values in logarithms.values() if values]
    if len(means) < LEAST_TRAININGS:
        return None
    estimate = estimate_mean(means, level=INTERVAL_LEVEL)
    error = estimate.standard_error
    t = abs(estimate.mean) / error if error > 0 else math.inf
    low, high = map(math.exp, estimate.interval)
    p_value = 2 * float(stdtr(len(means) - 1, -t)) if estimate.mean else 1.0
    return Ratio(math.exp(estimate.mean), low, high, p_value, len(means))
