"""Averages of weights beside the weights: curvature at the same step, error at equal loss."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dynamics.mechanism.checkpoints import divergence_of, loss_of, training_of
from study.axes import AnyRun
from study.definition import Study
from study.results.averages import kept_averages
from study.results.summary import lineage
from study.results.table import Row, trained


class Averaged(NamedTuple):
    """An average of weights.

    Attributes:
        kind: LAWA, EMA or soup.
        training: whose it is.
        row: its own.
        weights: the row of the weights at its step; None where there is none.
        path: rows of the weights of the training that it is compared with at equal loss, its anneal
            among them.
    """

    kind: str
    training: str
    row: Row
    weights: Row | None
    path: list[Row]


def averaged(study: Study, rows: Sequence[Row]) -> list[Averaged]:
    """Return the averages before the anneal, in whose place they are made.

    An average of annealed weights lags weights whose learning rate still changes.
    """
    kinds = {average.name: average.kind.upper() for average in kept_averages(study)}
    runs = {run.name: run for run in study.runs}
    weights = {(row["run"], row["step"]): row for row in trained(rows)}
    return [
        Averaged(
            kinds.get(row["average"], "soup"),
            training_of(study, runs[row["run"]]),
            row,
            weights.get((row["run"], row["step"])),
            trained(lineage(study, rows, _annealed(study, runs[row["run"]]))),
        )
        for row in rows
        if row["average"] and row["phase"] == "stable"
    ]


def _annealed(study: Study, run: AnyRun) -> AnyRun:
    """Return the first run of the same training that anneals, or the run itself."""
    training = training_of(study, run)
    of_training = (each for each in study.trained if training_of(study, each) == training)
    return next((each for each in of_training if each.schedule.anneal), run)


def at_equal_loss(study: Study, average: Averaged) -> float | None:
    """Return log(KL of an average / KL of the weights of its training at its loss).

    KL divergence at the fewest bits, in nats per token. Between the two neighbouring checkpoints
    whose losses are on either side of the average's, log KL is taken as linear in the loss.

    Returns:
        None where no two checkpoints are, or a divergence is not above 0.
    """
    loss, divergence = loss_of(study), divergence_of(study)
    rows = [row for row in (*average.path, average.row) if (row[divergence] or 0.0) > 0]
    if average.row not in rows:
        return None
    path, at = [row for row in rows if row is not average.row], float(average.row[loss])
    for before, after in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
        losses = before[loss], after[loss]
        if min(losses) <= at <= max(losses) and losses[0] != losses[1]:
            share = (at - losses[0]) / (losses[1] - losses[0])
            ends = math.log(before[divergence]), math.log(after[divergence])
            expected = ends[0] + share * (ends[1] - ends[0])
            return math.log(float(average.row[divergence])) - float(expected)
    return None


def log_ratio(row: Row | None, other: Row | None, column: str) -> float | None:
    """Return log(row / other) of a column; None where one is missing or not above 0.

    Example: half the error.
        >>> round(log_ratio({"kl": 0.1}, {"kl": 0.2}, "kl"), 4)
        -0.6931
    """
    value, reference = (each.get(column) if each else None for each in (row, other))
    if value is None or reference is None or min(value, reference) <= 0:
        return None
    return math.log(value / reference)
