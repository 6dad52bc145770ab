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
from study.claims.finding import all_directed, bounded, combined, directed, mean_of
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
Sweep = dict[float, dict[int | None, Row]]  # the ends by peak and seed
Pairing = Callable[[Iterable[float]], Iterable[tuple[float, float]]]


def _peak(end: RunSummary) -> float:
    assert isinstance(end.run, RunConfig)
    return end.run.optimizer.peak_lr


def _swept(measure: Measure) -> list[dict[int | None, dict[float, RunSummary]]]:
    """Return the ends of runs that differ in their peak alone, by seed and peak."""
    groups = replicated(measure.evidence.ends, ("optimizer.peak_lr",)).values()
    return [
        {seed: {_peak(end): end for end in ends} for seed, ends in sets.items()} for sets in groups
    ]


def _sweeps(measure: Measure) -> list[Sweep]:
    """Return the ends of runs that differ in their peak alone: rows of each seed by rising peak."""
    groups = _swept(measure)
    if not groups:
        raise NotTested("no two runs differ in their peak learning rate alone")
    sweeps = []
    for by_seed in groups:
        # Only peaks that every seed has, so that slopes are paired seed by seed.
        peaks = sorted(set.intersection(*map(set, by_seed.values())))
        sweeps.append(
            {
                peak: {seed: measure.end(ends[peak]) for seed, ends in by_seed.items()}
                for peak in peaks
            }
        )
    return [sweep for sweep in sweeps if len(sweep) > 1]


def _peaks_left_out(measure: Measure) -> str:
    """Return in words the peaks that `_sweeps` leaves out; empty for none."""
    lacking = {
        peak
        for by_seed in _swept(measure)
        for peak in set[float]().union(*by_seed.values())
        if not all(peak in ends for ends in by_seed.values())
    }
    names = ", ".join(f"{peak:g}" for peak in sorted(lacking))
    return f"left out, which not every seed has: {names}" if lacking else ""


def _slopes(sweep: Sweep) -> Replicates:
    """Return the slope of the figure over log2 of the peak, of each seed."""
    seeds = next(iter(sweep.values()))
    return {
        seed: slope_over([(rows[seed], log2(peak)) for peak, rows in sweep.items()])
        for seed in seeds
    }


def _steps(sweeps: Sequence[Sweep], pairs: Pairing) -> dict[str, Replicates]:
    """Return the change of the figure between pairs of peaks, from the lower to the higher."""
    return {
        f"{low:g} to {high:g}": {
            seed: change(row, sweep[high][seed]) for seed, row in sweep[low].items()
        }
        for sweep in sweeps
        for low, high in pairs(sweep)
    }


@claim(
    "peaks",
    "A larger peak rate leaves a smaller error",
    figure="ends",
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
    beside = "; ".join(filter(None, ["steps of the peak", _peaks_left_out(measure)]))
    verdict = all_directed(measure, steps, "lower", whole, beside, " per 2x")
    # This test stands in for seeds, where one sweep has runs enough for it to decide.
    if verdict.holds_seeds or len(sweeps) > 1 or _best_p(len(sweeps[0])) > ALPHA:
        return verdict
    ends = [row for rows in sweeps[0].values() for row in rows.values()]  # of the only seed
    tau, p = kendall(list(sweeps[0]), [row[measure.column] for row in ends])
    outcome = verdict.outcome if p <= ALPHA else "not decided"
    words = f"Kendall's tau over the runs {tau:+.2f}, exact p {p:.2g}, which decides"
    return verdict._replace(outcome=outcome, p=p, statistic=f"{words}; {verdict.statistic}")


def _best_p(runs: int) -> float:
    """Return the smallest p-value that Kendall's tau can have over so many runs."""
    return 2 / factorial(runs)


@claim(
    "matched",
    "So it is at equal full-precision loss",
    figure="full_against_quantized",
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
    said = [f"{len(equal)} {what} (two one-sided tests)", _peaks_left_out(measure)]
    return all_directed(measure, equal, "lower", beside="; ".join(filter(None, said)))


def _is_equal(of_loss: Measure, change_of_loss: Replicates) -> bool:
    """Return whether the losses differ by less than a share of the first."""
    # The row with a negative weight is the first one: EQUAL_LOSS of its loss is the margin.
    first = {
        seed: [(row, -EQUAL_LOSS * weight) for row, weight in change if weight < 0]
        for seed, change in change_of_loss.items()
    }
    finding = bounded(of_loss, change_of_loss, first, two_sided=True)
    return finding.way == "within" and finding.p <= ALPHA


@claim(
    "averages",
    "Averages beat annealed weights",
    figure="averages",
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
        parts.setdefault(end.group, {})[end.seed] = change(measure.end(end), averaged)
    return all_directed(measure, parts, "lower", beside="average minus annealed weights")


@claim(
    "methods",
    "Other methods order the runs alike",
    figure="methods",
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
    ends: dict[str, Replicates] = {
        label: {end.seed: [(by_first.end(end, measure.column), 1.0)] for end in group}
        for label, group in groups.items()
    }
    pairs = {
        f"{first} and {second}": combined([(1.0, ends[second]), (-1.0, ends[first])])
        for first, second in combinations(ends, 2)
    }

    findings = {label: directed(by_first, pair) for label, pair in pairs.items()}
    p_values = holm([finding.p for finding in findings.values()])
    # those that the first method shows, turned so that it says "higher"
    apart = {
        label: combined([(1 if findings[label].way == "higher" else -1, pairs[label])])
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
    figure="kl_divergence",
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
        label: {end.seed: [(measure.end(end, measure.by(spec=high).column), 1.0)] for end in ends}
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
