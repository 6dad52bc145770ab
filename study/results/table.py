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

from base.digests import SEAL, digest_of_json
from base.environment import PROJECT, version
from base.errors import UserError
from base.files import replaced_file
from study.axes import STAGE, Axis, Value
from study.definition import Study
from study.measurements.kind import NATS, SHARE, Reading

TABLE = "table.parquet"
TYPES = {"number": pa.float64(), "count": pa.int64(), "flag": pa.bool_()}
MODEL_COLUMNS = {  # of the model, before its figures
    **dict.fromkeys(("study", "run", "average", "phase"), pa.string()),
    **{"peak_lr": pa.float64(), "step": pa.int64(), "tokens": pa.int64()},
    **dict.fromkeys(
        ("training_flops", "learning_rate", "train_loss", "held_out_loss"), pa.float64()
    ),
}
AXIS_COLUMNS = {  # of the run, after all figures; other axes of the study follow
    "weight_decay": pa.float64(),
    "batch_size": pa.int64(),
    "engine": pa.string(),
    "seed": pa.int64(),
}
UNITS = {  # of these; other columns state their own
    **dict.fromkeys(("train_loss", "held_out_loss"), NATS),
    **{"tokens": "tokens", "step": "steps", "batch_size": "sequences"},
    "training_flops": "FLOP",
    **dict.fromkeys(("peak_lr", "learning_rate", "weight_decay"), SHARE),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Row(Mapping[str, Any]):
    """A model of a run with all that is measured of it; as a mapping, its columns by name.

    Attributes:
        average: its name; None for the weights as training left them.
        phase: warmup, stable or anneal; of a released model its stage.
        step: as its stage counts; None where the source of a released model states none.
        training_flops: of all passes up to there, before a branch too; None of a released model.
        figures: the measured columns, None where one is not measured, and further axes.
    """

    study: str
    run: str
    average: str | None
    phase: str
    step: int | None
    peak_lr: float | None = None
    tokens: int | None = None
    training_flops: float | None = None
    learning_rate: float | None = None
    train_loss: float | None = None
    held_out_loss: float | None = None
    weight_decay: float | None = None
    batch_size: int | None = None
    engine: str | None = None
    seed: int | None = None
    figures: Mapping[str, float | int | bool | str | None]

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


def figure_columns(study: Study) -> dict[str, Reading]:
    """Return what the table holds of all measurements of the study, by its columns."""
    return {
        name: reading
        for kind, settings in study.measurements
        for name, reading in kind.columns(settings).items()
    }


def axis_columns(study: Study) -> dict[str, Axis]:
    """Return the study's axes that a row has no field for, by the names of their columns.

    An axis with the name of another column is `factor_NAME`, such as the budget: `factor_tokens`.
    """
    columns = {}
    for axis in study.axes:
        # a stage is the phase of its rows
        if axis.key not in {"peak_lr", STAGE, *AXIS_COLUMNS}:
            is_taken = axis.key in _OF_MODEL or axis.key in figure_columns(study)
            columns[f"factor_{axis.key}" if is_taken else axis.key] = axis
    return columns


def values_on(axis: Axis) -> dict[str, Value | None]:
    """Return the values of a column by run: numbers, or texts where one of the values is a word.

    A control without a number of its own has none.
    """
    values = axis.values.items()
    if axis.scale == "category":
        return {run: str(value) for run, value in values}
    # The word of a control becomes an empty cell.
    return {run: None if isinstance(value, str) else value for run, value in values}


def _type_on(axis: Axis) -> pa.DataType:
    types = {type(value) for value in values_on(axis).values()}
    if str in types:
        return pa.string()
    return pa.float64() if float in types else pa.int64()


def schema_of(study: Study) -> pa.Schema:
    """Return names and types of the table's columns, which the study alone decides."""
    axes, figures = axis_columns(study), figure_columns(study)
    columns = MODEL_COLUMNS | {name: TYPES[each.type] for name, each in figures.items()}
    columns |= AXIS_COLUMNS | {name: _type_on(axis) for name, axis in axes.items()}
    units = UNITS | {name: each.unit for name, each in figures.items()}
    units |= {name: axis.unit for name, axis in axes.items() if axis.unit}
    return pa.schema(
        [
            pa.field(name, kind, metadata={"unit": units.get(name, "")})
            for name, kind in columns.items()
        ]
    )


def trained(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of weights as training left them."""
    return [row for row in rows if row["average"] is None]


def write_table(directory: Path, study: Study, rows: Sequence[Row]) -> Path:
    """Write table.parquet aside and rename it; its metadata has our version and a hash of it."""
    path = directory / TABLE
    table = pa.Table.from_pylist(list(map(dict, rows)), schema=schema_of(study))
    # The seal is over values, not bytes: `read_table` computes it again from what it has read.
    metadata = {PROJECT: version(), SEAL: digest_of_json(table.to_pylist())}
    table = table.replace_schema_metadata(metadata)
    with replaced_file(path) as aside:
        pq.write_table(table, aside)
    return path


def read_table(directory: Path, study: Study) -> list[Row]:
    """Return the rows of table.parquet; columns that an older version did not have are empty.

    Raises:
        UserError: it was not collected yet, is damaged, or was changed after it was written.
    """
    again = f"make it again with 'python -m study collect {directory.name}'"
    path = directory / TABLE
    if not path.exists():
        raise UserError(f"{path} does not exist; {again.replace(' again', '')}")
    try:
        with pq.ParquetFile(path) as file:  # `read_table` would import pandas first
            table = file.read()
        rows = table.to_pylist()
    except (pa.ArrowException, ValueError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); {again}") from None
    if (table.schema.metadata or {}).get(SEAL.encode()) != digest_of_json(rows).encode():
        raise UserError(f"{path} was changed after it was written (its {SEAL} differs); {again}")
    # By the study as it is now, which may have columns that the file lacks.
    columns = schema_of(study).names
    return [Row.of({name: row.get(name) for name in columns}) for row in rows]
