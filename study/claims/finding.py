"""Findings, and the verdict on a claim that follows from those of its runs.

A claim is judged by a quantity over all runs, the whole, and its parts: groups of runs that differ
in their seed alone, or steps of a sweep. It is decided where the whole is significant and no part
is significantly the other way, by Holm's correction over the parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from base.statistics import holm
from quant_eval.estimate import Estimate
from study.claims.verdict import ALPHA, Measure, NotTested, Outcome, Replicates, Verdict
from study.results.paired import Weighted, runs_of
from study.results.summary import enumeration, left_out


class Finding(NamedTuple):
    """One test.

    Attributes:
        way: that the data point: 'higher', 'within'.
        p: p-value of the opposite.
        words: the estimate with its interval.
        holds_zero: the interval holds 0; False where the test is not one of 0.
    """

    way: str
    p: float
    words: str
    holds_zero: bool = False


def times(factor: float, weighted: Weighted) -> Weighted:
    """Return the same sum times a factor."""
    return [(row, factor * weight) for row, weight in weighted]


def combined(factors: Sequence[tuple[float, Replicates]]) -> Replicates:
    """Return a weighted sum of quantities, seed by seed; of the seeds that all of them have.

    Raises:
        NotTested: no seed has all of them.
    """
    seeds = dict.fromkeys(seed for _, replicates in factors for seed in replicates)
    shared = [seed for seed in seeds if all(seed in replicates for _, replicates in factors)]
    if not shared:
        raise NotTested("no seed has all the runs that are compared, which are paired by seed")
    return {
        seed: [
            weighted
            for factor, replicates in factors
            for weighted in times(factor, replicates[seed])
        ]
        for seed in shared
    }


def mean_of(parts: Sequence[Replicates]) -> Replicates:
    """Return the mean of some quantities, seed by seed."""
    return combined([(1 / len(parts), part) for part in parts])


def unpaired(measure: Measure, *wholes: Replicates) -> str:
    """Return in words the runs that these leave out, without a partner of their seed."""
    used = {run for whole in wholes for run in runs_of(whole.values())}
    return left_out(measure.evidence.ends, used)


def directed(measure: Measure, replicates: Replicates) -> Finding:
    """Test a quantity against 0, two-sided."""
    estimate = measure.estimate(replicates)
    way, p = "higher" if estimate.value > 0 else "lower", estimate.p_value()
    return Finding(way, p, measure.effect(estimate), holds_zero=p > ALPHA)


def bounded(
    measure: Measure, change: Replicates, margin: Replicates, *, two_sided: bool
) -> Finding:
    """Test that a change is within a margin, or beyond it, whichever way the data point.

    Within: two one-sided tests (Schuirmann 1987), or the upper one alone. Beyond: above 0 and above
    the margin, where the data chose the sign with p-values of both sides. The largest p-value
    decides without a further correction (Berger 1982, intersection-union test).
    """
    estimate, bound = measure.estimate(change), measure.estimate(margin)
    words = f"{measure.effect(estimate)}, margin {measure.effect(bound)}"
    # For the test beyond the margin a change below 0 is turned around.
    sign = -1.0 if two_sided and estimate.value < 0 else 1.0

    def p_above(*terms: tuple[float, Replicates]) -> float:
        contrast = measure.estimate(combined(terms))
        # One-sided by half of the two-sided p where the sign fits, the rest of 1 elsewhere.
        half = contrast.p_value() / 2
        return half if contrast.value > 0 else 1 - half

    # The point estimates choose which of the two is tested.
    if sign * estimate.value <= bound.value:
        sides = (-1.0, 1.0) if two_sided else (-1.0,)
        return Finding("within", max(p_above((1, margin), (side, change)) for side in sides), words)
    # Beyond takes both: above 0, and above a margin that may itself be negative.
    one_sided = max(p_above((sign, change)), p_above((sign, change), (-1, margin)))
    return Finding("beyond", min(1.0, (2 if two_sided else 1) * one_sided), words)


def conclude(
    measure: Measure,
    whole: tuple[Finding, Estimate],
    parts: Mapping[str, Finding],
    claimed: str,
    beside: Iterable[str] = (),
    unit: str = "",
    are_unlike: bool = False,
) -> Verdict:
    """Return the verdict on a claim that the whole is `claimed`; `beside` is said with it.

    Of unlike parts, those that show nothing by themselves speak against a supported whole: it may
    be that of another one.
    """
    finding, estimate = whole
    adjusted = dict(zip(parts, holm([part.p for part in parts.values()]), strict=True))
    # Parts that point the other way, the most significant first: it is shown as evidence.
    others = sorted(
        (label for label, part in parts.items() if part.way != finding.way),
        key=adjusted.__getitem__,
    )
    outcome: Outcome = "supported" if finding.way == claimed else "contradicted"
    if finding.p > ALPHA or any(adjusted[label] <= ALPHA for label in others):
        # Also if one part is significantly the other way: then there is no single answer.
        outcome = "not decided"
    against = f"{others[0]}: {parts[others[0]].way}, {parts[others[0]].words}" if others else ""
    if are_unlike and outcome == "supported" and not others:
        against = "; ".join(
            f"{label}: not significant by itself, {part.words}"
            for label, part in parts.items()
            if adjusted[label] > ALPHA
        )
    each = [
        f"{label}: {part.way}, {part.words}, Holm p {adjusted[label]:.2g}"
        for label, part in parts.items()
    ]
    head = f"in {measure.unit}: " if measure.unit else ""
    mean = f"{head}mean {finding.words}{unit}, p {finding.p:.2g}"
    said = [mean, *each, *beside, measure.sources(estimate)]
    effect = f"{measure.effect(estimate)}{unit}"
    return Verdict(
        outcome,
        "; ".join(filter(None, said)),
        effect,
        finding.p,
        f"{len(parts) - len(others)} of {len(parts)} {finding.way}",
        against,
        estimate.holds_seeds,
        why="" if outcome == "not decided" or against else _why(measure, effect, parts),
    )


def _why(measure: Measure, effect: str, parts: Mapping[str, Finding]) -> str:
    """Return a sentence on the parts that are not significant alone where the whole is decided.

    'Peak learning rate 0.012 alone shows nothing: 0.52 [-0.1, 1.14], which holds 0. ...'
    """
    weak = {label: part for label, part in parts.items() if part.p > ALPHA}
    if not weak or len(parts) < 2:
        return ""
    unit = f" x {measure.unit}" if measure.unit else ""
    study = measure.evidence.study
    name = study.heading if parts.keys() <= {group.label for group in study.groups} else ""
    alone = "; ".join(
        f"{label} alone shows nothing, {part.words}{' holds 0' if part.holds_zero else ''}"
        for label, part in weak.items()
    )
    together = "both" if len(parts) == 2 else f"all {len(parts)}"
    words = f"{name} {alone}".strip()
    return (
        f"{words[0].upper()}{words[1:]}. The verdict is on the mean over"
        f" {enumeration([*parts])}, {effect}{unit}: {together} together have more data."
    )


def conclude_within(
    measure: Measure,
    changes: Mapping[str, Replicates],
    margins: Mapping[str, Replicates],
    *,
    two_sided: bool,
    beside: str,
) -> Verdict:
    """Return the verdict on a mean change against its mean margin, and group by group beside it."""
    parts = {
        label: bounded(measure, changes[label], margins[label], two_sided=two_sided)
        for label in changes
    }
    whole, margin = (mean_of(list(each.values())) for each in (changes, margins))
    finding = bounded(measure, whole, margin, two_sided=two_sided)
    said = [beside, unpaired(measure, whole, margin)]
    return conclude(measure, (finding, measure.estimate(whole)), parts, "within", said)


def of_groups[T](
    groups: Mapping[str, Sequence[T]], contrast: Callable[[Sequence[T]], Replicates]
) -> tuple[dict[str, Replicates], str]:
    """Return the quantity of each group that has one, and in words why others have none.

    Raises:
        NotTested: none has one.
    """
    parts, reasons = dict[str, Replicates](), list[str]()
    for label, group in groups.items():
        try:
            parts[label] = contrast(group)
        except NotTested as reason:
            reasons.append(f"{label}: {reason}")
    if not parts:
        raise NotTested("; ".join(reasons))
    return parts, f"left out: {'; '.join(reasons)}" if reasons else ""


def all_directed(
    measure: Measure,
    parts: Mapping[str, Replicates],
    claimed: str,
    whole: Replicates | None = None,
    beside: str = "",
    unit: str = "",
    are_unlike: bool = False,
) -> Verdict:
    """Judge quantities that are claimed to be 'higher' or 'lower' than 0; their mean, or `whole`.

    `unit` follows the effect in words; `are_unlike` as in `conclude`.
    """
    whole = whole or mean_of(list(parts.values()))
    findings = {label: directed(measure, part) for label, part in parts.items()}
    return conclude(
        measure,
        (directed(measure, whole), measure.estimate(whole)),
        findings,
        claimed,
        [beside, unpaired(measure, whole)],
        unit,
        are_unlike,
    )
