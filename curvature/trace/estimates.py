"""Means over microbatches with their errors, without imports that take seconds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

TRACE_UNIT = "nats per token per squared parameter unit"


class MeanEstimate(NamedTuple):
    """A mean over microbatches, its standard error s / sqrt(M), and its Student-t interval."""

    mean: float
    standard_error: float
    interval: tuple[float, float]


def estimate_mean(values: Sequence[float] | NDArray[np.float64], *, level: float) -> MeanEstimate:
    """Return mean, standard error and interval of two or more independent values.

    The interval is mean -+ t s / sqrt(n), t the quantile (1 + level) / 2 of Student's distribution
    with n - 1 degrees.

    Args:
        values: two or more, of any unit.
        level: coverage of the interval where the values are normal.

    Example: s = 1, so the standard error is 1 / sqrt(3) and the half-width 4.303 times that.
        >>> mean = estimate_mean([1.0, 2.0, 3.0], level=0.95)
        >>> round(mean.standard_error, 6), round(mean.interval[1], 4)
        (0.57735, 4.4841)
    """
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    standard_error = math.sqrt(variance / len(values))
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * standard_error
    return MeanEstimate(mean, standard_error, (mean - half, mean + half))
