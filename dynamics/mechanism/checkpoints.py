"""The checkpoints that relate error and curvature, with the training each of them is of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quant_eval.specs import parse_spec
from study.axes import AnyRun
from study.definition import Study
from study.measurements.curvature import RELATIVE, TOP, TRACE
from study.released import ReleasedRun
from study.results.averages import lowest_spec
from study.results.table import Row, trained

TITLES = {TRACE: "trace", TOP: "largest eigenvalue", RELATIVE: "relative trace"}
Floats = NDArray[np.float64]


class Checkpoint(NamedTuple):
    """The weights after an update.

    Attributes:
        training: whose it is: a run with all that branches from it shares its first part, and is
            one training.
        row: what is measured of it.
    """

    training: str
    row: Row


def checkpoints(study: Study, rows: Sequence[Row], *columns: str) -> list[Checkpoint]:
    """Return the weights after the warm-up of which tokens and all these columns are known."""
    runs = {
        run.name: run for run in study.runs if not (isinstance(run, ReleasedRun) and run.average_of)
    }
    return [
        Checkpoint(training_of(study, runs[row["run"]]), row)
        for row in trained(rows)
        if row["run"] in runs
        and row["phase"] != "warmup"
        and all(_is_known(row, name) for name in ("tokens", *columns))
    ]


def training_of(study: Study, run: AnyRun) -> str:
    """Return the name of the run that a run branches from, or its own; stages are one training."""
    if isinstance(run, ReleasedRun):
        return run.source
    return study.parent_of(run).name if run.branch_from else run.name


def divergence_of(study: Study) -> str:
    """Return the column of the KL divergence at the fewest bits: its error is the largest."""
    return f"quant/{lowest_spec(study)}/kl_divergence"


def loss_of(study: Study) -> str:
    """Return the column of the loss in full precision, on the same text as the divergence."""
    return f"quant/{lowest_spec(study)}/cross_entropy"


def related_specs(study: Study) -> list[str]:
    """Return the specs of integers that differ from that of the fewest bits in the bits alone."""
    lowest = parse_spec(lowest_spec(study))
    bits_only = {
        name: parse_spec(name).model_copy(update={"bits": lowest.bits})
        for name in study.quantization.specs
    }
    return [name for name, spec in bits_only.items() if spec == lowest and spec.format == "int"]


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
