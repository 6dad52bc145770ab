"""Quantization methods side by side at the end of training (arXiv 2510.06213, appendix A)."""

from dataclasses import replace
from typing import Any

from quant_eval.specs import parse_spec
from study.definition import Study
from study.figures.canvas import Canvas, facts_of
from study.figures.charts import Chart, Rows, grid, level, marks, panel
from study.figures.drawn.quantization import MEASURES
from study.figures.figure import Drawn, figure
from study.measurements.titles import spec_title

ROW_PIXELS = 46


def shown_methods(study: Study) -> list[str]:
    """Return every spec of the last checkpoints, by rising number of bits."""
    return sorted(study.quantization.at_the_end, key=lambda spec: parse_spec(spec).bits)


@figure(
    "methods",
    90,
    "Every method at the end of training: KL divergence on a logarithmic axis, and relative error"
    " of the loss. Bars are intervals.",
    lambda study: bool(study.quantization.methods),
)
def methods(canvas: Canvas) -> Drawn | None:
    """Draw a line of marks per method, those of the runs below each other."""
    specs = shown_methods(canvas.study)
    place: Chart = {"field": "method", "type": "nominal", "title": ""}
    place["sort"] = [spec_title(spec) for spec in specs]
    labels = [look.label for look in canvas.runs.looks.values()]
    offset = {"field": "run", "type": "nominal", "sort": labels}
    rows: Rows = []
    panels: list[Chart] = []
    for name, quantity in MEASURES.items():
        own = _rows(canvas, specs, name)
        if own:
            # the names of the methods are beside the first panel
            axis = {"labels": not panels, "labelLimit": 400}
            x = replace(quantity, holds_zero=False)
            x = x.logarithmic_for(own) if name == "kl_divergence" else x
            values = marks(
                own, canvas.runs, x, place | {"axis": axis}, has_line=False, yOffset=offset
            )
            zero = [] if x.is_log else [level(0.0, "x")]
            panels.append(panel([*zero, values], "", 2, ROW_PIXELS * len(specs)))
        rows += own
    return Drawn(rows, grid(panels, 2)) if rows else None


def _rows(canvas: Canvas, specs: list[str], name: str) -> Rows:
    last, rows = canvas.last_rows(), []
    for run, look in canvas.runs.looks.items():
        for spec in specs:
            column = f"quant/{spec}/{name}"
            row = last.get(run)
            if row is None or row[column] is None:
                continue
            head: dict[str, Any] = {"panel": MEASURES[name].title, "run": look.label}
            interval = (row[f"{column}_low"], row[f"{column}_high"])
            values = MEASURES[name].values(row[column], interval)
            rows.append(head | {"method": spec_title(spec)} | facts_of(row) | values)
    return rows
