"""Quantization and loss along training, and by every method and task at its end."""

from collections.abc import Callable
from dataclasses import replace

from study.definition import Study
from study.figures.canvas import Canvas
from study.figures.charts import (
    Chart,
    Rows,
    columns_of,
    level,
    marks,
    panel,
    percentage,
    thousandths,
)
from study.figures.figure import Drawn, drawn, figure
from study.measurements.kind import Column
from study.measurements.quantization import DIVERGENCE, LOSS_INCREASE, RELATIVE_ERROR
from study.measurements.tasks import DEGRADATION
from study.measurements.titles import spec_title
from study.report.tables import shown_methods

ERROR_AXIS = percentage("relative error of the loss", holds_zero=True)
DIVERGENCE_AXIS = thousandths("KL divergence", holds_zero=True)
INCREASE_AXIS = thousandths("quantized - full-precision loss", holds_zero=True)
AXES = {
    DIVERGENCE: DIVERGENCE_AXIS,
    RELATIVE_ERROR: ERROR_AXIS,
    LOSS_INCREASE: INCREASE_AXIS,
}


def shows_first(measure: Column) -> Callable[[Study], bool]:
    """Return what says of a study whether it shows a measure before all others."""
    return lambda study: study.quantization.measures[0] == measure


def _along(canvas: Canvas, measure: Column, specs: tuple[str, ...]) -> Drawn | None:
    """Draw a panel per spec."""
    quantity = AXES[measure]
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
    headline=shows_first(DIVERGENCE),
)
def kl_divergence(canvas: Canvas) -> Drawn | None:
    """Draw the divergence of every checkpoint."""
    return _along(canvas, DIVERGENCE, canvas.study.quantization.specs)


@figure(
    "quantization_error",
    "Relative error of the loss against training tokens: quantized loss / full-precision loss - 1"
    " on held-out text. Bars are intervals.",
    headline=shows_first(RELATIVE_ERROR),
)
def quantization_error(canvas: Canvas) -> Drawn | None:
    """Draw the paper's measure of every checkpoint."""
    return _along(canvas, RELATIVE_ERROR, canvas.study.quantization.specs)


@figure(
    "absolute_error",
    "Absolute error of the loss against training tokens: quantized loss - full-precision loss on"
    " held-out text. Bars are intervals.",
    shows_first(LOSS_INCREASE),
    headline=shows_first(LOSS_INCREASE),
)
def absolute_error(canvas: Canvas) -> Drawn | None:
    """Draw the measure of the paper's workshop version, of every checkpoint."""
    return _along(canvas, LOSS_INCREASE, canvas.study.quantization.specs)


@figure(
    "methods_along_training",
    "The error of quantization against training tokens by further methods: whether the learning"
    " rate and its decay do to them what they do to the first. Bars are intervals.",
    lambda study: bool(study.quantization.along),
)
def methods_along_training(canvas: Canvas) -> Drawn | None:
    """Draw the error of every checkpoint by each further method."""
    settings = canvas.study.quantization
    return _along(canvas, settings.measures[0], settings.along)


ROW_PIXELS = 46
# Of what is left to lose: half as many errors again are 50%.
LOST = percentage("accuracy lost / (1 - accuracy before)", holds_zero=True)
MEAN = "mean of the tasks"


@figure(
    "methods",
    "Every method at the end of training: its errors, KL divergence on a logarithmic axis. Bars are"
    " intervals.",
    lambda study: bool(study.quantization.further),
)
def methods(canvas: Canvas) -> Drawn | None:
    """Draw a line of marks per method, those of the runs below each other."""
    specs = shown_methods(canvas.study)
    category: Chart = {"field": "method", "type": "nominal", "title": ""}
    category["sort"] = [spec_title(spec) for spec in specs]
    offset = _below_each_other(canvas)
    panels: list[tuple[Rows, Chart]] = []
    measures = canvas.study.quantization.measures
    for measure in measures:
        quantity = AXES[measure]
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
        height = ROW_PIXELS * len(specs)
        panels.append((rows, panel([*zero, values], "", len(measures), height)))
    return drawn(panels, len(measures))


def _below_each_other(canvas: Canvas) -> Chart:
    """Return the place of a run among the marks of a line."""
    labels = [look.label for look in canvas.runs.looks.values()]
    return {"field": "run", "type": "nominal", "sort": labels}


@figure(
    "tasks",
    "Accuracy on downstream tasks that quantization costs, (Acc(W) - Acc(W_q)) / (1 - Acc(W)): what"
    " it adds to the errors, as a share of them. At the end of every run, task by task and in the"
    " mean. Bars are intervals over questions.",
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


@figure(
    "accuracy_degradation",
    "What quantization costs in loss, left, and in accuracy, right, against training tokens, a row"
    " per spec. Accuracy: (Acc(W) - Acc(W_q)) / (1 - Acc(W)), in the mean of the tasks. Bars are"
    " intervals, of the loss over documents, of the accuracy over questions. Dotted, on the second"
    " axis: the learning rate as a share of its peak.",
    lambda study: study.tasks is not None and study.tasks.along,
)
def accuracy_degradation(canvas: Canvas) -> Drawn | None:
    """Draw two panels per spec, as arXiv 2510.06213 does of SmolLM3."""
    settings, quantization = canvas.study.tasks, canvas.study.quantization
    assert settings
    measure, panels = quantization.measures[0], list[tuple[Rows, Chart]]()
    for spec in settings.specs:
        title, beside = spec_title(spec), Rows()
        # A spec may be asked of whose losses are not measured along training.
        if spec in quantization.everywhere:
            beside = canvas.along(AXES[measure], measure.of(spec), title)
        lost = canvas.along(LOST, DEGRADATION.of(spec), title)
        for rows, quantity in ((beside, AXES[measure]), (lost, LOST)):
            if rows:
                panels.append((rows, canvas.curves(rows, quantity, 2)))
    return drawn(panels, 2, canvas.rates)
