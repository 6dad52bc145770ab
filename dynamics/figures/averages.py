"""Averages of weights beside the weights themselves (arXiv 2510.06213, figure 4)."""

from collections.abc import Sequence, Set
from itertools import cycle
from typing import Any

from dynamics.figures.quantization import AXES
from study.definition import Study
from study.figures.canvas import WEIGHTS, Canvas
from study.figures.charts import NATS, Chart, Quantity, Rows
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import STAR
from study.measurements.curvature import RELATIVE
from study.measurements.quantization import CROSS_ENTROPY, QUANTIZED_LOSS, RELATIVE_ERROR
from study.measurements.titles import spec_title
from study.released import ReleasedRun
from study.results.averages import Averaging, averagings_of, lowest_spec

SHARPNESS = Quantity("relative trace of the Hessian", NATS)
PAIRED = (*AXES.values(), SHARPNESS)  # columns with bars
STARS = (  # of soups, with five, four and six points
    STAR,
    "M0,-2L.5,-.5L2,0L.5,.5L0,2L-.5,.5L-2,0L-.5,-.5Z",
    "M0,-2L.5,-.87L1.73,-1L1,0L1.73,1L.5,.87L0,2L-.5,.87L-1.73,1L-1,0L-1.73,-1L-.5,-.87Z",
)
NO_LINE = [0, 1]
PUBLISHED = "published soup"
DASHES = ([5, 3], [7, 2, 2, 2], [2, 2])  # of averages; weights are solid


def _applies(study: Study) -> bool:
    return bool(averagings_of(study))


@figure(
    "averages",
    "Averages of weights beside the weights themselves: loss in full precision, quantized loss,"
    " relative error and KL divergence at the fewest bits, and the relative trace of the Hessian"
    " where the study measures curvature of averages. Stars are soups; other averages are kept in"
    " training, or LAWA over consecutive revisions of a stage. Each is at the tokens of the last"
    " checkpoint that it takes in. Bars are intervals; those of the losses are"
    " left out: over documents, which all models share, they are as wide as the panel.",
    _applies,
)
def averages(canvas: Canvas) -> Drawn | None:
    """Draw weights, averages kept in training and soups."""
    # Averages are dashed, unless controls would be drawn as the runs that they belong to.
    if not canvas.runs.needs_dashes:
        canvas = canvas.undashed()
    spec = lowest_spec(canvas.study)
    title = spec_title(spec)
    shown = [
        (Quantity("loss", NATS), CROSS_ENTROPY.of(spec), "Full precision"),
        (Quantity("quantized loss", NATS), QUANTIZED_LOSS.of(spec), title),
    ]
    # The relative error first, as in the paper's figure 4c.
    errors = dict.fromkeys((RELATIVE_ERROR, *canvas.study.quantization.measures))
    shown += [(AXES[error], error.of(spec), title) for error in errors]
    settings = canvas.study.curvature
    if settings and settings.averages:
        shown.append((SHARPNESS, RELATIVE.name, "Curvature"))
    columns = 2 if len(shown) == 4 else 3
    made = _made(canvas)
    by_panel = [
        (quantity, rows)
        for quantity, name, panel in shown
        if (rows := _rows(canvas, made, quantity, name, panel))
    ]
    # one for all panels, which share their scales: curvature may be measured of fewer models
    soups = {PUBLISHED, *(average.label(made) for average in made if average.is_soup)}
    styles = _styles(canvas, [row["series"] for _, rows in by_panel for row in rows], soups)
    panels = [
        (rows, _panel(canvas, rows, quantity, columns, styles)) for quantity, rows in by_panel
    ]
    return drawn(panels, columns, canvas.rates)


def _made(canvas: Canvas) -> list[Averaging]:
    """Return the averages of the study that the table has."""
    measured = {row["average"] for row in canvas.table}
    return [average for average in averagings_of(canvas.study) if average.name in measured]


def _rows(
    canvas: Canvas, made: Sequence[Averaging], quantity: Quantity, column: str, panel: str
) -> Rows:
    # By the name in the table, where the weights themselves have none.
    models: dict[str | None, str] = {None: WEIGHTS}
    models |= {average.name: average.label(made) for average in made}
    has_bars = quantity in PAIRED
    parts = (
        canvas.along(quantity, column, panel, has_bars=has_bars, average=average, series=series)
        for average, series in models.items()
    )
    published = _published(canvas)
    return [
        row | ({"series": PUBLISHED} if row["run"] in published else {})
        for part in parts
        for row in part
    ]


def _published(canvas: Canvas) -> set[str]:
    """Return the labels of released models that are soups themselves, as many a branch main."""
    return {
        canvas.runs.looks[run.name].label
        for run in canvas.study.runs
        if isinstance(run, ReleasedRun) and run.average_of and len(run.revisions) == 1
    }


def _styles(canvas: Canvas, all_series: Sequence[str], soups: Set[str]) -> dict[str, Chart]:
    """Return markers and dashes of the models, as encodings of points and lines.

    Where dashes are those of controls, markers alone distinguish the models.
    """
    series = sorted(dict.fromkeys(all_series), key=lambda name: name in soups)  # soups last
    shapes = ["circle", *["square", "diamond", "triangle-up"] * len(series)][: len(series)]
    # Weights come first and are solid; repeated, the others are enough for any number.
    dashes = [[1, 0], *DASHES * len(series)][: len(series)]
    starred = [place for place, name in enumerate(series) if name in soups]
    for place, star in zip(starred, cycle(STARS), strict=False):
        shapes[place], dashes[place] = star, NO_LINE
    model: dict[str, Any] = {"field": "series", "type": "nominal", "title": "model"}
    shape = model | {"scale": {"domain": series, "range": shapes}}
    if canvas.runs.dash:
        drawn_lines = [float(name not in soups) for name in series]
        opacity = model | {"scale": {"domain": series, "range": drawn_lines}, "legend": None}
        return {"points": {"shape": shape}, "lines": {"strokeOpacity": opacity}}
    dash = model | {"scale": {"domain": series, "range": dashes}}
    return {"points": {"shape": shape}, "lines": {"strokeDash": dash}}


def _panel(
    canvas: Canvas, rows: Rows, quantity: Quantity, columns: int, styles: dict[str, Chart]
) -> Chart:
    # The axis is fitted to what is trained after the first average.
    averaged = [row for row in rows if row["series"] not in (WEIGHTS, PUBLISHED)]
    # averages of what follows pretraining have no tokens of it
    tokens = [row["tokens"] for row in averaged if row[canvas.tokens.label] is not None]
    if quantity not in PAIRED and tokens:
        # the losses of the first steps, far above, would flatten the others
        quantity = quantity.near(canvas.since(rows, min(tokens)))
    return canvas.curves(rows, quantity, columns, **styles)
