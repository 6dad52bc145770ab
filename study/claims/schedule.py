"""Claims on the learning rate along a run: flat while it is high, a surge when it decays.

A slope is that of least squares of the figure over log2 of the tokens: its change per doubling of the tokens.
"""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from quant_eval.bootstrap import Resampled
from study.claims.verdict import (
    Evidence,
    Judged,
    Weighted,
    compared,
    estimated,
    missing,
    not_tested,
    signed,
    told_above,
)
from study.paired import Row
from study.summary import RunSummary, at_high_rate, lineage

MARGIN = 0.25  # of the anneal's change: what a doubling of the tokens may change at most where the error is called flat


class Flatness(NamedTuple):
    """Slope at a high rate, and whether it lies within the margin of the anneal's change, or beyond it."""

    label: str
    slope: Resampled
    anneal: Resampled
    within: list[Resampled]
    beyond: list[Resampled]


def slope(rows: Sequence[Row]) -> Weighted:
    """Weights of the rows in the slope over log2 of their tokens."""
    return slope_over([(row, log2(row["tokens"])) for row in rows])


def slope_over(placed: Sequence[tuple[Row, float]]) -> Weighted:
    """Weights of the rows in the slope of least squares over their places."""
    mean = sum(place for _, place in placed) / len(placed)
    spread = sum((place - mean) ** 2 for _, place in placed)
    return [(row, (place - mean) / spread) for row, place in placed]


def change(first: Row, last: Row, share: float = 1.0) -> Weighted:
    """Weights of last - first, times a share."""
    return [(last, share), (first, -share)]


def times(factor: float, weighted: Weighted) -> Weighted:
    """The same sum times a factor."""
    return [(row, factor * weight) for row, weight in weighted]


def flat(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Two one-sided tests of the slope against the margin (Schuirmann 1987), Holm over the runs."""
    column, chosen = f"quant/{spec}/{figure}", []
    for end in _annealed(evidence):
        if end.first is None:
            return not_tested(f"missing: {end.label} has no checkpoint before the decay yet")
        led = lineage(evidence.study, evidence.rows, end.run)
        stable = [row for row in at_high_rate(led) if row["step"] <= end.first["step"] and row["tokens"]]
        if len({row["tokens"] for row in stable}) < 2:
            continue
        wanted = [(f"{end.label}, step {row['step']}", row, column) for row in stable]
        gap = missing([*wanted, (f"the end of {end.label}", end.last, column)])
        if gap or end.last is None:
            return not_tested(gap or "")
        chosen.append((end.label, stable, end.last))
    if not chosen:
        return not_tested("no run has two checkpoints at a high learning rate before it decays")
    found = []
    for label, stable, last in chosen:
        trend, rise = slope(stable), change(stable[-1], last)
        margin, own = times(MARGIN, rise), evidence.contrast(spec, figure, trend)
        steep = times(1.0 if own.value > 0 else -1.0, trend)
        within = [evidence.contrast(spec, figure, margin, times(sign, trend)) for sign in (-1, 1)]
        beyond = [evidence.contrast(spec, figure, steep), evidence.contrast(spec, figure, steep, times(-1, margin))]
        found.append(Flatness(label, own, evidence.contrast(spec, figure, rise), within, beyond))
    return _flatness(found, figure)


def _flatness(found: list[Flatness], figure: str) -> Judged:
    within = told_above([one.within for one in found], one_sided=True)
    beyond = told_above([one.beyond for one in found], one_sided=False)
    parts = [
        f"{one.label}: {estimated(one.slope, figure)} per doubling, {estimated(one.anneal, figure)} in the decay"
        for one in found
    ]
    words = (
        f"slope within {MARGIN:g} of the change in the decay told for {sum(within)} of {len(found)} runs, beyond it "
        f"for {sum(beyond)} (paired over documents, two one-sided tests, Holm): {'; '.join(parts)}"
    )
    if all(within):
        return Judged("supported", words)
    return Judged("contradicted" if any(beyond) and not any(within) else "not decided", words)


def surge(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Before against after the decay, run by run."""
    pairs, gap = both_ends(evidence, [f"quant/{spec}/{figure}"])
    if gap:
        return not_tested(gap)
    measured = {label: ((first, spec), (last, spec)) for label, (first, last) in pairs.items()}
    return compared(evidence, measured, figure, "higher", "runs")


def divergence(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Run by run both: the full-precision loss falls, and the error rises."""
    pairs, gap = both_ends(evidence, [f"quant/{spec}/{figure}", f"quant/{spec}/cross_entropy"])
    if gap:
        return not_tested(gap)
    measured = [((first, spec), (last, spec)) for first, last in pairs.values()]
    errors = evidence.paired.compared(measured, figure)
    losses = evidence.paired.compared(measured, "cross_entropy")
    told = [(loss.verdict, error.verdict) for loss, error in zip(losses, errors, strict=True)]
    parted, together = told.count(("lower", "higher")), sum(told.count((way, way)) for way in ("lower", "higher"))
    parts = [
        f"{label}: loss {loss.difference.value:+.3g} (p {loss.p_adjusted:.2g}), error "
        f"{signed(error.difference.value, figure)} (p {error.p_adjusted:.2g})"
        for label, loss, error in zip(pairs, losses, errors, strict=True)
    ]
    words = (
        f"loss told lower and error higher in {parted} of {len(told)} runs, both the same way in {together} (paired "
        f"over documents, Holm): {'; '.join(parts)}"
    )
    if parted == len(told):
        return Judged("supported", words)
    return Judged("contradicted" if together and not parted else "not decided", words)


def _annealed(evidence: Evidence) -> list[RunSummary]:
    return [end for end in evidence.ends if end.anneals]


def both_ends(evidence: Evidence, columns: list[str]) -> tuple[dict[str, tuple[Row, Row]], str | None]:
    """Label -> rows before and after the decay; or why the claim cannot be tested."""
    pairs: dict[str, tuple[Row, Row]] = {}
    for end in _annealed(evidence):
        rows = ((f"{end.label} before the decay", end.first), (f"the end of {end.label}", end.last))
        gap = missing((what, row, column) for what, row in rows for column in columns)
        if gap:
            return {}, gap
        if end.first and end.last:
            pairs[end.label] = (end.first, end.last)
    return pairs, None if pairs else "no run's learning rate decays after a checkpoint at a higher one"
