"""Errors of runs at a full-precision loss that they share, read off their checkpoints.

Between two checkpoints of a run the logarithm of the error is linear in the loss, and the loss
increase itself, which may be negative. As a weighted sum of the rows of those two, with the weights
that keep the value and its first-order error (delta method), it has the interval and the paired
tests of any other. The losses decide the weights and are taken as known.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from study.axes import AnyRun
from study.claims.finding import times
from study.claims.verdict import Measure, NotTested, Replicates
from study.measurements.quantization import CROSS_ENTROPY, LOSS_INCREASE
from study.results.paired import Weighted
from study.results.summary import lineage
from study.results.table import Row, trained


class Crossing(NamedTuple):
    """Two neighbouring rows of a run, and the share of the way from one value to the other."""

    first: Row
    second: Row
    share: float


def loss_column(measure: Measure) -> str:
    """Return the column of the full-precision loss on the text of the error."""
    return measure.by(figure=CROSS_ENTROPY).column


def measured_path(
    measure: Measure, run: AnyRun, *others: str, until: int | None = None
) -> list[Row]:
    """Return the checkpoints that led to the end of a run, with the error and further columns.

    Args:
        measure: the error.
        run: where training ended.
        others: columns that a checkpoint has to have, too.
        until: the last step that counts; None: the end.

    Raises:
        NotTested: there are fewer than two.
    """
    study, columns = measure.evidence.study, (measure.column, *others)
    rows = [
        row
        for row in trained(lineage(study, measure.evidence.rows, run))
        if (until is None or row["step"] <= until) and None not in [row[name] for name in columns]
    ]
    if len(rows) < 2:
        raise NotTested(
            f"{study.label_of(run)} has {len(rows)} measured checkpoints, a line takes 2"
        )
    return rows


def paths_from(
    measure: Measure, runs: tuple[AnyRun, AnyRun], step: int, until: int
) -> tuple[list[Row], list[Row]]:
    """Return the checkpoints of two runs from the last one at or before the step where they part.

    Args:
        measure: the error.
        runs: of the same weights up to `step`.
        step: the last one of the same weights.
        until: the last step that counts, of equal tokens.

    Raises:
        NotTested: one has no measured checkpoint on both sides of `step`.
    """
    first, second = (_path_from(measure, run, step, until) for run in runs)
    return first, second


def _path_from(measure: Measure, run: AnyRun, step: int, until: int) -> list[Row]:
    path = measured_path(measure, run, loss_column(measure), until=until)
    earlier = [row for row in path if row["step"] <= step]
    later = path[len(earlier) :]
    if not earlier or not later:
        label = measure.evidence.study.label_of(run)
        raise NotTested(f"{label} has no measured checkpoint on both sides of step {step}")
    return [earlier[-1], *later]


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


def crossing(rows: Sequence[Row], column: str, value: float) -> Crossing:
    """Return the neighbours between which a column passes a value, the last time that it does.

    Raises:
        NotTested: it never does.

    Example: 2.25 is three quarters of the way from 3 to 2.
        >>> crossing([{"loss": 4.0}, {"loss": 3.0}, {"loss": 2.0}], "loss", 2.25).share
        0.75
    """
    # From the end: a loss that goes up and down passes the value several times.
    for first, second in reversed(list(pairwise(rows))):
        start, end = first[column], second[column]
        if min(start, end) <= value <= max(start, end):
            return Crossing(first, second, 1.0 if start == end else (value - start) / (end - start))
    raise NotTested(f"{rows[-1]['run']} does not pass {value:.5g} in column {column}")


def read_off(measure: Measure, at: Crossing) -> Weighted:
    """Return the weights of the two rows of a crossing in the figure between them.

    Raises:
        NotTested: as `interpolated`.
    """
    if measure.figure == LOSS_INCREASE:
        return [(row, part) for row, part in _shares(at) if part]
    return interpolated(at, measure.column)


def _shares(at: Crossing) -> tuple[tuple[Row, float], tuple[Row, float]]:
    return (at.first, 1 - at.share), (at.second, at.share)


def interpolated(at: Crossing, column: str) -> Weighted:
    """Return the weights of the two rows in the column between them, by its logarithm.

    log e is linear in the column that is crossed: e = e1^(1 - s) e2^s with the share s. Its
    derivatives by e1 and e2 are the weights, e (1 - s) / e1 and e s / e2, and the sum is e itself.

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
    # Times e_i this is e x share, so the weighted sum of both rows is e, as said above.
    return [(row, value * part / row[column]) for row, part in _shares(at) if part]


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
                f"the lowest loss that all reach is {loss:.4f} nats per token, and"
                f" {path[-1]['run']} passes it before the two differ, at {path[0][column]:.4f}"
            )
    contrasts: Replicates = {}
    for seed, pair in pairs.items():
        first, second = (read_off(measure, crossing(path, column, loss)) for path in pair)
        contrasts[seed] = [*first, *times(-1, second)]
    return contrasts
