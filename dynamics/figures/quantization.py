"""Quantization and loss along training, and by every method and task at its end."""

from dataclasses import replace

from study.figures.canvas import Canvas
from study.figures.charts import (
    NATS,
    Chart,
    Quantity,
    Rows,
    columns_of,
    level,
    marks,
    panel,
)
from study.figures.figure import Drawn, drawn, figure
from study.measurements.kind import Column
from study.measurements.quantization import (
    DIVERGENCE,
    RELATIVE_ERROR,
)
from study.measurements.tasks import DEGRADATION
from study.measurements.titles import spec_title
from study.report.tables import shown_methods

ERROR_AXIS = Quantity("relative error of the loss", is_percent=True, holds_zero=True)
DIVERGENCE_AXIS = Quantity("KL(full || quantized)", NATS, holds_zero=True)
MEASURES = {DIVERGENCE: DIVERGENCE_AXIS, RELATIVE_ERROR: ERROR_AXIS}


def _along(canvas: Canvas, measure: Column, specs: tuple[str, ...]) -> Drawn | None:
    """Draw a panel per spec."""
    quantity = MEASURES[measure]
    columns = columns_of(len(specs))
    panels = [
        (rows, canvas.curves(rows, quantity, columns))
        for spec in specs
        if (rows := canvas.along(quantity, measure.of(spec), spec_title(spec)))
    ]
    return drawn(panels, columns, canvas.rates)


@figure(
    "kl_divergence",
    "KL divergence of the quantized from the full-precision model against training tokens. Bars"
    " are intervals. It cannot change sign, and varies less between documents than a difference"
    " of losses. Dotted, on the second axis: the learning rate as a share of its peak.",
    headline=True,
)
def kl_divergence(canvas: Canvas) -> Drawn | None:
    """Draw the divergence of every checkpoint."""
    return _along(canvas, DIVERGENCE, canvas.study.quantization.specs)


@figure(
    "quantization_error",
    "Relative error of the loss against training tokens: quantized loss / full-precision loss - 1"
    " on held-out text. Bars are intervals.",
)
def quantization_error(canvas: Canvas) -> Drawn | None:
    """Draw the paper's measure of every checkpoint."""
    return _along(canvas, RELATIVE_ERROR, canvas.study.quantization.specs)


@figure(
    "methods_along_training",
    "KL divergence against training tokens by further methods: whether the learning rate and its"
    " decay do to them what they do to the first. Bars are intervals.",
    lambda study: bool(study.quantization.along),
)
def methods_along_training(canvas: Canvas) -> Drawn | None:
    """Draw the divergence of every checkpoint by each further method."""
    return _along(canvas, DIVERGENCE, canvas.study.quantization.along)


ROW_PIXELS = 46
LOST = Quantity("accuracy lost to quantization / accuracy before", is_percent=True)
MEAN = "mean of the tasks"


@figure(
    "methods",
    "Every method at the end of training: KL divergence on a logarithmic axis, and relative error"
    " of the loss. Bars are intervals.",
    lambda study: bool(study.quantization.further),
)
def methods(canvas: Canvas) -> Drawn | None:
    """Draw a line of marks per method, those of the runs below each other."""
    specs = shown_methods(canvas.study)
    category: Chart = {"field": "method", "type": "nominal", "title": ""}
    category["sort"] = [spec_title(spec) for spec in specs]
    offset = _below_each_other(canvas)
    panels: list[tuple[Rows, Chart]] = []
    for measure, quantity in MEASURES.items():
        rows = [
            row
            for spec in specs
            for row in canvas.at_the_end(
                quantity, measure.of(spec), quantity.title, method=spec_title(spec)
            )
        ]
        if not rows:
            continue
        # the names of the methods are beside the first panel
        y = category | {"axis": {"labels": not panels, "labelLimit": 560}}
        x = replace(quantity, holds_zero=False)
        x = x.logarithmic_for(rows) if measure == DIVERGENCE else x
        values = marks(rows, canvas.runs, x, y, has_line=False, yOffset=offset)
        zero = [] if x.is_log else [level(0.0, "x")]
        panels.append((rows, panel([*zero, values], "", 2, ROW_PIXELS * len(specs))))
    return drawn(panels, 2)


def _below_each_other(canvas: Canvas) -> Chart:
    """Return the place of a run among the marks of a line."""
    labels = [look.label for look in canvas.runs.looks.values()]
    return {"field": "run", "type": "nominal", "sort": labels}


@figure(
    "tasks",
    "Accuracy on downstream tasks that quantization costs, as a share of the accuracy before: at"
    " the end of every run, task by task and in the mean. Bars are intervals over questions.",
    lambda study: study.tasks is not None,
)
def tasks(canvas: Canvas) -> Drawn | None:
    """Draw a panel per spec, with a line of marks per task."""
    settings = canvas.study.tasks
    assert settings
    names = {MEAN: "", **{task: task for task in settings.names}}
    category: Chart = {"field": "task", "type": "nominal", "title": "", "sort": list(names)}
    columns, panels = columns_of(len(settings.specs)), []
    for spec in settings.specs:
        rows = [
            row
            for task, key in names.items()
            for row in canvas.at_the_end(
                LOST, DEGRADATION.of(spec, key), spec_title(spec), task=task
            )
        ]
        if rows:
            offset = _below_each_other(canvas)
            values = marks(rows, canvas.runs, LOST, category, has_line=False, yOffset=offset)
            height = ROW_PIXELS * len(names)
            chart = panel([level(0.0, "x"), values], rows[0]["panel"], columns, height)
            panels.append((rows, chart))
    return drawn(panels, columns)
