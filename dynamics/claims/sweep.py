"""Claims on the end of training: larger rates, averages, other methods, fewer bits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from math import comb, factorial, log2

import numpy as np
from numpy.typing import NDArray

from base.grouping import grouped
from base.statistics import holm
from dynamics.claims.data import replicated
from dynamics.claims.schedule import change, slope_over
from quant_eval.specs import parse_spec
from study.claims.finding import all_directed, bounded, directed, mean_of, times
from study.claims.verdict import (
    ALPHA,
    Evidence,
    Measure,
    NotTested,
    Replicates,
    Verdict,
    by_measure,
    claim,
    judged,
    measures,
    needed,
)
from study.measurements.quantization import CROSS_ENTROPY, ERRORS, QUANTIZED_LOSS
from study.measurements.titles import spec_title
from study.results.averages import Made, against_annealed, lowest_spec
from study.results.summary import RunSummary
from study.results.table import Row
from train.run.config import RunConfig

EQUAL_LOSS = 0.01  # of the loss: two losses are equal that differ by less
Pairing = Callable[[Iterable[float]], Iterable[tuple[float, float]]]


def _peak(end: RunSummary) -> float:
    assert isinstance(end.run, RunConfig)
    return end.run.optimizer.peak_lr


def _sweeps(measure: Measure) -> list[dict[float, list[Row]]]:
    """Return the ends of runs that differ in their peak alone: rows of each seed by rising peak."""
    groups = replicated(measure.evidence.ends, ("optimizer.peak_lr",))
    if not groups:
        raise NotTested("no two runs differ in their peak learning rate alone")
    sweeps = []
    for sets in groups.values():
        # Only peaks that every seed has, so that slopes are paired seed by seed.
        peaks = sorted(
            set.intersection(*({_peak(end) for end in ends_of_seed} for ends_of_seed in sets))
        )
        ends = {
            (seed, _peak(end)): end
            for seed, ends_of_seed in enumerate(sets)
            for end in ends_of_seed
        }
        sweeps.append(
            {peak: [measure.end(ends[seed, peak]) for seed in range(len(sets))] for peak in peaks}
        )
    return [sweep for sweep in sweeps if len(sweep) > 1]


def _slopes(sweep: dict[float, list[Row]]) -> Replicates:
    """Return the slope of the figure over log2 of the peak, of each seed."""
    by_seed = zip(*sweep.values(), strict=True)
    return [
        slope_over([(row, log2(peak)) for peak, row in zip(sweep, rows, strict=True)])
        for rows in by_seed
    ]


def _steps(sweeps: Sequence[dict[float, list[Row]]], pairs: Pairing) -> dict[str, Replicates]:
    """Return the change of the figure between pairs of peaks, from the lower to the higher."""
    return {
        f"{low:g} to {high:g}": list(map(change, sweep[low], sweep[high]))
        for sweep in sweeps
        for low, high in pairs(sweep)
    }


@claim(
    "peaks",
    "A larger peak rate leaves a smaller error",
    source="section 5.1, figure 23",
    needs="runs that differ in their peak learning rate alone",
)
@by_measure
def peaks(measure: Measure) -> Verdict:
    """Test the slope over log2 of the peak, seed by seed, and its steps from peak to peak.

    The unit is the run. With one seed it is that of Kendall's tau, where so many peaks can decide.
    """
    sweeps = _sweeps(measure)
    # The mean slope is the whole that decides, steps from peak to peak are its parts.
    slopes = [_slopes(sweep) for sweep in sweeps]
    steps, whole = _steps(sweeps, pairwise), mean_of(slopes)
    verdict = all_directed(measure, steps, "lower", whole, "steps of the peak", " per 2x")
    # This test stands in for seeds, where one sweep has runs enough for it to decide.
    if verdict.holds_seeds or len(sweeps) > 1 or _best_p(len(sweeps[0])) > ALPHA:
        return verdict
    tau, p = kendall(list(sweeps[0]), [rows[0][measure.column] for rows in sweeps[0].values()])
    outcome = verdict.outcome if p <= ALPHA else "not decided"
    words = f"Kendall's tau over the runs {tau:+.2f}, exact p {p:.2g}, which decides"
    return verdict._replace(outcome=outcome, p=p, statistic=f"{words}; {verdict.statistic}")


def _best_p(runs: int) -> float:
    """Return the smallest p-value that Kendall's tau can have over so many runs."""
    return 2 / factorial(runs)


