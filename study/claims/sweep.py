"""Claims on the end of training: larger rates, averages, other methods, fewer bits."""

from itertools import combinations, pairwise
from math import log2

from base.statistics import holm
from quant_eval.specs import parse_spec
from study.claims.data import Chosen, alike
from study.claims.permutation import kendall
from study.claims.schedule import slope_over
from study.claims.verdict import (
    FIGURES,
    NAMES,
    SIGNIFICANT,
    Evidence,
    NotTested,
    Pairs,
    Verdict,
    all_claimed,
    by_measure,
    claim,
    counted,
    decided,
    end_of,
    estimated,
    judged,
    measure_of,
    outcome_of,
    spread,
    way_of,
)
from study.measurements.titles import spec_title
from study.results.averages import Made, against_annealed, average_pairs, lowest_spec
from study.results.summary import RunSummary
from train.run.config import RunConfig

NO_WORSE = 0.01  # of the loss: a larger rate's may be above the other's by so much, and is no worse


def _peak(end: RunSummary) -> float:
    assert isinstance(end.run, RunConfig)
    return end.run.optimizer.peak_lr


def _sweeps(evidence: Evidence) -> list[Chosen]:
    """Groups of runs that differ in their peak learning rate alone, by rising peak."""
    groups = alike(evidence.ends, ("optimizer.peak_lr",))
    if not groups:
        raise NotTested("no two runs differ in their peak learning rate alone")
    return [sorted(group, key=_peak) for group in groups]


def _pairs(groups: list[Chosen], *columns: str) -> Pairs:
    """Pairs by 'lower peak vs higher peak': their last weights."""
    return {
        f"{first.label} vs {second.label}": (end_of(first, *columns), end_of(second, *columns))
        for group in groups
        for first, second in combinations(group, 2)
    }


@claim(
    40,
    "peaks",
    "The larger the peak learning rate, the smaller the error at the end of training.",
    source="section 5.1, figure 23",
    needs="runs that differ in their peak learning rate alone",
)
@by_measure
def peaks(evidence: Evidence, spec: str, figure: str) -> Verdict:
    """Test the slope over log2 of the peak, every pair of peaks, and the order of the runs.

    Supported where every slope is significantly below 0 and no pair significantly the other way;
    contradicted likewise.
    """
    groups, column = _sweeps(evidence), f"quant/{spec}/{figure}"
    slopes, parts = [], []
    for group in groups:
        found = [(end_of(end, column), log2(_peak(end))) for end in group]
        slopes.append(evidence.contrast(spec, figure, slope_over(found)))
        tau, p = kendall([place for _, place in found], [row[column] for row, _ in found])
        parts.append(
            f"{len(found)} runs: {estimated(slopes[-1], figure)} per doubling of the peak;"
            f" Kendall's tau over the runs {tau:+.2f}, exact p {p:.2g}"
        )
    adjusted = holm([one.p_value() for one in slopes])
    ways = [way_of(one.value, p) for one, p in zip(slopes, adjusted, strict=True)]
    by_slope = outcome_of(ways, "lower")
    pairs = evidence.compared(_pairs(groups), figure, spec)
    against = {"supported": "higher", "contradicted": "lower"}.get(by_slope)
    outcome = "not decided" if against in [one.verdict for one in pairs.values()] else by_slope
    words = (
        f"{'; '.join(parts)} (slopes paired over documents, Holm);"
        f" {counted(pairs, 'lower', figure, 'pairs')}"
    )
    effect = f"{spread([one.value for one in slopes], figure)} per doubling of the peak"
    return Verdict(outcome, words, effect)


@claim(
    50,
    "matched",
    "That holds where the larger rate costs no full-precision loss.",
    source="section 5.1, figure 23",
    needs="runs that differ in their peak learning rate alone, two with about the same loss",
)
@by_measure
def matched(evidence: Evidence, spec: str, figure: str) -> Verdict:
    """Compare pairs in which the larger peak's loss is significantly not above by NO_WORSE."""
    columns = [f"quant/{spec}/{name}" for name in (figure, "cross_entropy")]
    pairs = _pairs(_sweeps(evidence), *columns)
    losses = evidence.compared(pairs, "cross_entropy", spec)
    chosen = {
        label: pairs[label]
        for label, loss in losses.items()
        if loss.difference.high <= NO_WORSE * loss.first_value
    }
    what = (
        f"pairs of {len(pairs)} in which the larger peak's loss is at most {NO_WORSE:.0%} above the"
        " other's"
    )
    if not chosen:
        raise NotTested(f"no {what}: the interval of each paired difference reaches beyond")
    return all_claimed(evidence.compared(chosen, figure, spec), "lower", figure, what)


