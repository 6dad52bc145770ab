"""The end of training by every method (arXiv 2510.06213, appendix A), and on every task."""

from dataclasses import replace

from dynamics.figures.quantization import MEASURES
from quant_eval.specs import parse_spec
from study.definition import Study
from study.figures.canvas import Canvas, described, interval_of
from study.figures.charts import Chart, Quantity, Rows, columns_of, level, marks, panel
from study.figures.figure import Drawn, drawn, figure
from study.measurements.titles import spec_title

ROW_PIXELS = 46
LOST = Quantity("accuracy lost to quantization / accuracy before", is_percent=True)
MEAN = "mean of the tasks"


def shown_methods(study: Study) -> list[str]:
    """Return every spec of the last checkpoints, by rising number of bits."""
    return sorted(study.quantization.at_the_end, key=lambda spec: parse_spec(spec).bits)


@figure(
    "methods",
    90,
    "Every method at the end of training: KL divergence on a logarithmic axis, and relative error"
    " of the loss. Bars are intervals.",
    lambda study: bool(study.quantization.further),
)
def methods(canvas: Canvas) -> Drawn | None:
    """Draw a line of marks per method, those of the runs below each other."""
    specs = shown_methods(canvas.study)
    place: Chart = {"field": "method", "type": "nominal", "title": ""}
    place["sort"] = [spec_title(spec) for spec in specs]
    offset = _below_each_other(canvas)
    panels: list[tuple[Rows, Chart]] = []
    for name, quantity in MEASURES.items():
        rows = _rows(canvas, specs, name)
        if not rows:
            continue
        # the names of the methods are beside the first panel
        y = place | {"axis": {"labels": not panels, "labelLimit": 560}}
        x = replace(quantity, holds_zero=False)
        x = x.logarithmic_for(rows) if name == "kl_divergence" else x
        values = marks(rows, canvas.runs, x, y, has_line=False, yOffset=offset)
        zero = [] if x.is_log else [level(0.0, "x")]
        panels.append((rows, panel([*zero, values], "", 2, ROW_PIXELS * len(specs))))
    return drawn(panels, 2)


def _rows(canvas: Canvas, specs: list[str], name: str) -> Rows:
    quantity, rows = MEASURES[name], []
    for spec in specs:
        column = f"quant/{spec}/{name}"
        for run, row in canvas.last_rows(column).items():
            look, method = canvas.runs.looks[run], spec_title(spec)
            values = quantity.values(row[column], interval_of(row, column))
            rows.append(described(row, quantity.title, look, method=method) | values)
    return rows


def _below_each_other(canvas: Canvas) -> Chart:
    """Return the place of a run among the marks of a line."""
    labels = [look.label for look in canvas.runs.looks.values()]
    return {"field": "run", "type": "nominal", "sort": labels}


@figure(
    "tasks",
    92,
    "Accuracy on downstream tasks that quantization costs, as a share of the accuracy before: at"
    " the end of every run, task by task and in the mean. Bars are intervals over questions.",
    lambda study: study.tasks is not None,
)
def tasks(canvas: Canvas) -> Drawn | None:
    """Draw a panel per spec, with a line of marks per task."""
    settings = canvas.study.tasks
    assert settings
    names = {MEAN: "", **{task: f"{task}/" for task in settings.tasks}}
    place: Chart = {"field": "task", "type": "nominal", "title": "", "sort": list(names)}
    columns, panels = columns_of(len(settings.specs)), []
    for spec in settings.specs:
        rows = [row for task, key in names.items() for row in _of_task(canvas, spec, task, key)]
        if rows:
            offset = _below_each_other(canvas)
            values = marks(rows, canvas.runs, LOST, place, has_line=False, yOffset=offset)
            height = ROW_PIXELS * len(names)
            chart = panel([level(0.0, "x"), values], rows[0]["panel"], columns, height)
            panels.append((rows, chart))
    return drawn(panels, columns)


def _of_task(canvas: Canvas, spec: str, task: str, key: str) -> Rows:
    column, looks = f"tasks/{spec}/{key}degradation", canvas.runs.looks
    return [
        described(row, spec_title(spec), looks[run], task=task)
        | LOST.values(row[column], interval_of(row, column))
        for run, row in canvas.last_rows(column).items()
    ]