@claim(
    "matched",
    "So it is at equal full-precision loss",
    source="section 5.1, figure 23",
    needs="runs that differ in their peak learning rate alone, two with the same loss",
)
@by_measure
def matched(measure: Measure) -> Verdict:
    """Compare pairs of peaks whose losses are shown to be equal by two one-sided tests."""
    of_loss = measure.by(figure=CROSS_ENTROPY)
    all_pairs = partial(combinations, r=2)
    losses = _steps(_sweeps(of_loss), all_pairs)
    pairs = _steps(_sweeps(measure), all_pairs)
    # Not to differ significantly is not enough: equality itself has to be shown.
    equal = {label: pairs[label] for label, loss in losses.items() if _is_equal(of_loss, loss)}
    what = f"of {len(pairs)} pairs of peaks, with losses within {EQUAL_LOSS:.0%} of each other"
    if not equal:
        raise NotTested(f"none {what} (two one-sided tests)")
    return all_directed(
        measure, equal, "lower", beside=f"{len(equal)} {what} (two one-sided tests)"
    )


def _is_equal(of_loss: Measure, change_of_loss: Replicates) -> bool:
    """Return whether the losses differ by less than a share of the first."""
    # The row with a negative weight is the first one: EQUAL_LOSS of its loss is the margin.
    first = [
        [(row, -EQUAL_LOSS * weight) for row, weight in change if weight < 0]
        for change in change_of_loss
    ]
    finding = bounded(of_loss, change_of_loss, first, two_sided=True)
    return finding.way == "within" and finding.p <= ALPHA


@claim(
    "averages",
    "Averages beat annealed weights",
    source="section 5, appendix C",
    needs="averages kept in training, or soups, of runs that anneal",
)
def averages(evidence: Evidence) -> list[Verdict]:
    """Compare averages of weights with the annealed weights of the same run, at the fewest bits."""
    spec = lowest_spec(evidence.study)
    return [
        judged(
            f"{title}: {figure.title} ({spec_title(spec)})",
            _averaged,
            Measure(evidence, spec, figure),
            average,
        )
        for title, average in against_annealed(evidence.study).items()
        for figure in (*ERRORS, QUANTIZED_LOSS)
    ]


def _averaged(measure: Measure, average: Made) -> Verdict:
    study, rows = measure.evidence.study, measure.evidence.rows
    averages = {(row["run"], row["step"]): row for row in rows if row["average"] == average.name}
    planned = [
        (end, averages.get(end_of_average))
        for end in measure.evidence.annealed
        if (end_of_average := average.end_of(study, end.run))
    ]
    if not planned:
        raise NotTested("no run that anneals has this average")
    parts: dict[str, Replicates] = {}
    for end, row in planned:
        averaged = needed(f"the average of {end.label}", row, measure.column)
        parts.setdefault(end.group, []).append(change(measure.end(end), averaged))
    return all_directed(measure, parts, "lower", beside="average minus annealed weights")


@claim(
    "methods",
    "Other methods order the runs alike",
    source="appendix A",
    needs="further methods at the end of two runs or more",
)
def methods(evidence: Evidence) -> list[Verdict]:
    """Test by every further method the pairs of runs that differ significantly by the first."""
    others = evidence.study.quantization.further
    return [
        judged(measure.title, _same_order, measure)
        for spec in others
        for measure in measures(evidence, [spec])
    ]