@claim(
    60,
    "averages",
    "Averages of weights quantize better than the annealed weights.",
    source="section 5, appendix C",
    needs="averages kept in training, or soups, of runs that anneal",
)
def averages(evidence: Evidence) -> list[Verdict]:
    """Compare averages of weights with the annealed weights of the same run, at the fewest bits."""
    title = spec_title(lowest_spec(evidence.study))
    return [
        judged(f"{of}: {name} ({title})", _averaged, evidence, average, figure)
        for of, average in against_annealed(evidence.study).items()
        for figure, name in NAMES.items()
    ]


def _averaged(evidence: Evidence, average: Made, figure: str) -> Verdict:
    study, spec = evidence.study, lowest_spec(evidence.study)
    wanted = [end.label for end in evidence.annealed if average.planned(study, end.run)]
    pairs = average_pairs(study, evidence.rows, average, f"quant/{spec}/{figure}")
    if not wanted or list(pairs) != wanted:
        raise NotTested(f"missing: measured in {len(pairs)} of {len(wanted)} runs that anneal")
    return all_claimed(evidence.compared(pairs, figure, spec), "lower", figure, "runs")


@claim(
    110,
    "methods",
    "Other methods of quantization order the runs alike.",
    source="appendix A",
    needs="further methods at the end of two runs or more",
)
def methods(evidence: Evidence) -> list[Verdict]:
    """Test by every further method the pairs of runs that differ significantly by the first."""
    quantization = evidence.study.quantization
    return [
        judged(measure_of(spec, figure), _same_order, evidence, quantization.specs[0], spec, figure)
        for spec in quantization.methods
        for figure in FIGURES
    ]


def _same_order(evidence: Evidence, first: str, spec: str, figure: str) -> Verdict:
    columns = [f"quant/{one}/{figure}" for one in (first, spec)]
    ends = {end.label: end_of(end, *columns) for end in evidence.ends}
    if len(ends) < 2:
        raise NotTested("the study has a single run")
    known, own = (evidence.paired.order(ends, one, figure) for one in (first, spec))
    apart = [pair for pair, verdict in known.items() if verdict in SIGNIFICANT]
    if not apart:
        words = f"by {spec_title(first)}, none of {len(known)} pairs differs significantly itself"
        return Verdict("not decided", words)
    kept = sum(own[pair] == known[pair] for pair in apart)
    reversed_ = sum(own[pair] in SIGNIFICANT and own[pair] != known[pair] for pair in apart)
    words = (
        f"of {len(apart)} pairs that differ significantly by {spec_title(first)}, {kept} do the"
        f" same way and {reversed_} the other (paired over documents, Holm)"
    )
    effect = f"{kept} of {len(apart)} pairs the same way"
    return Verdict(decided(kept, reversed_, len(apart)), words, effect)


@claim(
    120,
    "bits",
    "Fewer bits cost more.",
    source="appendix E.4, figure 23",
    needs="a method at two widths",
)
def bits(evidence: Evidence) -> list[Verdict]:
    """Compare each method at several widths with itself, the lower width with the next."""
    by_method: dict[str, list[str]] = {}
    for spec in evidence.study.quantization.at_the_end:
        by_method.setdefault(spec.replace(f"-b{parse_spec(spec).bits}", ""), []).append(spec)
    verdicts = []
    for specs in by_method.values():
        for low, high in pairwise(sorted(specs, key=lambda spec: parse_spec(spec).bits)):
            for figure in FIGURES:
                name = f"{measure_of(low, figure)[:-1]}, against {parse_spec(high).bits} bits)"
                verdicts.append(judged(name, _fewer_bits, evidence, low, high, figure))
    return verdicts


def _fewer_bits(evidence: Evidence, low: str, high: str, figure: str) -> Verdict:
    columns = [f"quant/{spec}/{figure}" for spec in (low, high)]
    ends = {end.label: end_of(end, *columns) for end in evidence.ends}
    pairs = {label: (row, row) for label, row in ends.items()}
    return all_claimed(evidence.compared(pairs, figure, high, low), "higher", figure, "runs")
