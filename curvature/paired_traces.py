"""Differences of traces measured on the same microbatches with the same probes.

Microbatch and probe move the trace of neighbouring checkpoints alike, so the differences microbatch
by microbatch scatter far less than the traces themselves. They are independent and stand for the
text: d = mean(d_m), its standard error s / sqrt(M), and Student's t with M - 1 degrees of freedom,
for M microbatches.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy.special import stdtr

from base.errors import UserError
from base.statistics import Verdict, holm, verdict_of
from ckpt_tools.hf.measured import Curvature
from ckpt_tools.hf.results import Result
from curvature.trace.hutchinson import estimate_mean

TRACE = "trace"
UNIT = "nats per token per squared parameter unit"
METHOD = (
    "difference of the traces of the same microbatches with the same probes: Student's t over the"
    " differences of the microbatches, two-sided; p-values adjusted over all pairs by Holm (1979),"
    " intervals not adjusted"
)
# Settings that decide microbatches, probes and rounding. Older results name their number of probes
# of a microbatch, which is 1 in all others.
SHARED = ("sequence_length", "microbatch_sequences", "seed", "dtype")

Traces = Result[Curvature]


class Difference(NamedTuple):
    """Second minus first, in the unit of the trace.

    Attributes:
        value: mean over the microbatches.
        standard_error: of it.
        low, high: its interval.
        p_value: of no difference; two-sided.
    """

    value: float
    standard_error: float
    low: float
    high: float
    p_value: float


class Comparison(NamedTuple):
    """One pair of a call.

    Attributes:
        first, second: places of the results in the call.
        first_value, second_value: their traces.
        difference: second minus first.
        unpaired_standard_error: of the difference, had the results been made on text and probes of
            their own.
        p_adjusted: Holm, over the pairs of the call.
        verdict: on the second, by the adjusted p-value.
    """

    first: int
    second: int
    first_value: float
    second_value: float
    difference: Difference
    unpaired_standard_error: float
    p_adjusted: float
    verdict: Verdict


def paired_difference(first: Sequence[float], second: Sequence[float], level: float) -> Difference:
    """Return the mean of `second` minus that of `first`, by Student's t over the pairs.

    Where all differences are equal the interval has no length and the p-value is 0, or 1 if they
    are 0.

    Example:
        >>> paired_difference([3.0, 5.0, 8.0], [4.0, 6.0, 9.0], 0.95)
        Difference(value=1.0, standard_error=0.0, low=1.0, high=1.0, p_value=0.0)
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"{len(first)} and {len(second)} values are no pairs, or too few")
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean, error, (low, high) = estimate_mean(differences, level=level)
    statistic = abs(mean) / error if error else math.inf if mean else 0.0
    p_value = 2 * float(stdtr(len(differences) - 1, -statistic))
    return Difference(mean, error, low, high, p_value)


def compare(
    results: Sequence[Traces], pairs: Sequence[tuple[int, int]], figure: str, *, level: float
) -> list[Comparison]:
    """Return every pair by `paired_difference`, with p-values adjusted over all of them.

    Args:
        results: of hutchinson.
        pairs: places of the first and the second result of each pair.
        figure: trace, or the name of a block.
        level: coverage of the intervals; 1 - level is that of the tests.

    Raises:
        UserError: two results are not comparable, or one lacks the figure.
    """
    values = [_values(result, figure) for result in results]
    for first, second in pairs:
        _check_comparable(results[first], results[second])
    estimates = [estimate_mean(each, level=level) for each in values]
    differences = [
        paired_difference(values[first], values[second], level) for first, second in pairs
    ]
    adjusted = holm([difference.p_value for difference in differences])
    compared = []
    for (first, second), difference, p in zip(pairs, differences, adjusted, strict=True):
        errors = (estimates[place].standard_error for place in (first, second))
        compared.append(
            Comparison(
                first,
                second,
                estimates[first].mean,
                estimates[second].mean,
                difference,
                math.hypot(*errors),
                p,
                verdict_of(difference.value, p, level),
            )
        )
    return compared


def _values(result: Traces, figure: str) -> list[float]:
    """Return the trace, or that of a block, of every microbatch; UserError where there is none."""
    name, measured = result.spec.name, result.measured
    if name != "hutchinson":
        raise UserError(
            f"{result.path} is of '{name}', without a trace of every microbatch; give results of"
            " 'python -m curvature hutchinson'"
        )
    blocks = measured.block_traces
    if figure != TRACE and figure not in blocks:
        raise UserError(
            f"{result.path} has no figure '{figure}'; give {TRACE} or one of {', '.join(blocks)}"
        )
    trace = measured.trace if figure == TRACE else blocks[figure]
    values = trace.per_microbatch if trace else None
    if values is None or len(values) < 2 or not all(map(math.isfinite, values)):
        raise UserError(
            f"{result.path} holds no finite {figure} of two microbatches or more; measure again"
            " with 'python -m curvature hutchinson'"
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
    """Return the settings that decide microbatches and probes, by the option that sets them."""
    text, trace, settings = result.spec.data, result.measured.trace, result.settings
    options = {f"--{key.replace('_', '-')}": settings.get(key) for key in SHARED}
    return {
        "--data": text.bin_sha256 if text else None,
        **options,
        "probes per microbatch": settings.get("probes_per_microbatch", 1),
        "number of microbatches": len((trace.per_microbatch if trace else None) or []),
    }
