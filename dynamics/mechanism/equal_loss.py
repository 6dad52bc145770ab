"""Errors of runs at a full-precision loss that they share, read off their checkpoints.

Between two checkpoints of a run the logarithm of the error is linear in the loss. As a weighted sum
of the rows of those two, with the weights that keep the value and its first-order error (delta
method), it has the interval and the paired tests of any other. The losses decide the weights and
are taken as known.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from study.claims.finding import times
from study.claims.verdict import Measure, NotTested, Replicates
from study.measurements.quantization import CROSS_ENTROPY
from study.results.paired import Weighted
from study.results.summary import RunSummary, lineage
from study.results.table import Row, trained


class Crossing(NamedTuple):
    """Two neighbouring rows of a run, and the share of the way from one loss to the other."""

    first: Row
    second: Row
    share: float


def loss_column(measure: Measure) -> str:
    """Return the column of the full-precision loss on the text of the error."""
    return measure.by(figure=CROSS_ENTROPY).column


def measured_path(measure: Measure, end: RunSummary) -> list[Row]:
    """Return the checkpoints that led to an end, those with error and loss.

    Raises:
        NotTested: there are fewer than two.
    """
    path = trained(lineage(measure.evidence.study, measure.evidence.rows, end.run))
    columns = (measure.column, loss_column(measure))
    rows = [row for row in path if None not in [row[name] for name in columns]]
    if len(rows) < 2:
        raise NotTested(f"{end.label} has {len(rows)} measured checkpoints, a line takes 2")
    return rows


def shared_losses(measure: Measure, paths: Iterable[Sequence[Row]]) -> tuple[float, float]:
    """Return the lowest and the highest loss that every path has passed, in nats per token.

    Raises:
        NotTested: they share none.
    """
    column = loss_column(measure)
    losses = [[row[column] for row in path] for path in paths]
    # Every path has passed what is between the highest minimum and the lowest maximum.
    low, high = max(map(min, losses)), min(map(max, losses))
    if low > high:
        raise NotTested(
            f"the runs share no loss: one ends at {low:.4f}, another begins at {high:.4f} nats per"
            " token"
        )
    return low, high


def crossing(rows: Sequence[Row], loss_column: str, loss: float) -> Crossing:
    """Return the neighbours between which the loss passes a value, the last time that it does.

    Raises:
        NotTested: it never does.

    Example: 2.25 is three quarters of the way from 3 to 2.
        >>> crossing([{"loss": 4.0}, {"loss": 3.0}, {"loss": 2.0}], "loss", 2.25).share
        0.75
    """
    # From the end: a loss that goes up and down passes the value several times.
    for first, second in reversed(list(pairwise(rows))):
        start, end = first[loss_column], second[loss_column]
        if min(start, end) <= loss <= max(start, end):
            return Crossing(first, second, 1.0 if start == end else (loss - start) / (end - start))
    raise NotTested(f"{rows[-1]['run']} does not pass a loss of {loss:.4f}")


def interpolated(at: Crossing, column: str) -> Weighted:
    """Return the weights of the two rows in the column between them.

    log e is linear in the loss: e = e1^(1 - s) e2^s with the share s. Its derivatives by e1 and e2
    are the weights, e (1 - s) / e1 and e s / e2, and the sum is e itself.

    Raises:
        NotTested: an error is not positive.

    Example: half of the way from 1 to 4 is 2 = 1 x 1 + 4 x 0.25.
        >>> weighted = interpolated(Crossing({"error": 1.0}, {"error": 4.0}, 0.5), "error")
        >>> [weight for row, weight in weighted]
        [1.0, 0.25]
    """
    first, second, share = at
    # Noise may take a small error below 0, where it has no logarithm.
    if min(first[column], second[column]) <= 0:
        raise NotTested(
            f"{column} of {first['run']} is not positive at step {first['step']} or"
            f" {second['step']} and has no logarithm: measure on more text"
        )
    value = first[column] ** (1 - share) * second[column] ** share
    shares = ((first, 1 - share), (second, share))
    # Times e_i this is e x share, so the weighted sum of both rows is e, as said above.
    return [(row, value * part / row[column]) for row, part in shares if part]


def after_fork(path: Sequence[Row], step: int) -> list[Row]:
    """Return the rows from the last one at or before a step on, after which two runs differ."""
    earlier = [row for row in path if row["step"] <= step]
    return [*earlier[-1:], *(row for row in path if row["step"] > step)]


def differences(
    measure: Measure, pairs: Mapping[int | None, tuple[Sequence[Row], Sequence[Row]]]
) -> Replicates:
    """Return first - second of the error at the lowest loss that all paths have passed, by seed.

    Args:
        measure: the error.
        pairs: two paths of each seed, which begin with their last checkpoint of the same weights.

    Raises:
        NotTested: they share no loss after that.
    """
    column = loss_column(measure)
    paths = [path for pair in pairs.values() for path in pair]
    loss, _ = shared_losses(measure, paths)
    for path in paths:
        # At that loss both are the same weights, whose difference is none.
        if loss >= path[0][column]:
            raise NotTested(
                f"{path[-1]['run']} gets no lower than {path[0][column]:.4f} nats per token, the"
                " loss from which on the two differ"
            )
    contrasts: Replicates = {}
    for seed, pair in pairs.items():
        first, second = (
            interpolated(crossing(path, column, loss), measure.column) for path in pair
        )
        contrasts[seed] = [*first, *times(-1, second)]
    return contrasts
