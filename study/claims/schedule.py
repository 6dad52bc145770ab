"""Claims on the learning rate along a run: flat while it is high, a surge when it decays.

A slope is that of least squares of the figure over log2 of the tokens: its change per doubling of
the tokens.
"""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from quant_eval.measuring.bootstrap import Resampled
from study.claims.verdict import (
    Evidence,
    NotTested,
    Pairs,
    Verdict,
    Weighted,
    all_claimed,
    by_measure,
    claim,
    decided,
    end_of,
    estimated,
    needed,
    signed,
    significant_above,
    spread,
)
from study.results.summary import at_high_rate, lineage
from study.results.table import Row

# An error is called flat if a doubling of the tokens changes it by at most this share of the change
# in the anneal.
MARGIN = 0.25


class Flatness(NamedTuple):
    """Slope at a high rate, and the contrasts of it with the margin of the anneal's change."""

    label: str
    slope: Resampled
    anneal: Resampled
    within: list[Resampled]
    beyond: list[Resampled]


def slope(rows: Sequence[Row]) -> Weighted:
    """Return the weights of the rows in the slope over log2 of their tokens."""
    return slope_over([(row, log2(row["tokens"])) for row in rows])


def slope_over(placed: Sequence[tuple[Row, float]]) -> Weighted:
    """Return the weights of the rows in the slope of least squares over their places."""
    mean = sum(place for _, place in placed) / len(placed)
    spread = sum((place - mean) ** 2 for _, place in placed)
    return [(row, (place - mean) / spread) for row, place in placed]


def change(first: Row, last: Row, share: float = 1.0) -> Weighted:
    """Return the weights of last - first, times a share."""
    return [(last, share), (first, -share)]


def times(factor: float, weighted: Weighted) -> Weighted:
    """Return the same sum times a factor."""
    return [(row, factor * weight) for row, weight in weighted]


@claim(
    10,
    "flat",
    "While the learning rate is high the error stays flat, although the tokens grow.",
    source="abstract, figure 1",
    needs="two checkpoints at a high rate and one after its decay",
)
@by_measure
def flat(evidence: Evidence, spec: str, figure: str) -> Verdict:
    """Judge by two one-sided tests of the slope against the margin (Schuirmann 1987)."""
    column = f"quant/{spec}/{figure}"
    found = []
    for end in evidence.annealed:
        first = needed(f"{end.label} before the decay", end.first)
        led = at_high_rate(lineage(evidence.study, evidence.rows, end.run))
        stable = [row for row in led if row["step"] <= first["step"] and row["tokens"]]
        if len({row["tokens"] for row in stable}) < 2:
            continue
        for row in stable:
            needed(f"{end.label}, step {row['step']}", row, column)
        found.append(_flatness(evidence, spec, figure, end.label, [*stable, end_of(end, column)]))
    if not found:
        raise NotTested("no run has two checkpoints at a high learning rate before it decays")
    within = significant_above([one.within for one in found], one_sided=True)
    beyond = significant_above([one.beyond for one in found], one_sided=False)
    parts = [
        f"{one.label}: {estimated(one.slope, figure)} per doubling, {estimated(one.anneal, figure)}"
        " in the decay"
        for one in found
    ]
    words = (
        f"slope significantly within {MARGIN:g} of the change in the decay for {sum(within)} of"
        f" {len(found)} runs, beyond it for {sum(beyond)} (paired over documents, two one-sided"
        f" tests, Holm): {'; '.join(parts)}"
    )
    slopes = spread([one.slope.value for one in found], figure)
    decays = spread([one.anneal.value for one in found], figure)
    effect = f"{slopes} per doubling of the tokens, {decays} in the decay"
    return Verdict(decided(sum(within), sum(beyond), len(found)), words, effect)


def _flatness(
    evidence: Evidence, spec: str, figure: str, label: str, rows: Sequence[Row]
) -> Flatness:
    """The contrasts of a run of all rows but the last, which is after the decay."""
    *stable, last = rows

    def contrast(*parts: Weighted) -> Resampled:
        return evidence.contrast(spec, figure, *parts)

    trend, rise = slope(stable), change(stable[-1], last)
    margin, own = times(MARGIN, rise), contrast(trend)
    steep = times(1.0 if own.value > 0 else -1.0, trend)
    within = [contrast(margin, times(sign, trend)) for sign in (-1, 1)]
    beyond = [contrast(steep), contrast(steep, times(-1, margin))]
    return Flatness(label, own, contrast(rise), within, beyond)


@claim(
    20,
    "surge",
    "When the learning rate decays the error surges.",
    source="abstract, figure 1, appendix E.4",
    needs="a checkpoint before and one after the decay",
)
@by_measure
def surge(evidence: Evidence, spec: str, figure: str) -> Verdict:
    """Compare after with before the decay, run by run."""
    pairs = both_ends(evidence, f"quant/{spec}/{figure}")
    return all_claimed(evidence.compared(pairs, figure, spec), "higher", figure, "runs")


@claim(
    30,
    "divergence",
    "In the decay loss and error part: the full-precision loss falls and the error rises.",
    source="abstract",
    needs="a checkpoint before and one after the decay",
)
@by_measure
def divergence(evidence: Evidence, spec: str, figure: str) -> Verdict:
    """Compare both run by run: the full-precision loss falls, and the error rises."""
    pairs = both_ends(evidence, f"quant/{spec}/{figure}", f"quant/{spec}/cross_entropy")
    errors = evidence.compared(pairs, figure, spec)
    losses = evidence.compared(pairs, "cross_entropy", spec)
    ways = [(losses[label].verdict, errors[label].verdict) for label in pairs]
    parted = ways.count(("lower", "higher"))
    together = ways.count(("lower", "lower")) + ways.count(("higher", "higher"))
    parts = [
        f"{label}: loss {loss.difference.value:+.3g} (p {loss.p_adjusted:.2g}), error "
        f"{signed(errors[label].difference.value, figure)} (p {errors[label].p_adjusted:.2g})"
        for label, loss in losses.items()
    ]
    words = (
        f"loss significantly lower and error higher in {parted} of {len(ways)} runs, both the same"
        f" way in {together} (paired over documents, Holm): {'; '.join(parts)}"
    )
    loss, error = (
        spread([one.difference.value for one in found.values()], name)
        for found, name in ((losses, "cross_entropy"), (errors, figure))
    )
    return Verdict(decided(parted, together, len(ways)), words, f"loss {loss}, error {error}")


def both_ends(evidence: Evidence, *columns: str) -> Pairs:
    """Return label -> rows before and after the decay."""
    pairs = {
        end.label: (
            needed(f"{end.label} before the decay", end.first, *columns),
            end_of(end, *columns),
        )
        for end in evidence.annealed
    }
    if not pairs:
        raise NotTested("no run's learning rate decays after a checkpoint at a higher one")
    return pairs
