"""All measurements of a study as one table: a row per run and measured model, a column per figure.

A row is the weights after a step, or an average of weights up to there (then `average` names it); curvature is not
measured of averages, nor did training evaluate a soup, which is made from exports, and further methods quantize the
last weights of a run alone, of which quantization steps are measured too: what was not measured is null. Columns have
the names of the MLflow metrics: `held_out_loss`, `quant/gptq-b3-g32/relative_error`, `curvature/trace`,
`curvature/step-gptq-b3-g32/predicted`. There is neither a time nor a path in the table: a study that was killed and
resumed gives the same one.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from study.layout import (
    checkpoint_directory,
    curvature_result,
    last_model,
    model_record,
    quantization_result,
    step_result,
)
from study.released import ReleasedRun
from study.settings import MeasuredModel, Study
from train.command import UserError
from train.config import RunConfig
from train.run_directory import CHECKPOINT_JSON, read_checkpoint_record, replaced_file
from train.schedules import learning_rate

TABLE = "table.parquet"
INTERVAL_FIGURES = (
    "cross_entropy",
    "cross_entropy_quantized",
    "absolute_error",
    "relative_error",
    "kl_divergence",
    "top1_agreement",
)
COUNT_FIGURES = ("tokens", "documents")
Places = dict[str, tuple[str, ...]]  # a figure, and where it lies below `measured`
# A figure's columns, and where they lie in the estimate of a result; a ratio to nothing has no estimate.
ESTIMATE: dict[str, tuple[str | int, ...]] = {
    "": ("mean",),
    "_standard_error": ("standard_error",),
    "_low": ("interval", 0),
    "_high": ("interval", 1),
}
TRACES: Places = {name: (name,) for name in ("trace", "gauss_newton_trace", "fisher_trace")}
CURVATURE_FIGURES: Places = {"loss": ("loss",), "trace_probes": ("trace", "probes")}
LAMBDA_MAX: Places = {  # null where it was not asked for
    "lambda_max": ("lambda_max", "value"),
    "lambda_max_residual": ("lambda_max", "residual"),
    "lambda_max_converged": ("lambda_max", "converged"),
    "lambda_max_iterations": ("lambda_max", "iterations"),
}
STEP_FIGURES: Places = {
    **{name: ("whole", name) for name in ("first_order", "second_order", "predicted", "measured", "remainder")},
    "relative_difference": ("whole", "relative_difference"),
    **{name: ("whole", "ratios", name) for name in ("step_to_mean", "step_to_signed")},
}
INTEGERS = {"step", "tokens", "documents", "trace_probes", "lambda_max_iterations"}


class Collected(NamedTuple):
    """The table's rows and how much of the study they cover."""

    rows: list[dict[str, Any]]
    found: int
    expected: int


def quantization_columns(spec: str) -> list[str]:
    """Columns of one quantization; `_low` and `_high` bound the figure before them."""
    columns = [f"{figure}{bound}" for figure in INTERVAL_FIGURES for bound in ("", "_low", "_high")]
    return [f"quant/{spec}/{column}" for column in (*columns, *COUNT_FIGURES)]


def schema_of(study: Study) -> pa.Schema:
    """Names and types of the table's columns, decided by the study alone."""
    fields = [("study", pa.string()), ("run", pa.string()), ("average", pa.string()), ("phase", pa.string())]
    fields += [("peak_lr", pa.float64()), ("step", pa.int64()), ("tokens", pa.int64()), ("learning_rate", pa.float64())]
    fields += [("train_loss", pa.float64()), ("held_out_loss", pa.float64())]
    names = [name for spec in study.quantization.at_the_end for name in quantization_columns(spec)]
    if study.curvature:
        names += [f"curvature/{figure}{column}" for figure in TRACES for column in ESTIMATE]
        names += [f"curvature/{figure}" for figure in (*CURVATURE_FIGURES, *LAMBDA_MAX)]
    steps = [f"curvature/step-{spec}" for spec in study.quantization.by_block]
    names += [f"{step}/{figure}{column}" for step in steps for figure in STEP_FIGURES for column in ESTIMATE]
    for name in names:
        figure = name.rpartition("/")[2]
        is_flag = figure.endswith("_converged")
        fields.append((name, pa.bool_() if is_flag else pa.int64() if figure in INTEGERS else pa.float64()))
    return pa.schema(fields)


def phase_of(run: RunConfig | ReleasedRun, step: int) -> str:
    """Part of the schedule that update `step` belongs to: warmup, stable or anneal; of a released model its stage."""
    if isinstance(run, ReleasedRun):
        return run.name
    if step <= run.warmup_steps:
        return "warmup"
    return "anneal" if run.schedule.anneal and step > run.schedule.anneal.start_step else "stable"


