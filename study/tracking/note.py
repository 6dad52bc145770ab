"""The description of a study in MLflow: its runs with their final errors, as a Markdown table."""

from collections.abc import Sequence

from base.quantities import MILLI, MILLINATS, significant, typeset, with_interval
from study.definition import Study
from study.measurements.kind import NATS
from study.measurements.quantization import MEASURES
from study.results.table import Row
from study.tracking.streams import measured_metric
from train.run.metrics import HELD_OUT_LOSS

MOST_CHARACTERS = 5000  # of a tag, in every version of MLflow


def main_metric(study: Study) -> str:
    """Return the name of the metric that a study's runs are ordered by: its error."""
    metric = measured_metric(_error(study))
    assert metric is not None
    return metric[0]


def _error(study: Study) -> str:
    """Return the column of the table that has the error a study shows first."""
    settings = study.quantization
    return MEASURES[settings.measure].of(settings.specs[0])


def results_note(study: Study, rows: Sequence[Row]) -> str:
    """Return the study in words, then a row per run, the smallest error first."""
    column, measure = _error(study), MEASURES[study.quantization.measure]
    scale, unit = (MILLI, typeset(MILLINATS)) if measure.unit == NATS else (100.0, "percent")
    at_the_end = {(run.name, run.total_steps) for run in study.runs}
    ends = sorted(
        (
            row
            for row in rows
            if row["average"] is None
            and (row["run"], row["step"]) in at_the_end
            and row.get(column) is not None
        ),
        key=lambda row: float(row[column]),
    )
    title = f"{measure.title}, {study.quantization.specs[0]}, {unit} [95%]"
    lines = [
        study.description,
        "",
        f"| run | {title} | held-out loss, {NATS} |",
        "|:--|--:|--:|",
    ]
    for count, row in enumerate(ends):
        low, high = (row.get(f"{column}_{end}") for end in ("low", "high"))
        if low is None or high is None:
            error = significant(scale * float(row[column]))
        else:
            error = with_interval(float(row[column]), low, high, scale)
        loss = row.get(HELD_OUT_LOSS)
        line = f"| {row['run']} | {error} | {'' if loss is None else f'{loss:.4f}'} |"
        if sum(len(each) + 1 for each in [*lines, line]) > MOST_CHARACTERS - 100:
            lines += ["", f"{len(ends) - count} more: report.html among the artifacts has them."]
            break
        lines.append(line)
    return "\n".join(lines) if ends else study.description
