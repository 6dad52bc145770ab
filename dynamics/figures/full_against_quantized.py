"""Loss increase of quantization against the loss before it (arXiv 2510.06213, figure 3)."""

from quant_eval.specs import parse_spec
from study.figures.canvas import WEIGHTS, Canvas, described, interval_of
from study.figures.charts import NATS, Chart, Quantity, Rows, columns_of, level, marks, panel
from study.figures.figure import Drawn, drawn, figure
from study.measurements.titles import spec_title

BEFORE, AFTER = Quantity("full-precision loss", NATS), Quantity("quantized loss", NATS)
INCREASE = Quantity("quantized - full-precision loss", NATS)
BEFORE_ANNEAL = ["warmup", "stable"]  # phases of runs trained here; released ones name their own
LATE_SHARE = 0.5  # of training: the first half loses most of its loss, and would hide the rest


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
    panels = [
        (rows, _panel(canvas, rows, columns)) for spec in specs if (rows := _rows(canvas, spec))
    ]
    return drawn(panels, columns)


def _rows(canvas: Canvas, spec: str) -> Rows:
    loss, increase = f"quant/{spec}/cross_entropy", f"quant/{spec}/absolute_error"
    rows = []
    for run, look in canvas.runs.looks.items():
        for row in canvas.rows_of(run, loss):
            values = BEFORE.values(row[loss]) | AFTER.values(row[f"{loss}_quantized"])
            values |= INCREASE.values(row[increase], interval_of(row, increase))
            rows.append(described(row, spec_title(spec), look, series=WEIGHTS) | values)
    return rows


def _panel(canvas: Canvas, rows: Rows, columns: int) -> Chart:
    most = max(row["tokens"] for row in rows)
    last = [row for row in rows if row["tokens"] >= LATE_SHARE * most]
    x, y = BEFORE.near(last), INCREASE.logarithmic_for(last)
    early = {"field": "phase", "oneOf": BEFORE_ANNEAL}
    sizes = {"size": {"condition": {"test": early, "value": 15}, "value": 45}}
    by_step = {"order": {"field": "step", "type": "quantitative"}}
    values = marks(last, canvas.runs, x, y, points=sizes, lines=by_step, match="step")
    zero = [] if y.is_log else [level(0.0)]
    return panel([*zero, values], rows[0]["panel"], columns)
