"""Claims on the weights at the end of training: larger rates, averages, other methods, fewer bits."""

from itertools import combinations, pairwise
from math import log2

from ckpt_tools.holm import holm
from quant_eval.specs import parse_spec
from study.averages import against_annealed, average_pairs, lowest_spec
from study.claims.data import Chosen, alike
from study.claims.permutation import kendall
from study.claims.schedule import slope_over
from study.claims.verdict import (
    ALPHA,
    FIGURES,
    NAMES,
    Evidence,
    Judged,
    Shown,
    Verdict,
    compared,
    counted,
    estimated,
    measure_of,
    missing,
    not_tested,
    outcome_of,
)
from study.paired import Measured
from study.settings import spec_title
from study.summary import RunSummary
from train.config import RunConfig

NO_WORSE = 0.01  # of the loss: the most by which a larger rate's may lie above the other's and be called no worse
Pairs = dict[str, tuple[Measured, Measured]]


def _peak(end: RunSummary) -> float:
    assert isinstance(end.run, RunConfig)
    return end.run.optimizer.peak_lr


def _sweeps(evidence: Evidence) -> list[Chosen]:
    """Runs that differ in their peak learning rate alone, by rising peak."""
    return [sorted(group, key=_peak) for group in alike(evidence.ends, ("optimizer.peak_lr",))]


def _gap(ends: list[RunSummary], column: str) -> str | None:
    return missing((f"the end of {end.label}", end.last, column) for end in ends)


def _pairs(groups: list[Chosen], spec: str) -> Pairs:
    """'lower peak vs higher peak' -> their last weights."""
    return {
        f"{first.label} vs {second.label}": ((first.last, spec), (second.last, spec))
        for group in groups
        for first, second in combinations(group, 2)
        if first.last and second.last
    }


