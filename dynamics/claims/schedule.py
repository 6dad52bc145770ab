"""Claims on the learning rate along a run: flat while it is high, a surge when it decays.

What the anneal does is the difference from the control, the same run at equal tokens without it. A
released trajectory has none: there it is the change of slope in log tokens where the decay starts,
and a rise counts if the error is also above a power law, which growth by tokens alone may follow.
The unit is the training: runs that differ in their seed alone are one, and so are the anneals of a
released model, which share their first part.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import log, log2

import numpy as np

from base.grouping import grouped
from base.quantities import MILLI, significant, with_interval
from quant_eval.estimate import Estimate
from study.claims.finding import (
    Finding,
    conclude,
    conclude_within,
    directed,
    mean_of,
    times,
    unpaired,
)
from study.claims.verdict import (
    Measure,
    NotTested,
    Replicates,
    Verdict,
    by_measure,
    claim,
    needed,
)
from study.measurements.quantization import CROSS_ENTROPY
from study.results.paired import Weighted
from study.results.summary import RunSummary, at_high_rate, lineage
from study.results.table import Row, trained
from train.run.config import RunConfig

# An error is called flat if all tokens of the phase change it by at most this share of what the
# anneal does.
MARGIN = 0.25
# Checkpoints of a released training at the high rate and in the decay that a trend goes through,
# and that show its scatter: one more than the line has parameters there.
TREND, SCATTER = 2, (3, 2)
Contrast = Callable[[RunSummary], Weighted]
Test = Callable[[Measure, Replicates], Finding]


def slope_over(placed: Sequence[tuple[Row, float]]) -> Weighted:
    """Return the weights of the rows in the slope of least squares over their places."""
    mean = sum(x for _, x in placed) / len(placed)
    # The slope sum((x - mean) y) / sum((x - mean)^2) is linear in y: these are its weights.
    spread = sum((x - mean) ** 2 for _, x in placed)
    return [(row, (x - mean) / spread) for row, x in placed]


def slope_over_tokens(rows: Sequence[Row]) -> Weighted:
    """Return the weights of the rows in the slope over log2 of their tokens."""
    return slope_over([(row, log2(row["tokens"])) for row in rows])


def growth_over(rows: Sequence[Row]) -> Weighted:
    """Return the weights of the rows in slope x span: the change over all their tokens, by trend.

    The slope is that of least squares over log2 of the tokens, the span their doublings.
    """
    return times(doublings(rows), slope_over_tokens(rows))


def doublings(rows: Sequence[Row]) -> float:
    """Return how often the tokens double from the first to the last of these rows.

    Example:
        >>> doublings([{"tokens": 100}, {"tokens": 200}, {"tokens": 400}])
        2.0
    """
    tokens = [row["tokens"] for row in rows]
    return log2(max(tokens) / min(tokens))


def change(first: Row, last: Row) -> Weighted:
    """Return the weights of last - first."""
    return [(last, 1.0), (first, -1.0)]


def annealed(measure: Measure, *others: str) -> list[RunSummary]:
    """Return the ends of a decay that have something to be compared with.

    Raises:
        NotTested: there are none, or a control is not measured.
    """
    study = measure.evidence.study
    ends = measure.evidence.annealed
    if not ends:
        raise NotTested("no run's learning rate decays after a checkpoint at a higher one")
    kept = [end for end in ends if not isinstance(end.run, RunConfig) or study.control_of(end.run)]
    if not kept:
        raise NotTested("no annealed run has a control: the same run at equal tokens, not annealed")
    kept = [end for end in kept if isinstance(end.run, RunConfig) or _has_trend(measure, end)]
    if not kept:
        raise NotTested("no run has two checkpoints at a high learning rate before it decays")
    for end in kept:
        measure.end(end, *others)
        if isinstance(end.run, RunConfig):
            needed(f"the control of {end.label}", end.control, measure.column, *others)
    return kept


def effect_of_anneal(measure: Measure, end: RunSummary) -> Weighted:
    """Return the weights of the rows in what the anneal of a run does to its error."""
    if isinstance(end.run, RunConfig):
        return change(
            needed(f"the control of {end.label}", end.control, measure.column), measure.end(end)
        )
    return above_trend(_stable(measure, end), _decaying(measure, end))


def above_trend(stable: Sequence[Row], decaying: Sequence[Row]) -> Weighted:
    """Return the weights of the rows in how far the end is above the trend of the stable phase.

    It is the change of slope in a fit of two lines over log2 of the tokens, which meet where the
    decay starts, times the doublings in the decay.
    """
    # Without a control, of released models, the trend of the phase stands in for it.
    rows, start = [*stable, *decaying], log2(stable[-1]["tokens"])
    places = np.array([log2(row["tokens"]) for row in rows])
    beyond = np.maximum(places - start, 0)
    # Row 2 of the pseudoinverse gives the change of slope as a weighted sum of the errors.
    weights = np.linalg.pinv(np.stack([np.ones_like(places), places, beyond], axis=1))[2]
    return [(row, float(weight * beyond.max())) for row, weight in zip(rows, weights, strict=True)]


def _stable(measure: Measure, end: RunSummary) -> list[Row]:
    """Return the rows at the high rate, on to the control's where there is one."""
    kept = _at_high_rate(measure, end)
    if len({row["tokens"] for row in kept}) < TREND:
        raise NotTested("no run has two checkpoints at a high learning rate before it decays")
    return [needed(f"{end.label}, step {row['step']}", row, measure.column) for row in kept]


