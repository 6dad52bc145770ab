"""Averages of weights beside the weights themselves (arXiv 2510.06213, figure 4)."""

from collections.abc import Sequence
from typing import Any

from dynamics.figures.quantization import DIVERGENCE_AXIS, ERROR_AXIS
from study.definition import Study
from study.figures.canvas import WEIGHTS, Canvas
from study.figures.charts import NATS, Chart, Quantity, Rows
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import STAR
from study.measurements.curvature import RELATIVE
from study.measurements.quantization import (
    CROSS_ENTROPY,
    DIVERGENCE,
    QUANTIZED_LOSS,
    RELATIVE_ERROR,
)
from study.measurements.titles import spec_title
from study.results.averages import average_label, kept_averages, lowest_spec

SOUP = "soup"
SHARPNESS = Quantity("relative trace of the Hessian", NATS)
PAIRED = (ERROR_AXIS, DIVERGENCE_AXIS, SHARPNESS)  # columns with bars
DASHES = ([5, 3], [7, 2, 2, 2], [2, 2])  # of averages kept in training; weights are solid


def _applies(study: Study) -> bool:
    return bool(study.soups) or any(run.averages for run in study.trained)


@figure(
    "averages",
    "Averages of weights beside the weights themselves: loss in full precision, quantized loss,"
    " relative error and KL divergence at the fewest bits, and the relative trace of the Hessian"
    " where the study measures curvature of averages. Dashed: an average kept in training. Stars:"
    " soups, at the last checkpoint that they take in. Bars are intervals; those of the losses are"
    " left out: over documents, which all models share, they are as wide as the panel.",
    _applies,
)
def averages(canvas: Canvas) -> Drawn | None:
    """Draw weights, averages kept in training and soups."""
    spec = lowest_spec(canvas.study)
    title = spec_title(spec)
    shown = [
        (Quantity("loss", NATS), CROSS_ENTROPY.of(spec), "Full precision"),
        (Quantity("quantized loss", NATS), QUANTIZED_LOSS.of(spec), title),
        (ERROR_AXIS, RELATIVE_ERROR.of(spec), title),
        (DIVERGENCE_AXIS, DIVERGENCE.of(spec), title),
    ]
    settings = canvas.study.curvature
    if settings and settings.averages:
        shown.append((SHARPNESS, RELATIVE.name, "Curvature"))
    columns = 2 if len(shown) == 4 else 3
    by_panel = [
        (quantity, rows)
        for quantity, name, panel in shown
        if (rows := _rows(canvas, quantity, name, panel))
    ]
    # one for all panels, which share their scales: curvature may be measured of fewer models
    styles = _styles([row["series"] for _, rows in by_panel for row in rows])
    panels = [
        (rows, _panel(canvas, rows, quantity, columns, styles)) for quantity, rows in by_panel
    ]
    return drawn(panels, columns, canvas.rates)


def _rows(canvas: Canvas, quantity: Quantity, column: str, panel: str) -> Rows:
    measured = {row["average"] for row in canvas.table}
    kept = [average for average in kept_averages(canvas.study) if average.name in measured]
    # By the name in the table, where the weights themselves have none.
    models: dict[str | None, str] = {None: WEIGHTS}
    models |= {average.name: average_label(average, kept) for average in kept}
    models |= {soup.name: SOUP for soup in canvas.study.soups if soup.name in measured}
    has_bars = quantity in PAIRED
    parts = (
        canvas.along(quantity, column, panel, has_bars=has_bars, average=average, series=series)
        for average, series in models.items()
    )
    return [row for part in parts for row in part]


def _styles(all_series: Sequence[str]) -> dict[str, Chart]:
    """Return markers and dashes of the models, as encodings of points and lines."""
    series = list(dict.fromkeys(all_series))
    shapes = ["circle", *["square", "diamond", "triangle-up"] * len(series)][: len(series)]
    # Weights come first and are solid; repeated, the others are enough for any number.
    dashes = [[1, 0], *DASHES * len(series)][: len(series)]
    if SOUP in series:
        shapes[-1], dashes[-1] = STAR, [0, 1]  # soups have no line
    model: dict[str, Any] = {"field": "series", "type": "nominal", "title": "model"}
    shape = model | {"scale": {"domain": series, "range": shapes}}
    dash = model | {"scale": {"domain": series, "range": dashes}}
    return {"points": {"shape": shape}, "lines": {"strokeDash": dash}}


def _panel(
    canvas: Canvas, rows: Rows, quantity: Quantity, columns: int, styles: dict[str, Chart]
) -> Chart:
    # The axis is fitted to what is trained after the first average.
    since = [row["tokens"] for row in rows if row["series"] != WEIGHTS]
    if quantity not in PAIRED and since:
        # the losses of the first steps, far above, would flatten the others
        quantity = quantity.near([row for row in rows if row["tokens"] >= min(since)])
    return canvas.curves(rows, quantity, columns, **styles)
