"""The rows of table.parquet as metrics, and the way back: what MLflow holds is enough to write the table again.

A row is told by its run, by the average that it is of, which begins the metric's name, and by its place on the run's
axis. Measurements keep the names of their columns (`quant/gptq-b3-g128/kl_divergence`, `lawa5x500/quant/...`); another
column is `checkpoint/COLUMN`, and a text is a part of the name: `checkpoint/phase/anneal` is 1 where the phase is
anneal. What is null has no metric. Tags hold what numbers cannot: names and types of the columns on the study's run,
and on each training run its place among the others, its axis, and the hash of its rows, which an export has to meet.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from study.collect import schema_of
from study.settings import Study
from study.tracking.points import Point, Row
from train.command import UserError
from train.run_directory import replaced_file

CHECKPOINT, FINAL = "checkpoint", "final"
ROW_METRIC = re.compile(rf"(?:(?P<average>[^/]+)/)?(?P<column>(?:{CHECKPOINT}|quant|curvature)/.+)")
TABLE_METRIC = re.compile(rf"{ROW_METRIC.pattern}|{FINAL}/.+")
IDENTITY = ("study", "run", "average")  # columns that are told by the run and the metric's name
PLACE = "place"  # of a row among those of its run and step
HEADLINES = ("held_out_loss", "curvature/trace", "curvature/lambda_max")  # also shown as final/...
SPEC_HEADLINES = ("kl_divergence", "relative_error")
TYPES = {str(kind): kind for kind in (pa.string(), pa.float64(), pa.int64(), pa.bool_())}
CHARACTERS = 5000  # of the columns in one tag


def axis_of(rows: list[Row]) -> str:
    """What MLflow's steps count in a run with these rows: tokens, or steps where a row does not know its tokens."""
    return "step" if any(row["tokens"] is None for row in rows) else "tokens"


def digest_of(rows: list[Row]) -> str:
    """Identity of a run's rows of the table, in their order."""
    return hashlib.sha256(json.dumps([list(row.items()) for row in rows]).encode()).hexdigest()


def table_points(rows: list[Row], milliseconds: dict[int, int], last_step: int) -> list[Point]:
    """The points of one run's rows; the headlines of the weights at the end of the run also as final/..."""
    axis, points, places = axis_of(rows), [], dict[int, int]()
    for row in rows:
        at, prefix = row[axis], f"{row['average']}/" if row["average"] else ""
        place = places[at] = places.get(at, -1) + 1
        for column, value in {**row, PLACE: place}.items():
            if column in IDENTITY or value is None:
                continue
            name = column if column.startswith(("quant/", "curvature/")) else f"{CHECKPOINT}/{column}"
            name, number = (f"{name}/{value}", 1.0) if isinstance(value, str) else (name, float(value))
            points.append(Point(prefix + name, at, number, milliseconds.get(at, 0)))
    for row in rows:
        if row["step"] == last_step and row["average"] is None:
            points += _headlines(row, axis, milliseconds)
    return points


def _headlines(row: Row, axis: str, milliseconds: dict[int, int]) -> list[Point]:
    """Short names for MLflow's pages that draw one number per run."""
    at, found = row[axis], []
    for column, value in row.items():
        parts = column.split("/")
        is_of_spec = parts[0] == "quant" and parts[-1] in SPEC_HEADLINES
        if value is not None and (is_of_spec or column in HEADLINES):
            short = "/".join(parts[1:]) if len(parts) > 1 else column
            found.append(Point(f"{FINAL}/{short}", at, float(value), milliseconds.get(at, 0)))
    return found


def column_tags(study: Study) -> dict[str, str]:
    """Names and types of the columns as tags of the study's run."""
    text = json.dumps({field.name: str(field.type) for field in schema_of(study)})
    return {
        f"quantdyn.columns.{number}": text[start : start + CHARACTERS]
        for number, start in enumerate(range(0, len(text), CHARACTERS))
    }


def schema_from(tags: dict[str, str]) -> pa.Schema:
    """The schema that `column_tags` wrote."""
    parts: list[str] = []
    while (name := f"quantdyn.columns.{len(parts)}") in tags:
        parts.append(tags[name])
    return pa.schema([(name, TYPES[kind]) for name, kind in json.loads("".join(parts)).items()])


def rows_from(study: str, run: str, schema: pa.Schema, points: Iterable[Point]) -> list[Row]:
    """The rows of one run in their order, from its points."""
    found: dict[tuple[str | None, int], dict[str, Any]] = {}
    for name, at, value, _ in points:
        match = ROW_METRIC.fullmatch(name)
        if match:
            found.setdefault((match["average"], at), {})[match["column"].removeprefix(f"{CHECKPOINT}/")] = value
    rows = []
    for (average, _), cells in sorted(found.items(), key=lambda item: (item[0][1], item[1].get(PLACE, 0))):
        texts = dict(name.split("/", 1) for name in cells if "/" in name and name.split("/")[0] in schema.names)
        row: Row = {field.name: _cell(field, cells, texts) for field in schema}
        rows.append(row | {"study": study, "run": run, "average": average})
    return rows


def _cell(field: pa.Field, cells: dict[str, float], texts: dict[str, str]) -> Any:
    """A value in the type of its column; MLflow keeps doubles, which hold integers up to 2^53 and truth values."""
    if pa.types.is_string(field.type):
        return texts.get(field.name)
    value = cells.get(field.name)
    if value is None or pa.types.is_floating(field.type):
        return value
    return bool(value) if pa.types.is_boolean(field.type) else int(value)


def write_exported(path: Path, schema: pa.Schema, rows: list[Row]) -> None:
    """Writes the parquet file aside and renames it."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent} does not exist; make it, or give another --out")
    with replaced_file(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), aside)