def _has_trend(measure: Measure, end: RunSummary) -> bool:
    return len({row["tokens"] for row in _at_high_rate(measure, end)}) >= TREND


def _at_high_rate(measure: Measure, end: RunSummary) -> list[Row]:
    study, rows = measure.evidence.study, measure.evidence.rows
    control = study.control_of(end.run) if isinstance(end.run, RunConfig) else None
    first = needed(f"{end.label} before the decay", end.first)
    last = end.control or first
    # tokens count on from stage to stage, steps may not
    high = [row for row in at_high_rate(lineage(study, rows, control or end.run)) if row["tokens"]]
    # Up to where the control is measured: the phase and the anneal end at equal tokens.
    return [row for row in high if row["tokens"] <= (last["tokens"] or 0)]


def _decaying(measure: Measure, end: RunSummary) -> list[Row]:
    """Return the rows of a released training after the last one at the high rate."""
    first = needed(f"{end.label} before the decay", end.first)
    path = trained(lineage(measure.evidence.study, measure.evidence.rows, end.run))
    later = [row for row in path if row["tokens"] and row["tokens"] > (first["tokens"] or 0)]
    return [row for row in later if row[measure.column] is not None]


def left_open(measure: Measure, ends: Sequence[RunSummary]) -> str:
    """Return in a sentence what the few checkpoints of released trainings leave open; '' for none.

    `ends` are those that are tested.
    """
    released = [end for end in measure.evidence.annealed if not isinstance(end.run, RunConfig)]
    few = []
    for model, of_model in grouped(released, unit_of).items():
        high = min(len(_at_high_rate(measure, end)) for end in of_model)
        decaying = min(len(_decaying(measure, end)) for end in of_model)
        if high < SCATTER[0] or decaying < SCATTER[1]:
            left_out = "" if any(end in ends for end in of_model) else " and is left out"
            few.append(f"{model} has {high} and {decaying}{left_out}")
    if not few:
        return ""
    return (
        f"below {SCATTER[0]} checkpoints at the high rate or {SCATTER[1]} in the decay it stays"
        f" open how far single ones scatter about the trend: {', '.join(few)}"
    )


def unit_of(end: RunSummary) -> str:
    """Return the label of the training that an end belongs to: its group, or its released model."""
    return end.group if isinstance(end.run, RunConfig) else end.run.model


def by_group(contrast: Contrast, ends: Sequence[RunSummary]) -> dict[str, Replicates]:
    """Return a contrast of each training by its label, seed by seed; see `unit_of`."""
    groups = grouped(ends, unit_of)
    return {label: _by_seed(contrast, group) for label, group in groups.items()}


def _by_seed(contrast: Contrast, ends: Sequence[RunSummary]) -> Replicates:
    """Return the contrast of each seed: of several anneals of a released model their mean."""
    return {
        seed: [part for end in alike for part in times(1 / len(alike), contrast(end))]
        for seed, alike in grouped(ends, lambda end: end.seed).items()
    }


