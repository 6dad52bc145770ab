"""The loss in full precision and quantized: along training, and one against the other."""

from dataclasses import replace

from base.grouping import grouped
from quant_eval.specs import parse_spec
from study.definition import Study
from study.figures.canvas import WEIGHTS, Canvas, described
from study.figures.charts import (
    INK,
    LINE,
    NATS,
    NEAR,
    Chart,
    Quantity,
    Rows,
    around,
    columns_of,
    data,
    diagonal,
    marks,
    panel,
)
from study.figures.figure import Drawn, drawn, figure
from study.measurements.quantization import CROSS_ENTROPY, QUANTIZED_LOSS
from study.measurements.titles import spec_title
from study.released import ReleasedRun
from study.results.averages import lowest_spec

LOSS = Quantity("held-out loss", NATS)
FULL = "full precision"
WHILE_TRAINING = "Full precision, while training"
SOLID, DASHES = [1, 0], ([6, 3], [8, 2, 2, 2], [2, 2], [12, 3])  # of specs, the most bits first
FIRST_SHARE = 0.08  # of training, whose losses are far above the others


@figure(
    "losses",
    "Held-out loss against training tokens, in full precision and quantized, on the text that"
    " quantization is measured on: of one model in one panel, of several runs in a panel per width,"
    " on one scale. While training: every evaluation of the training, on held-out sequences of its"
    " own text. Dotted, on the second axis: the learning rate as a share of its peak.",
)
def losses(canvas: Canvas) -> Drawn | None:
    """Draw the losses of the checkpoints, and those of metrics.jsonl."""
    specs = most_bits_first(canvas.study)
    saved = _along(canvas, FULL, CROSS_ENTROPY.of(lowest_spec(canvas.study)))
    for spec in specs:
        saved += _along(canvas, spec_title(spec), QUANTIZED_LOSS.of(spec))
    runs = [run.name for run in canvas.study.trained]
    during = canvas.during(LOSS, "held_out_loss", WHILE_TRAINING, runs, series=FULL)

    dash = canvas.runs.dash
    if _is_one_model(canvas.study):
        dash = _dash([FULL, *map(spec_title, specs)])
        saved = [row | {"panel": "Checkpoints" if during else ""} for row in saved]
    panels = list(grouped(saved, lambda row: row["panel"]).values())
    columns = min(len(panels) + bool(during), 2)
    # One scale for all widths: they are compared with each other.
    y = _without_the_first(canvas, saved)
    shown = [(rows, _panel(canvas, rows, y, dash, columns)) for rows in panels]
    if during:
        shown.append((during, _evaluations(canvas, during, dash, columns)))
    return drawn(shown, columns, canvas.rates)


def most_bits_first(study: Study) -> list[str]:
    """Return the specs of every checkpoint, those of the most bits first."""
    return sorted(study.quantization.specs, key=lambda spec: -parse_spec(spec).bits)


def _along(canvas: Canvas, width: str, column: str) -> Rows:
    return canvas.along(LOSS, column, width[0].upper() + width[1:], has_bars=False, series=width)


def _is_one_model(study: Study) -> bool:
    """Return whether the study is of one run, or of the stages of one released model."""
    # Stages follow each other, so that their lines, a dash for each width, hardly overlap.
    stages = [run for run in study.runs if isinstance(run, ReleasedRun)]
    starts = [each for each in stages if not (each.parent or each.restarts or each.average_of)]
    return len(study.runs) == 1 or (not study.trained and len(starts) <= 1)


def _dash(widths: list[str]) -> Chart:
    """Return the dashes of the specs, after full precision, which is solid."""
    # Repeated, they are enough for any number of specs.
    scale = {"domain": widths, "range": [SOLID, *DASHES * len(widths)][: len(widths)]}
    legend = {"symbolType": "stroke", "symbolSize": 700, "symbolStrokeWidth": 1.6}
    return {"field": "series", "type": "nominal", "title": "weights", "scale": scale} | {
        "legend": legend | {"symbolStrokeColor": INK}
    }


def _panel(canvas: Canvas, rows: Rows, y: Quantity, dash: Chart, columns: int) -> Chart:
    x, small = canvas.tokens, {"size": {"value": 16}}
    lines = marks(rows, canvas.runs, x, y, lines={"strokeDash": dash}, points=small)
    layers = [*canvas.links(rows, x, y, dash), lines]
    return canvas.panel(layers, rows[0]["panel"], columns)