def _same_order(measure: Measure) -> Verdict:
    by_first = measure.by(spec=measure.evidence.study.quantization.specs[0])
    title = spec_title(by_first.spec)
    groups = measure.evidence.groups
    if len(groups) < 2:
        raise NotTested("the study has a single run")
    # the difference between two groups of runs, seed by seed
    pairs = {}
    for first, second in combinations(groups, 2):
        ends = zip(groups[first], groups[second], strict=False)
        pairs[f"{first} and {second}"] = [
            change(by_first.end(low, measure.column), by_first.end(high, measure.column))
            for low, high in ends
        ]

    findings = {label: directed(by_first, pair) for label, pair in pairs.items()}
    p_values = holm([finding.p for finding in findings.values()])
    # those that the first method shows, turned so that it says "higher"
    apart = {
        label: [times(1 if findings[label].way == "higher" else -1, pair) for pair in pairs[label]]
        for label, p in zip(findings, p_values, strict=True)
        if p <= ALPHA
    }
    if not apart:
        words = f"by {title}, none of {len(findings)} pairs differs significantly itself"
        return Verdict("not decided", words)
    beside = f"the pairs of {len(pairs)} that differ significantly by {title}, in its direction"
    return all_directed(measure, apart, "higher", beside=beside)


@claim(
    "bits",
    "Fewer bits cost more",
    source="appendix E.4, figure 23",
    needs="a method at two widths",
)
def bits(evidence: Evidence) -> list[Verdict]:
    """Compare each method at several widths with itself, the lower width with the next."""
    by_method = grouped(
        evidence.study.quantization.at_the_end,
        # Specs of one method differ in the width alone, which their names hold as -bN.
        lambda spec: spec.replace(f"-b{parse_spec(spec).bits}", ""),
    )
    verdicts = []
    for specs in by_method.values():
        for low, high in pairwise(sorted(specs, key=lambda spec: parse_spec(spec).bits)):
            for measure in measures(evidence, [low]):
                title = f"{measure.title[:-1]}, against {parse_spec(high).bits} bits)"
                verdicts.append(judged(title, _fewer_bits, measure, high))
    return verdicts


def _fewer_bits(measure: Measure, high: str) -> Verdict:
    parts = {
        label: [[(measure.end(end, measure.by(spec=high).column), 1.0)] for end in ends]
        for label, ends in measure.evidence.groups.items()
    }
    return all_directed(replace(measure, minus=high), parts, "higher")


# All of them up to 8 runs, a draw of as many beyond; a draw's p-value is not below its reciprocal.
PERMUTATIONS = 50_000


def kendall(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return Kendall's tau (1938), concordant minus discordant over all pairs, and its p-value.

    The p-value is the share of the orders of the runs, were the second
    independent of the first, that give a tau as far from 0. Its unit is the run: it holds for other
    runs of the same settings, where a comparison paired over documents holds for other documents.

    Args:
        first: a value of each run.
        second: another value of each, in the same order.

    Example: two of the 24 orders of four runs have a tau of 1 or -1.
        >>> tau, p_value = kendall([1, 2, 3, 4], [10, 20, 30, 40])
        >>> tau, round(p_value, 4)
        (1.0, 0.0833)
    """
    from scipy.stats import permutation_test  # takes half a second, for one claim

    # All pairs i < j; with the signs of `first` a product is 1 where the pair is concordant.
    i, j = np.triu_indices(len(first), 1)
    sign_P = np.sign(np.subtract(np.take(first, j), np.take(first, i)))

    def tau(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        # permutation_test passes whole batches of permutations and names the axis of the runs.
        moved = np.moveaxis(values, axis, -1)
        signs = np.sign(moved[..., j] - moved[..., i]) @ sign_P
        return np.asarray(signs / comb(len(first), 2), dtype=np.float64)

    result = permutation_test(
        (np.asarray(second, dtype=np.float64),),
        tau,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
    return float(result.statistic), float(result.pvalue)
