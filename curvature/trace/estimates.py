"""Means over microbatches and differences of traces, without imports that take seconds.

Microbatch and probe move the trace of neighbouring checkpoints alike, so the differences microbatch
by microbatch scatter far less than the traces themselves. They are independent and stand for the
text: d = mean(d_m), its standard error s / sqrt(M), and Student's t with M - 1 degrees of freedom,
for M microbatches.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from base.errors import UserError
from base.statistics import Verdict, holm, verdict_of
from ckpt_tools.hf.measured import Curvature
from ckpt_tools.hf.results import Result

TRACE_UNIT = "nats per token per squared parameter unit"
METHOD = (
    "difference of the traces of the same microbatches with the same probes: Student's t over the"
    " differences of the microbatches, two-sided; p-values adjusted over all pairs by Holm (1979),"
    " intervals not adjusted"
)
NOTE = "Intervals hold for another draw of microbatches and probes, the same for both results."
# Settings that decide microbatches, probes and rounding.
SHARED = ("sequence_length", "microbatch_sequences", "seed", "dtype")

Traces = Result[Curvature]


class MeanEstimate(NamedTuple):
    """A mean over microbatches, its standard error s / sqrt(M), and its Student-t interval."""

    mean: float
    standard_error: float
    interval: tuple[float, float]


def estimate_mean(values: Sequence[float] | NDArray[np.float64], *, level: float) -> MeanEstimate:
    """Return mean, standard error and interval of two or more independent values.

    The interval is mean -+ t s / sqrt(n), t the quantile (1 + level) / 2 of Student's distribution
    with n - 1 degrees.

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


class TraceDifference(NamedTuple):
    """Second minus first, its standard error and interval, and the two-sided p-value of none."""

    value: float
    standard_error: float
    low: float
    high: float
    p_value: float


class TraceComparison(NamedTuple):
    """One pair of a call.

    Attributes:
        first, second: places of the results in the call.
        unpaired_standard_error: of the difference, had the results been made on text and probes of
            their own.
        p_adjusted: Holm, over the pairs of the call.
        verdict: on the second, by the adjusted p-value.
    """

    first: int
    second: int
    first_value: float
    second_value: float
    difference: TraceDifference
    unpaired_standard_error: float
    p_adjusted: float
    verdict: Verdict


def paired_difference(
    first: Sequence[float], second: Sequence[float], level: float
) -> TraceDifference:
    """Return the mean of `second` minus that of `first`, by Student's t over the pairs.

    Where all differences are equal the interval has no length and the p-value is 0, or 1 if they
    are 0.

    Both are of the same microbatches with the same probes, in one order.

    Example:
        >>> paired_difference([3.0, 5.0, 8.0], [4.0, 6.0, 9.0], 0.95)
        TraceDifference(value=1.0, standard_error=0.0, low=1.0, high=1.0, p_value=0.0)
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean, error, (low, high) = estimate_mean(differences, level=level)
    statistic = abs(mean) / error if error else math.inf if mean else 0.0
    p_value = 2 * float(stdtr(len(differences) - 1, -statistic))
    return TraceDifference(mean, error, low, high, p_value)


def compare(
    results: Sequence[Traces], pairs: Sequence[tuple[int, int]], *, level: float
) -> list[TraceComparison]:
    """Return every pair by `paired_difference`, with p-values adjusted over all of them.

    Raises:
        UserError: two results are not comparable, or one lacks the values.
    """
    values = [_values(result) for result in results]
    for first, second in pairs:
        _check_comparable(results[first], results[second])
    estimates = [estimate_mean(each, level=level) for each in values]
    differences = [
        paired_difference(values[first], values[second], level) for first, second in pairs
    ]
    adjusted = holm([difference.p_value for difference in differences])
    return [
        TraceComparison(
            first,
            second,
            estimates[first].mean,
            estimates[second].mean,
            difference,
            math.hypot(estimates[first].standard_error, estimates[second].standard_error),
            p,
            verdict_of(difference.value, p, level),
        )
        for (first, second), difference, p in zip(pairs, differences, adjusted, strict=True)
    ]


def _values(result: Traces) -> list[float]:
    """Return the trace of every microbatch; UserError if there is none."""
    trace = result.measured.trace
    values = trace.per_microbatch if trace else None
    if values is None or len(values) < 2 or not all(map(math.isfinite, values)):
        raise UserError(
            f"{result.path} holds no finite trace of two microbatches or more; measure it again by"
            " 'python -m curvature hutchinson'"
        )
    return values


def _check_comparable(first: Traces, second: Traces) -> None:
    """Raise UserError with the first setting that differs, if microbatches or probes do."""
    ours, theirs = _pairs_measured(first), _pairs_measured(second)
    for name, value in ours.items():
        if value != theirs[name]:
            raise UserError(
                f"{first.path} and {second.path} were not measured on the same pairs of microbatch"
                f" and probe: {name} {value!s:.12} and {theirs[name]!s:.12}; measure both with the"
                " same settings"
            )


def _pairs_measured(result: Traces) -> dict[str, Any]:
    """Return what decides microbatches and probes, by the option that sets it."""
    text, trace, settings = result.spec.data, result.measured.trace, result.settings
    options = {f"--{key.replace('_', '-')}": settings.get(key) for key in SHARED}
    return {
        "--data": text.bin_sha256 if text else None,
        **options,
        "number of microbatches": len((trace.per_microbatch if trace else None) or []),
    }
