"""Loss increase of quantization against the loss before it (arXiv 2510.06213, figure 3)."""

from dataclasses import replace
from typing import Any

from quant_eval.specs import parse_spec
from study.figures.canvas import Canvas, facts_of, interval_of
from study.figures.charts import (
    NATS,
    Chart,
    Quantity,
    Rows,
    around,
    columns_of,
    grid,
    level,
    marks,
    panel,
)
from study.figures.figure import Drawn, figure
from study.measurements.titles import spec_title

BEFORE, AFTER = Quantity("full-precision loss", NATS), Quantity("quantized loss", NATS)
INCREASE = Quantity("quantized - full-precision loss", NATS)
BEFORE_ANNEAL = ["warmup", "stable"]  # phases of runs trained here; released ones name their own
LATE_SHARE = 0.5  # of training: the first half loses most of its loss, and would hide the rest
NEAR = 0.06


@figure(
    "full_against_quantized",
    60,
    "What quantization adds to the loss, against the loss before it: a point per checkpoint of the"
    " second half of training, large points in the anneal. Bars are intervals. Training moves to"
    " the left.",
)
def full_against_quantized(canvas: Canvas) -> Drawn | None:
    """Draw a panel per spec, the most bits first."""
    specs = sorted(canvas.study.quantization.specs, key=lambda spec: -parse_spec(spec).bits)
    columns = columns_of(len(specs))
    by_spec = {spec: own for spec in specs if (own := _rows(canvas, spec))}
    panels = [_panel(canvas, own, columns) for own in by_spec.values()]
    rows = [row for own in by_spec.values() for row in own]
    return Drawn(rows, grid(panels, columns)) if rows else None


def _rows(canvas: Canvas, spec: str) -> Rows:
    loss, increase = f"quant/{spec}/cross_entropy", f"quant/{spec}/absolute_error"
    rows = []
    for run, look in canvas.runs.looks.items():
        for row in canvas.rows_of(run, loss):
            head: dict[str, Any] = {"panel": spec_title(spec), "run": look.label}
            values = BEFORE.values(row[loss]) | AFTER.values(row[f"{loss}_quantized"])
            values |= INCREASE.values(row[increase], interval_of(increase)(row))
            rows.append(head | {"series": "weights"} | facts_of(row) | values)
    return rows


def _panel(canvas: Canvas, rows: Rows, columns: int) -> Chart:
    most = max(row["tokens"] for row in rows)
    last = [row for row in rows if row["tokens"] >= LATE_SHARE * most]
    x = replace(BEFORE, domain=around(BEFORE.reach(last), NEAR))
    y = INCREASE.logarithmic_for(last)
    early = {"field": "phase", "oneOf": BEFORE_ANNEAL}
    size = {"condition": {"test": early, "value": 15}, "value": 45}
    order = {"field": "step", "type": "quantitative"}
    values = marks(last, canvas.runs, x, y, point_size=size, line_order=order)
    zero = [] if y.is_log else [level(0.0)]
    return panel([*zero, values], rows[0]["panel"], columns)
