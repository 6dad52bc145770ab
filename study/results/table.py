"""The table of a study: a row per run and measured model, a column per figure.

Columns have the names of the MLflow metrics: `held_out_loss`, `quant/gptq-b3-g32/relative_error`,
`curvature/trace`. Those of a measurement come from its kind, see `study.measurements`. There is
neither a time nor a path in the table: a study that was killed and resumed gives the same one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from base.errors import UserError
from base.files import replaced_file
from study.definition import Study

TABLE = "table.parquet"
TYPES = {"number": pa.float64(), "count": pa.int64(), "flag": pa.bool_()}
MODEL_COLUMNS = {  # of the model, before its figures
    **dict.fromkeys(("study", "run", "average", "phase"), pa.string()),
    **{"peak_lr": pa.float64(), "step": pa.int64(), "tokens": pa.int64()},
    **dict.fromkeys(("learning_rate", "train_loss", "held_out_loss"), pa.float64()),
}
AXIS_COLUMNS = {  # of the run, after all figures
    "weight_decay": pa.float64(),
    "batch_size": pa.int64(),
    "engine": pa.string(),
    "seed": pa.int64(),
}
NATS, SHARE = "nats per token", "1"
CURVATURE = f"{NATS} / (unit of the parameters)^2"
LOSSES = ("train_loss", "held_out_loss", "cross_entropy", "cross_entropy_quantized")
INCREASES = ("absolute_error", "kl_divergence", "first_order", "second_order", "predicted")
SHARES = ("relative_error", "top1_agreement", "accuracy", "accuracy_quantized", "degradation")
UNITS = {  # of the last part of a column's name
    **dict.fromkeys((*LOSSES, *INCREASES, "measured", "remainder"), NATS),
    **dict.fromkeys(("trace", "lambda_max"), CURVATURE),
    **dict.fromkeys((*SHARES, "lambda_max_residual"), SHARE),
    **{"tokens": "tokens", "step": "steps", "batch_size": "sequences"},
    **dict.fromkeys(("peak_lr", "learning_rate", "weight_decay"), SHARE),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Row(Mapping[str, Any]):
    """A model of a run with all that is measured of it; as a mapping, its columns by name.

    Attributes:
        average: its name; None for the weights as training left them.
        phase: warmup, stable or anneal; of a released model its stage.
        figures: the measured columns; None where one is not measured.
    """

    study: str
    run: str
    average: str | None
    phase: str
    step: int
    peak_lr: float | None = None
    tokens: int | None = None
    learning_rate: float | None = None
    train_loss: float | None = None
    held_out_loss: float | None = None
    weight_decay: float | None = None
    batch_size: int | None = None
    engine: str | None = None
    seed: int | None = None
    figures: Mapping[str, float | int | bool | None]

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> "Row":
        """Return a row of columns by name; those of the model that are left out are empty."""
        of_model: dict[str, Any] = {name: columns.get(name) for name in _OF_MODEL}
        figures = {name: value for name, value in columns.items() if name not in _OF_MODEL}
        return cls(**of_model, figures=figures)

    def __getitem__(self, column: str) -> Any:
        """Return the value of a column; KeyError for one that the table does not have."""
        return getattr(self, column) if column in _OF_MODEL else self.figures[column]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all columns, in the order of the table."""
        yield from (*MODEL_COLUMNS, *self.figures, *AXIS_COLUMNS)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(_OF_MODEL) + len(self.figures)


_OF_MODEL = frozenset(field.name for field in fields(Row)) - {"figures"}


def figure_columns(study: Study) -> dict[str, pa.DataType]:
    """Return the columns of all measurements of the study, with their types."""
    return {
        name: TYPES[column_type]
        for kind, settings in study.measurements
        for name, column_type in kind.columns(settings).items()
    }


def schema_of(study: Study) -> pa.Schema:
    """Return names and types of the table's columns, which the study alone decides."""
    columns = MODEL_COLUMNS | figure_columns(study) | AXIS_COLUMNS
    return pa.schema(
        [pa.field(name, kind, metadata={"unit": unit_of(name)}) for name, kind in columns.items()]
    )


def unit_of(column: str) -> str:
    """Return the unit of a column by its name; '1' of shares, empty of what has none.

    >>> unit_of("quant/gptq-b3-g32/kl_divergence_low"), unit_of("tokens")
    ('nats per token', 'tokens')
    """
    figure = column.rpartition("/")[2].removesuffix("_low").removesuffix("_high")
    return UNITS.get(figure, "")


def trained(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of weights as training left them."""
    return [row for row in rows if row["average"] is None]


def write_table(directory: Path, study: Study, rows: Sequence[Row]) -> Path:
    """Write table.parquet aside and rename it."""
    path = directory / TABLE
    with replaced_file(path) as aside:
        pq.write_table(pa.Table.from_pylist(list(map(dict, rows)), schema=schema_of(study)), aside)
    return path


def read_table(directory: Path, study: Study) -> list[Row]:
    """Return the rows of table.parquet; columns that an older version did not have are empty.

    Raises:
        UserError: it was not collected yet, or is damaged.
    """
    path = directory / TABLE
    if not path.exists():
        raise UserError(
            f"{path} does not exist; make it with 'python -m study collect {directory.name}'"
        )
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is damaged ({error}); make it again with 'python -m study collect'"
        ) from None
    columns = schema_of(study).names
    return [Row.of({name: row.get(name) for name in columns}) for row in rows]