def read_measured(path: Path) -> dict[str, Any]:
    """The `measured` part of a result.json; UserError if it is none."""
    try:
        return dict(json.loads(path.read_text())["measured"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path} is no result of a measurement; remove it and run the study again") from None


def quantization_values(path: Path, spec: str) -> dict[str, Any]:
    """Columns of one quantization from its result.json."""
    measured = read_measured(path)
    try:
        values = {figure: measured[figure] for figure in (*INTERVAL_FIGURES, *COUNT_FIGURES)}
        for figure in INTERVAL_FIGURES:
            values[f"{figure}_low"], values[f"{figure}_high"] = measured["intervals"][figure]
    except KeyError as error:
        raise UserError(f"{path} has no {error} under 'measured'; remove it and run the study again") from None
    return {f"quant/{spec}/{figure}": value for figure, value in values.items()}


def _entry(path: Path, measured: dict[str, Any], keys: Sequence[str | int]) -> Any:
    """What lies below the keys; UserError where they lead nowhere."""
    entry: Any = measured
    for key in keys:
        try:
            entry = entry[key]
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{path} has no measured.{'.'.join(map(str, keys))}; remove it and run the study again"
            ) from None
    return entry


def _estimates(path: Path, measured: dict[str, Any], figures: Places) -> dict[str, Any]:
    """All columns of figures that are estimates."""
    values: dict[str, Any] = {}
    for figure, keys in figures.items():
        is_there = _entry(path, measured, keys) is not None
        for column, place in ESTIMATE.items():
            values[f"{figure}{column}"] = _entry(path, measured, (*keys, *place)) if is_there else None
    return values


def curvature_values(path: Path) -> dict[str, Any]:
    """Columns of traces and eigenvalue from their result.json."""
    measured = read_measured(path)
    values = _estimates(path, measured, TRACES)
    values |= {figure: _entry(path, measured, keys) for figure, keys in CURVATURE_FIGURES.items()}
    has_top = "lambda_max" in measured
    values |= {figure: _entry(path, measured, keys) if has_top else None for figure, keys in LAMBDA_MAX.items()}
    return {f"curvature/{figure}": value for figure, value in values.items()}


def step_values(path: Path, spec: str) -> dict[str, Any]:
    """Columns of one quantization step from its result.json."""
    values = _estimates(path, read_measured(path), STEP_FIGURES)
    return {f"curvature/step-{spec}/{figure}": value for figure, value in values.items()}


def _training_values(directory: Path, run: RunConfig | ReleasedRun, model: MeasuredModel) -> dict[str, Any] | None:
    """Columns that training decides; None while there is no such model."""
    if (model.soup_of or model.revision) and not (directory / model_record(run.name, model)).exists():
        return None
    if isinstance(run, ReleasedRun):
        told = run.at(model.step)
        rates = {"learning_rate": told.learning_rate, "train_loss": None, "held_out_loss": None}
        return {"peak_lr": run.peak_lr, "tokens": told.tokens, **rates}
    peak = {"peak_lr": run.optimizer.peak_lr}
    if model.soup_of:
        last = {"tokens": model.step * run.tokens_per_step, "learning_rate": learning_rate(run, model.step)}
        return peak | last | {"train_loss": None, "held_out_loss": None}
    checkpoint = directory / checkpoint_directory(run.name, model)
    if not (checkpoint / CHECKPOINT_JSON).exists():
        return None
    record = read_checkpoint_record(checkpoint)
    return peak | {
        "tokens": record.tokens,
        "learning_rate": record.learning_rate,
        "train_loss": None if model.average else record.train_loss,
        "held_out_loss": record.held_out_loss,
    }


def collect_rows(directory: Path, study: Study) -> Collected:
    """One row per run and measured model, in the order of the study; what is not measured yet is left out."""
    rows, found, expected = [], 0, 0
    for run in study.runs:
        for model in study.models_of(run):
            results: list[tuple[Path, Callable[[Path], dict[str, Any]]]] = [
                (directory / quantization_result(run.name, model, spec), partial(quantization_values, spec=spec))
                for spec in study.specs_of(run, model)
            ]
            if study.curvature and model.average is None:
                results.append((directory / curvature_result(run.name, model), curvature_values))
            if model == last_model(run):
                results += [
                    (directory / step_result(run, spec), partial(step_values, spec=spec))
                    for spec in study.quantization.by_block
                ]
            expected += 1 + len(results)
            trained_on = _training_values(directory, run, model)
            if trained_on is None:
                continue
            row = {
                "study": study.name,
                "run": run.name,
                "average": model.average,
                "phase": phase_of(run, model.step),
                "step": model.step,
                **trained_on,
            }
            found += 1
            for path, values in results:
                if path.exists():
                    row |= values(path)
                    found += 1
            rows.append(row)
    return Collected(rows, found, expected)


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of weights as training left them."""
    return [row for row in rows if row["average"] is None]


def write_table(directory: Path, study: Study, rows: list[dict[str, Any]]) -> Path:
    """Writes table.parquet aside and renames it."""
    path = directory / TABLE
    with replaced_file(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema_of(study)), aside)
    return path


def read_table(directory: Path, study: Study) -> list[dict[str, Any]]:
    """The rows of table.parquet; UserError if it was not collected yet."""
    path = directory / TABLE
    if not path.exists():
        raise UserError(f"{path} does not exist; make it with 'python -m study collect {directory.name}'")
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); make it again with 'python -m study collect'") from None
    if table.schema.names != schema_of(study).names:
        raise UserError(f"{path} is of another version of the study; make it again with 'python -m study collect'")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