def _evaluations(canvas: Canvas, rows: Rows, dash: Chart, columns: int) -> Chart:
    y = _without_the_first(canvas, rows)
    axes = {"x": canvas.tokens.encoding(), "y": y.encoding(), "color": canvas.runs.colour}
    axes |= {"strokeDash": dash} if dash else {}
    # Evaluations are too dense for markers.
    line = data(rows, mark=LINE | {"strokeWidth": 1.2}, encoding=axes)
    return canvas.panel([line], WHILE_TRAINING, columns)


def _without_the_first(canvas: Canvas, rows: Rows) -> Quantity:
    return LOSS.near(canvas.since(rows, FIRST_SHARE * canvas.most_tokens))


BEFORE, AFTER = Quantity("full-precision loss", NATS), Quantity("quantized loss", NATS)
BEFORE_ANNEAL = ["warmup", "stable"]
LATE_SHARE = 0.5  # of a run: most of its loss is lost in the first half, which would hide the rest


@figure(
    "full_against_quantized",
    "Loss of the quantized against that of the full-precision model, in the same units, along the"
    " second half of every run; branches begin at the checkpoint that they leave. Training moves to"
    " the left; large points of runs trained here are in the anneal, open ones are averages of"
    " weights. Dashed: equal losses; as far as a point is above, as much does quantization cost.",
)
def full_against_quantized(canvas: Canvas) -> Drawn | None:
    """Draw a panel per spec, the most bits first."""
    specs = most_bits_first(canvas.study)
    columns = columns_of(len(specs))
    panels = [
        (rows, _square(canvas, rows, columns))
        for spec in specs
        if (rows := _rows_of_loss(canvas, spec))
    ]
    return drawn(panels, columns)


def _rows_of_loss(canvas: Canvas, spec: str) -> Rows:
    full, quantized = CROSS_ENTROPY.of(spec), QUANTIZED_LOSS.of(spec)
    averages = dict.fromkeys(row["average"] for row in canvas.table)  # None: of weights
    rows = []
    for run, look in canvas.runs.looks.items():
        for average in averages:
            for row in canvas.rows_of(run, full, average):
                values = BEFORE.values(row[full]) | AFTER.values(row[quantized])
                series = average or WEIGHTS
                rows.append(described(row, spec_title(spec), look, series=series) | values)
    return rows


def _late(canvas: Canvas, rows: Rows) -> Rows:
    """Return the second half of runs from scratch, and the whole of branches."""
    by_label, late = grouped(rows, lambda row: row["run"]), Rows()
    for run in canvas.study.runs:
        of_run = by_label.get(canvas.runs.looks[run.name].label, [])
        end = max((row["tokens"] for row in of_run), default=0)
        first = 0 if canvas.study.origin(run) else LATE_SHARE * end
        late += [row for row in of_run if row["tokens"] >= first]
    return late


def larger_in_the_anneal(study: Study, before: int, within: int) -> Chart:
    """Return the sizes of points; of released models, whose phases are their stages, one."""
    if not study.trained:
        return {"size": {"value": (before + within) // 2}}
    early = {"field": "phase", "oneOf": BEFORE_ANNEAL}
    return {"size": {"condition": {"test": early, "value": before}, "value": within}}


def _square(canvas: Canvas, rows: Rows, columns: int) -> Chart:
    late = _late(canvas, rows)
    # One domain and a square panel: as far above the line is as far as to its right.
    reach = [value for row in late for value in (row[BEFORE.label], row[AFTER.label])]
    x, y = (replace(axis, domain=around(reach, NEAR)) for axis in (BEFORE, AFTER))
    sizes = larger_in_the_anneal(canvas.study, 15, 45)
    # Lines follow training: losses go up and down and would be sorted otherwise.
    by_step = {"order": {"field": "step", "type": "quantitative"}}
    weights = [row for row in late if row["series"] == WEIGHTS]
    averages = [row for row in late if row["series"] != WEIGHTS]
    starts = [row for row in rows if row["series"] == WEIGHTS]
    layers = [
        diagonal(x, y),
        *canvas.links(starts, x, y, canvas.runs.dash),
        marks(weights, canvas.runs, x, y, points=sizes, lines=by_step, match="step"),
    ]
    if averages:
        layers.append(marks(averages, canvas.runs, x, y, has_line=False, open_where="true"))
    chart = panel(layers, rows[0]["panel"], columns)
    return chart | {"height": chart["width"]}
