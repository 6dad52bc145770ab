"""Claims on the learning rate along a run: flat while it is high, a surge when it decays.

A slope is that of least squares of the figure over log2 of the tokens: its change per doubling of
the tokens.
"""

from collections.abc import Sequence
from math import log2

from study.claims.verdict import (
    Measure,
    NotTested,
    Verdict,
    Weighted,
    by_measure,
    claim,
    decided,
    needed,
    significant_above,
)
from study.results.summary import at_high_rate, lineage
from study.results.table import Row

# An error is called flat if a doubling of the tokens changes it by at most this share of the change
# in the anneal.
MARGIN = 0.25


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
def flat(of: Measure) -> Verdict:
    """Judge by two one-sided tests of the slope against the margin (Schuirmann 1987)."""
    within, beyond, slopes, decays, parts = [], [], [], [], []
    for end in of.evidence.annealed:
        first = needed(f"{end.label} before the decay", end.first)
        led = at_high_rate(lineage(of.evidence.study, of.evidence.rows, end.run))
        stable = [row for row in led if row["step"] <= first["step"] and row["tokens"]]
        if len({row["tokens"] for row in stable}) < 2:
            continue
        for row in stable:
            needed(f"{end.label}, step {row['step']}", row, of.column)

        trend, rise = slope(stable), change(stable[-1], of.end(end))
        margin = times(MARGIN, rise)
        growth, decay = of.contrast(trend), of.contrast(rise)
        steep = times(1.0 if growth.value > 0 else -1.0, trend)
        within.append([of.contrast(margin, times(sign, trend)) for sign in (-1, 1)])
        beyond.append([of.contrast(steep), of.contrast(steep, times(-1, margin))])
        slopes.append(growth.value)
        decays.append(decay.value)
        parts.append(
            f"{end.label}: {of.estimated(growth)} per doubling, {of.estimated(decay)} in the decay"
        )
    if not parts:
        raise NotTested("no run has two checkpoints at a high learning rate before it decays")
    agreeing = sum(significant_above(within, one_sided=True))
    opposing = sum(significant_above(beyond, one_sided=False))
    words = (
        f"slope significantly within {MARGIN:g} of the change in the decay for {agreeing} of"
        f" {len(parts)} runs, beyond it for {opposing} (paired over documents, two one-sided"
        f" tests, Holm): {'; '.join(parts)}"
    )
    effect = f"{of.spread(slopes)} per doubling of the tokens, {of.spread(decays)} in the decay"
    return Verdict(decided(agreeing, opposing, len(parts)), words, effect)


@claim(
    20,
    "surge",
    "When the learning rate decays the error surges.",
    source="abstract, figure 1, appendix E.4",
    needs="a checkpoint before and one after the decay",
)
@by_measure
def surge(of: Measure) -> Verdict:
    """Compare after with before the decay, run by run."""
    return of.all_claimed(of.compared(of.both_ends()), "higher", "runs")


@claim(
    30,
    "divergence",
    "In the decay loss and error part: the full-precision loss falls and the error rises.",
    source="abstract",
    needs="a checkpoint before and one after the decay",
)
@by_measure
def divergence(of: Measure) -> Verdict:
    """Compare both run by run: the full-precision loss falls, and the error rises."""
    of_loss = of.of(figure="cross_entropy")
    pairs = of.both_ends(of_loss.column)
    errors, losses = of.compared(pairs), of_loss.compared(pairs)
    ways = [(losses[label].verdict, errors[label].verdict) for label in pairs]
    parted = ways.count(("lower", "higher"))
    together = ways.count(("lower", "lower")) + ways.count(("higher", "higher"))
    parts = [
        f"{label}: loss {of_loss.signed(loss.difference.value)} (p {loss.p_adjusted:.2g}), error "
        f"{of.signed(errors[label].difference.value)} (p {errors[label].p_adjusted:.2g})"
        for label, loss in losses.items()
    ]
    words = (
        f"loss significantly lower and error higher in {parted} of {len(ways)} runs, both the same"
        f" way in {together} (paired over documents, Holm): {'; '.join(parts)}"
    )
    loss = of_loss.spread([one.difference.value for one in losses.values()])
    error = of.spread([one.difference.value for one in errors.values()])
    return Verdict(decided(parted, together, len(ways)), words, f"loss {loss}, error {error}")