def peaks(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Slope over log2 of the peak, every pair of peaks, and the order of the runs by permutation.

    Supported where every slope is told below 0 and no pair is told to lie the other way; contradicted likewise.
    """
    groups, column = _sweeps(evidence), f"quant/{spec}/{figure}"
    if not groups:
        return not_tested("no two runs differ in their peak learning rate alone")
    gap = _gap([end for group in groups for end in group], column)
    if gap:
        return not_tested(gap)
    slopes, parts = [], []
    for group in groups:
        found = [(end.last, log2(_peak(end))) for end in group if end.last]
        slopes.append(evidence.contrast(spec, figure, slope_over(found)))
        tau, p = kendall([place for _, place in found], [row[column] for row, _ in found])
        parts.append(
            f"{len(found)} runs: {estimated(slopes[-1], figure)} per doubling of the peak; Kendall's tau over the runs "
            f"{tau:+.2f}, exact p {p:.2g}"
        )
    told = outcome_of(_told([(one.value, one.p_value()) for one in slopes]), "lower")
    shown = _shown(evidence, _pairs(groups, spec), figure)
    against = {"supported": "higher", "contradicted": "lower"}.get(told)
    outcome = "not decided" if against in [one.verdict for one in shown] else told
    words = f"{'; '.join(parts)} (slopes paired over documents, Holm); {counted(shown, 'lower', figure, 'pairs')}"
    return Judged(outcome, words)


def _told(found: list[tuple[float, float]]) -> list[str]:
    """How values lie to 0, by their p-values after Holm's correction."""
    adjusted = holm([p for _, p in found])
    return [
        "not told apart" if p > ALPHA else "higher" if value > 0 else "lower"
        for (value, _), p in zip(found, adjusted, strict=True)
    ]


def _shown(evidence: Evidence, pairs: Pairs, figure: str) -> list[Shown]:
    found = evidence.paired.compared(list(pairs.values()), figure)
    return [Shown(label, one.difference, one.p_adjusted, one.verdict) for label, one in zip(pairs, found, strict=True)]


def matched(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Pairs in which the larger peak's full-precision loss is told to be no worse by more than NO_WORSE."""
    groups = _sweeps(evidence)
    if not groups:
        return not_tested("no two runs differ in their peak learning rate alone")
    ends = [end for group in groups for end in group]
    gap = _gap(ends, f"quant/{spec}/{figure}") or _gap(ends, f"quant/{spec}/cross_entropy")
    if gap:
        return not_tested(gap)
    pairs = _pairs(groups, spec)
    losses = evidence.paired.compared(list(pairs.values()), "cross_entropy")
    chosen = {
        label: pair
        for (label, pair), loss in zip(pairs.items(), losses, strict=True)
        if loss.difference.high <= NO_WORSE * loss.first_value
    }
    what = f"pairs of {len(pairs)} in which the larger peak's loss is at most {NO_WORSE:.0%} above the other's"
    if not chosen:
        return not_tested(f"no {what}: the interval of each paired difference reaches beyond")
    return compared(evidence, chosen, figure, "lower", what)


def averages(evidence: Evidence) -> list[Verdict]:
    """Averages of weights against the annealed weights of the same run, at the fewest bits."""
    study, spec, verdicts = evidence.study, lowest_spec(evidence.study), []
    for title, made in against_annealed(study).items():
        wanted = [end.label for end in evidence.ends if end.anneals and made.planned(study, end.run)]
        for figure, name in NAMES.items():
            pairs = average_pairs(study, evidence.rows, made, f"quant/{spec}/{figure}")
            measured: Pairs = {label: ((first, spec), (second, spec)) for label, (first, second) in pairs.items()}
            judged = (
                compared(evidence, measured, figure, "lower", "runs")
                if wanted and list(measured) == wanted
                else not_tested(f"missing: measured in {len(measured)} of {len(wanted)} runs that anneal")
            )
            verdicts.append(Verdict(f"{title}: {name} ({spec_title(spec)})", *judged))
    return verdicts


def methods(evidence: Evidence) -> list[Verdict]:
    """Whether pairs of runs that the first spec tells apart lie the same way by every further method."""
    first, *_ = evidence.study.quantization.specs
    verdicts = []
    for spec in evidence.study.quantization.methods:
        for figure in FIGURES:
            verdicts.append(Verdict(measure_of(spec, figure), *_same_order(evidence, first, spec, figure)))
    return verdicts


def _same_order(evidence: Evidence, first: str, spec: str, figure: str) -> Judged:
    gap = _gap(evidence.ends, f"quant/{first}/{figure}") or _gap(evidence.ends, f"quant/{spec}/{figure}")
    if gap or len(evidence.ends) < 2:
        return not_tested(gap or "the study has a single run")
    ends = {end.label: end.last for end in evidence.ends if end.last}
    known, own = (evidence.paired.order(ends, one, figure) for one in (first, spec))
    apart = [pair for pair, verdict in known.items() if verdict != "not told apart"]
    if not apart:
        return Judged("not decided", f"{spec_title(first)} itself tells none of {len(known)} pairs apart")
    kept = sum(own[pair] == known[pair] for pair in apart)
    reversed_ = sum(own[pair] not in (known[pair], "not told apart") for pair in apart)
    words = (
        f"of {len(apart)} pairs that {spec_title(first)}, tells apart {kept} lie the same way and {reversed_} the "
        f"other (paired over documents, Holm)"
    )
    if kept == len(apart):
        return Judged("supported", words)
    return Judged("contradicted" if reversed_ and not kept else "not decided", words)


def bits(evidence: Evidence) -> list[Verdict]:
    """Each method that the ends of training are quantized with at several widths, the lower against the next."""
    by_method: dict[str, list[str]] = {}
    for spec in evidence.study.quantization.at_the_end:
        by_method.setdefault(spec.replace(f"-b{parse_spec(spec).bits}", ""), []).append(spec)
    verdicts = []
    for specs in by_method.values():
        for low, high in pairwise(sorted(specs, key=lambda spec: parse_spec(spec).bits)):
            for figure in FIGURES:
                name = f"{FIGURES[figure]} ({spec_title(low)}, against {parse_spec(high).bits} bits)"
                verdicts.append(Verdict(name, *_fewer_bits(evidence, low, high, figure)))
    return verdicts


def _fewer_bits(evidence: Evidence, low: str, high: str, figure: str) -> Judged:
    gap = _gap(evidence.ends, f"quant/{low}/{figure}") or _gap(evidence.ends, f"quant/{high}/{figure}")
    if gap:
        return not_tested(gap)
    pairs: Pairs = {end.label: ((end.last, high), (end.last, low)) for end in evidence.ends if end.last}
    return compared(evidence, pairs, figure, "higher", "runs")
