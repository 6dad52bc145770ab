"""Quantization and loss along training, and by every method and task at its end."""

from dataclasses import replace

from quant_eval.specs import parse_spec
from study.figures.canvas import WEIGHTS, Canvas, described, interval_of
from study.figures.charts import (
    LINE,
    NATS,
    Chart,
    Quantity,
    Rows,
    columns_of,
    data,
    level,
    marks,
    panel,
)
from study.figures.figure import Drawn, drawn, figure
from study.measurements.kind import Column
from study.measurements.quantization import (
    CROSS_ENTROPY,
    DIVERGENCE,
    LOSS_INCREASE,
    QUANTIZED_LOSS,
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


LOSS = Quantity("held-out loss", NATS)
FIRST_SHARE = 0.08  # of training, whose losses are far above the others


@figure(
    "validation_loss",
    "Held-out loss in full precision against training tokens; markers are checkpoints.",
    lambda study: bool(study.trained),
)
def validation_loss(canvas: Canvas) -> Drawn | None:
    """Draw the losses of metrics.jsonl, and those of the checkpoints."""
    runs = [run.name for run in canvas.study.trained]
    during = canvas.during(LOSS, "held_out_loss", "", runs, series="during training")
    saved = canvas.along(LOSS, "held_out_loss", "", series="checkpoint")
    first = FIRST_SHARE * canvas.most_tokens
    y = LOSS.near([row for row in (*during, *saved) if row["tokens"] >= first])
    axes = {"x": canvas.tokens.encoding(), "y": y.encoding(), "color": canvas.runs.colour}
    curve = data(during, mark=LINE | {"strokeWidth": 1.2}, encoding=axes)
    points = marks(saved, canvas.runs, canvas.tokens, y, has_line=False)
    return drawn([([*during, *saved], canvas.panel([curve, points], "", 1))], 1, canvas.rates)


BEFORE, AFTER = Quantity("full-precision loss", NATS), Quantity("quantized loss", NATS)
INCREASE = Quantity("quantized - full-precision loss", NATS)
BEFORE_ANNEAL = ["warmup", "stable"]  # phases of runs trained here; released ones name their own
LATE_SHARE = 0.5  # of training: the first half loses most of its loss, and would hide the rest


@figure(
    "full_against_quantized",
    "What quantization adds to the loss, against the loss before it: a point per checkpoint of the"
    " second half of training, large points in the anneal. Bars are intervals. Training moves to"
    " the left.",
)
def full_against_quantized(canvas: Canvas) -> Drawn | None:
    """Draw a panel per spec, the most bits first."""
    specs = sorted(canvas.study.quantization.specs, key=lambda spec: -parse_spec(spec).bits)
    columns = columns_of(len(specs))
    panels = [
        (rows, _panel(canvas, rows, columns))
        for spec in specs
        if (rows := _rows_of_loss(canvas, spec))
    ]
    return drawn(panels, columns)


def _rows_of_loss(canvas: Canvas, spec: str) -> Rows:
    loss, increase = CROSS_ENTROPY.of(spec), LOSS_INCREASE.of(spec)
    rows = []
    for run, look in canvas.runs.looks.items():
        for row in canvas.rows_of(run, loss):
            values = BEFORE.values(row[loss]) | AFTER.values(row[QUANTIZED_LOSS.of(spec)])
            values |= INCREASE.values(row[increase], interval_of(row, increase))
            rows.append(described(row, spec_title(spec), look, series=WEIGHTS) | values)
    return rows


def _panel(canvas: Canvas, rows: Rows, columns: int) -> Chart:
    most = max(row["tokens"] for row in rows)
    # The high losses of the first steps would take most of the axis.
    last = [row for row in rows if row["tokens"] >= LATE_SHARE * most]
    x, y = BEFORE.near(last), INCREASE.logarithmic_for(last)
    early = {"field": "phase", "oneOf": BEFORE_ANNEAL}
    sizes = {"size": {"condition": {"test": early, "value": 15}, "value": 45}}
    # Lines follow training: losses go up and down and would be sorted otherwise.
    by_step = {"order": {"field": "step", "type": "quantitative"}}
    values = marks(last, canvas.runs, x, y, points=sizes, lines=by_step, match="step")
    zero = [] if y.is_log else [level(0.0)]
    return panel([*zero, values], rows[0]["panel"], columns)


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
