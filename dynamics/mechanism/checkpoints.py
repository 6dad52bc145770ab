"""The checkpoints and averages that relate error and curvature, with the training each is of."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quant_eval.specs import parse_spec
from study.axes import AnyRun
from study.definition import Study
from study.measurements.curvature import RELATIVE, TOP, TRACE
from study.measurements.quantization import CROSS_ENTROPY, DIVERGENCE
from study.released import ReleasedRun
from study.results.averages import averagings_of, lowest_spec
from study.results.summary import lineage
from study.results.table import Row, trained

MEASURES = (TRACE, TOP, RELATIVE)
Floats = NDArray[np.float64]


class CheckpointRow(NamedTuple):
    """The weights after an update.

    Attributes:
        training: whose it is: a run with all that branches from it shares its first part, and is
            one training.
        row: what is measured of it.
    """

    training: str
    row: Row


def checkpoints(study: Study, rows: Sequence[Row], *columns: str) -> list[CheckpointRow]:
    """Return the weights after the warm-up of which tokens and all these columns are known."""
    runs = {
        run.name: run for run in study.runs if not (isinstance(run, ReleasedRun) and run.average_of)
    }
    trainings = {name: training_of(study, run) for name, run in runs.items()}
    return [
        CheckpointRow(trainings[row["run"]], row)
        for row in trained(rows)
        if row["run"] in runs
        and row["phase"] != "warmup"
        and all(_is_known(row, name) for name in ("tokens", *columns))
    ]


def training_of(study: Study, run: AnyRun) -> str:
    """Return the name of the run whose first part a run shares, or its own; stages are one."""
    if isinstance(run, ReleasedRun):
        return run.model
    # It is that of the control up to the anneal, even where neither branches from the other.
    first = study.control_of(run) or run
    return study.parent_of(first).name if first.branch_from else first.name


def divergence_of(study: Study) -> str:
    """Return the column of the KL divergence at the fewest bits: its error is the largest."""
    return DIVERGENCE.of(lowest_spec(study))


def loss_of(study: Study) -> str:
    """Return the column of the loss in full precision, on the same text as the divergence."""
    return CROSS_ENTROPY.of(lowest_spec(study))


def related_specs(study: Study) -> list[str]:
    """Return the specs of integers that differ from that of the fewest bits in the bits alone."""
    lowest = parse_spec(lowest_spec(study))
    # Each spec as it would be at the fewest bits: equal ones differ in the bits alone.
    bits_only = {
        name: parse_spec(name).model_copy(update={"bits": lowest.bits})
        for name in study.quantization.specs
    }
    # (2^bits - 1)^-2 is the law of an integer grid; other formats have other grids.
    is_integer = lowest.settings()["format"] == "int"
    return [name for name, spec in bits_only.items() if is_integer and spec == lowest]


def logarithms(rows: Sequence[Row], column: str) -> Floats:
    """Return the natural logarithms of a column, [N]; NaN where a value is not above 0.

    Example:
        >>> logarithms([{"kl": 1.0}, {"kl": 0.0}], "kl").tolist()
        [0.0, nan]
    """
    values_N = np.array([row[column] for row in rows], dtype=np.float64)
    return np.asarray(np.log(np.where(values_N > 0, values_N, np.nan)))


def _is_known(row: Row, column: str) -> bool:
    value: Any = row.get(column)
    # an eigenvalue whose solver did not converge is not measured
    return value is not None and row.get(f"{column}_converged") is not False


class Averaged(NamedTuple):
    """An average of weights.

    Attributes:
        kind: LAWA, EMA, soup or decay-equivalent average.
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
    kinds = {average.name: average.kind for average in averagings_of(study)}
    runs = {run.name: run for run in study.runs}
    weights = {(row["run"], row["step"]): row for row in trained(rows)}
    return [
        Averaged(
            kinds[row["average"]],
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
    # Only rows whose divergence has a logarithm.
    rows = [row for row in (*average.path, average.row) if (row[divergence] or 0.0) > 0]
    # Its own divergence was not above 0 and went with the others.
    if average.row not in rows:
        return None
    path, at = [row for row in rows if row is not average.row], float(average.row[loss])
    # From the end: the last crossing of the loss counts.
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
