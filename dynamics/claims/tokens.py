"""The competing claim that tokens alone raise the error, whatever the learning rate does.

Kumar et al., arXiv 2411.04330, "Scaling Laws for Precision": the loss that quantization adds to N
parameters trained on D tokens is C D^g / N^h exp(-bits / k). Within a run it is a power law in D.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from dynamics.claims.verdict import ALPHA, Measure, NotTested, Outcome, Verdict, by_measure, claim
from quant_eval.estimate import Estimate, Source
from study.results.summary import RunSummary, lineage
from study.results.table import Row, trained

LEAST_CHECKPOINTS = 3  # a power law through two always fits them


@claim(
    25,
    "tokens",
    "Tokens explain the error, not the decay",
    source="arXiv 2411.04330, scaling law of quantization after training",
    needs="two runs or more that anneal, other than by seed, their controls, and checkpoints"
    " before the anneal",
)
@by_measure
def tokens(of: Measure) -> Verdict:
    """Score both at the same annealed ends, by |log(predicted / measured)|, and compare by group.

    The power law is fitted to the run's weights at its high rate and those of its control, the
    factor to the runs of other groups. The unit of the test is the group of runs that differ in
    their seed alone.
    """
    ends = [end for end in of.evidence.annealed if _is_complete(of, end)]
    groups = sorted({end.group for end in ends})
    if len(groups) < 2:
        raise NotTested(f"annealed runs with a measured control, but for seeds: {len(groups)}")

    # of each annealed end the error of both predictions, averaged over the seeds of a group
    errors = {
        group: [
            (_by_tokens(of, end), _by_decay(of, end, ends)) for end in ends if end.group == group
        ]
        for group in groups
    }
    by_tokens = [fmean(first for first, _ in errors[group]) for group in groups]
    by_decay = [fmean(second for _, second in errors[group]) for group in groups]

    # their paired difference over groups: below 0 the tokens predict better
    estimate = _over_groups(
        [first - second for first, second in zip(by_tokens, by_decay, strict=True)]
    )
    low, high = estimate.interval()
    p_value = estimate.p_value()
    effect = f"{estimate.value:+z.3g} [{low:+z.3g}, {high:+z.3g}] in log"
    statistic = (
        f"mean |log(predicted / measured)| of {len(ends)} annealed ends: {fmean(by_tokens):.3g} by"
        f" the power law, {fmean(by_decay):.3g} by the decay; difference {effect} over"
        f" {len(groups)} groups of runs (paired, Student's t, p {p_value:.2g})"
    )
    outcome: Outcome = "supported" if estimate.value < 0 else "contradicted"
    return Verdict(
        "not decided" if p_value > ALPHA else outcome,
        statistic,
        effect,
        p_value,
        f"{sum(first < second for first, second in zip(by_tokens, by_decay, strict=True))} of"
        f" {len(groups)} by tokens",
        holds_seeds=True,
    )


def _is_complete(of: Measure, end: RunSummary) -> bool:
    """Return whether both predictions can be made and scored."""
    needed = (end.last, end.control)
    has_errors = all(row is not None and _error(of, row) for row in needed)
    return has_errors and len(_at_high_rate(of, end)) >= LEAST_CHECKPOINTS


def _error(of: Measure, row: Row) -> float | None:
    """Return the figure of a row; None where it has no logarithm."""
    value = row.get(of.column)
    return value if value and value > 0 else None


def _at_high_rate(of: Measure, end: RunSummary) -> list[tuple[float, float]]:
    """Return tokens and error of a run before its anneal and of its control."""
    study, rows = of.evidence.study, of.evidence.rows
    control = study.control_of(end.run)
    led = [*lineage(study, rows, end.run), *(lineage(study, rows, control) if control else ())]
    stable = {row["tokens"]: row for row in trained(led) if row["phase"] == "stable"}
    assert end.last is not None
    return [
        (tokens, error)
        for tokens, row in sorted(stable.items())
        if tokens <= end.last["tokens"] and (error := _error(of, row))
    ]


def _by_tokens(of: Measure, end: RunSummary) -> float:
    """Return how far the power law is off at the end of a run."""
    assert end.last is not None
    log_tokens, log_errors = np.log(np.array(_at_high_rate(of, end))).T
    slope, intercept = np.polyfit(log_tokens, log_errors, 1)
    predicted = intercept + slope * math.log(end.last["tokens"])
    return abs(float(predicted) - _log_error(of, end.last))


def _by_decay(of: Measure, end: RunSummary, ends: Sequence[RunSummary]) -> float:
    """Return how far the control's error times the mean factor of the other groups is off."""
    factor = fmean(_log_factor(of, other) for other in ends if other.group != end.group)
    return abs(factor - _log_factor(of, end))


def _log_factor(of: Measure, end: RunSummary) -> float:
    """Return the log of the annealed error over that of its control."""
    assert end.last is not None
    assert end.control is not None
    return _log_error(of, end.last) - _log_error(of, end.control)


def _log_error(of: Measure, row: Row) -> float:
    return math.log(row[of.column])


def _over_groups(differences: Sequence[float]) -> Estimate:
    """Return the mean over groups of runs, with the error that their spread shows."""
    error = stdev(differences) / math.sqrt(len(differences))
    return Estimate(fmean(differences), {"runs": Source(error, len(differences) - 1)})