def reach(values: Iterable[float]) -> str:
    """Return the least and the largest of some values in two digits, as one where they are alike.

    >>> reach([1.4142, 1.4, 0.5]), reach([1.4142, 1.41])
    ('0.5 to 1.4', '1.4')
    """
    ends = [f"{end(values):.2g}" for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


@claim(
    "flat",
    "The error stays flat while the rate is high",
    figure="kl_divergence",
    source="abstract, figure 1",
    needs="two checkpoints at a high rate, and annealed weights, with their control unless they are"
    " released",
)
@by_measure
def flat(measure: Measure) -> Verdict:
    """Compare the change over the whole phase with a share of what the anneal does."""
    ends = annealed(measure)
    changes = by_group(lambda end: growth_over(_stable(measure, end)), ends)
    margins = by_group(lambda end: times(MARGIN, effect_of_anneal(measure, end)), ends)
    spans = [doublings(_stable(measure, end)) for end in ends]
    beside = (
        f"slope x span over {reach(spans)} doublings of the tokens; the margin is {MARGIN:g} of"
        " what the anneal does; two one-sided tests"
    )
    said = "; ".join(filter(None, [beside, left_open(measure, ends)]))
    return conclude_within(measure, changes, margins, two_sided=True, beside=said)


@claim(
    "surge",
    "The error surges when the rate decays",
    figure="anneal_against_control",
    source="abstract, figure 1, appendix E.4",
    needs="annealed weights, and the same run at equal tokens without the anneal, or of a released"
    " model two checkpoints at a high rate",
)
@by_measure
def surge(measure: Measure) -> Verdict:
    """Compare annealed with not annealed weights at equal tokens, the growth by data beside it."""
    ends = annealed(measure)
    beside = "above the trend in log tokens, and above a power law of the tokens"
    if isinstance(ends[0].run, RunConfig):
        beside = "annealed minus control at equal tokens"
        controls = [(end, end.control) for end in ends if end.control]
        if all(end.first and end.first.get(measure.column) is not None for end, _ in controls):
            grown = by_group(
                lambda end: change(measure.before(end), needed("", end.control)),
                [end for end, _ in controls],
            )
            growth = measure.estimate(mean_of(list(grown.values())))
            beside += f"; by data alone, control minus before the anneal: {measure.effect(growth)}"
    parts = by_group(lambda end: effect_of_anneal(measure, end), ends)
    whole, test = mean_of(list(parts.values())), _test_of(ends)
    return conclude(
        measure,
        (test(measure, whole), measure.estimate(whole)),
        {label: test(measure, part) for label, part in parts.items()},
        "higher",
        [beside, left_open(measure, ends), unpaired(measure, whole)],
    )


def _test_of(ends: Sequence[RunSummary]) -> Test:
    """Return the test of what the anneals of runs do: against controls, else against trends."""
    return directed if isinstance(ends[0].run, RunConfig) else beyond_trends


def beyond_trends(measure: Measure, contrast: Replicates) -> Finding:
    """Test a change of slope of the error over log tokens, and that of its logarithm.

    Growth by tokens alone may be linear in their logarithm, or a power law, whose slope rises by
    itself. An end between the two trends is neither higher nor lower. The larger p-value decides
    (Berger 1982, intersection-union test).

    Raises:
        NotTested: an error is not above 0, and has no logarithm.
    """
    linear, in_logs = directed(measure, contrast), _in_logarithms(measure, contrast)
    low, high = in_logs.interval()
    words = f"{linear.words}, log {with_interval(in_logs.value, low, high)}"
    way = "higher" if in_logs.value > 0 else "lower"
    if way != linear.way:
        return Finding("between the trends", 1.0, words)
    return Finding(way, max(linear.p, in_logs.p_value()), words)


def _in_logarithms(measure: Measure, contrast: Replicates) -> Estimate:
    """Return the same sum of the logarithms of the errors, its error by their linear part."""
    parts = [part for weighted in contrast.values() for part in weighted]
    if any(row[measure.column] <= 0 for row, _ in parts):
        raise NotTested("an error is not above 0, so that no power law of the tokens fits it")
    # d log e = de / e, with which the error of a sum of logarithms is that of a sum of errors
    linear: Replicates = {
        seed: [(row, weight / row[measure.column]) for row, weight in weighted]
        for seed, weighted in contrast.items()
    }
    value = sum(weight * log(row[measure.column]) for row, weight in parts) / len(contrast)
    return replace(measure.estimate(linear), value=value)


@claim(
    "divergence",
    "The decay lowers the loss, raises the error",
    figure="losses",
    source="abstract",
    needs="annealed weights, and the same run at equal tokens without the anneal, or of a released"
    " model two checkpoints at a high rate",
)
@by_measure
def divergence(measure: Measure) -> Verdict:
    """Compare both with the control: the full-precision loss falls, and the error rises.

    The larger p-value decides (Berger 1982, intersection-union test).
    """
    of_loss = measure.by(figure=CROSS_ENTROPY)
    ends = annealed(measure, of_loss.column)
    contrasts = by_group(lambda end: effect_of_anneal(measure, end), ends)
    test = _test_of(ends)
    parts = {label: _parted(of_loss, measure, part, test) for label, part in contrasts.items()}
    whole = mean_of(list(contrasts.values()))
    verdict = conclude(
        measure,
        (_parted(of_loss, measure, whole, test), measure.estimate(whole)),
        parts,
        "apart",
        [left_open(measure, ends), unpaired(measure, whole)],
    )
    loss = MILLI * of_loss.estimate(whole).value
    return verdict._replace(effect=f"{verdict.effect}, loss {significant(loss)}")


def _parted(of_loss: Measure, measure: Measure, contrast: Replicates, test: Test) -> Finding:
    loss, error = directed(of_loss, contrast), test(measure, contrast)
    # The claim takes both: the loss falls and the error rises.
    way = "apart" if (loss.way, error.way) == ("lower", "higher") else "not apart"
    # Beside a share the loss has its own unit; beside nats both have that of the line.
    unit = "" if measure.unit else f" {of_loss.unit}"
    return Finding(way, max(loss.p, error.p), f"loss {loss.words}{unit}, error {error.words}")
