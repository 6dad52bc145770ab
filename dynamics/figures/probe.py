"""Quantization while training: the probe's figures beside those of the saved checkpoints."""

from collections.abc import Iterable

from quant_eval.specs import parse_spec
from study.figures.canvas import Canvas
from study.figures.charts import LINE, Chart, Quantity, Rows, columns_of, data, marks, thousandths
from study.figures.figure import Drawn, drawn, figure
from study.measurements.quantization import LOSS_INCREASE
from study.measurements.titles import spec_title
from train.run.metrics import QUANTIZATION
from train.run.probe import short_name

INCREASE = thousandths("quantized - full loss", holds_zero=True)
OUTPUT = Quantity("relative output error", holds_zero=True)
METHOD: Chart = {"field": "series", "type": "nominal", "title": "method"}


@figure(
    "probe",
    "Quantization while training. Loss with the linears of all blocks rounded to nearest, less that"
    " without, on a few held-out sequences; markers are saved checkpoints by the same method, on"
    " the evaluated documents, which are another text. Relative output error: squared error of a"
    " linear's outputs over their squares, on the inputs that it has in these sequences.",
    lambda study: any(run.probe for run in study.trained),
)
def probe(canvas: Canvas) -> Drawn | None:
    """Draw a panel per width for the loss, and for each linear at each width."""
    probes = {run.name: run for run in canvas.study.trained if run.probe}
    pairs, linears = dict[tuple[str, str], None](), dict[str, None]()
    for run in probes.values():
        assert run.probe
        # For every width a pair of methods; runs that share one share its panel.
        pairs |= dict.fromkeys(run.probe.specs(bits) for bits in run.probe.bits)
        linears |= dict.fromkeys(map(short_name, run.probe.linears(run.model)))

    columns = columns_of(max(len(pairs), 2))
    panels = [_losses(canvas, probes, rtn, columns) for rtn, _ in pairs]
    panels += [
        _outputs(canvas, probes, linear, pair, columns) for linear in linears for pair in pairs
    ]
    return drawn([(rows, chart) for rows, chart in panels if rows], columns, canvas.rates)


def _losses(canvas: Canvas, runs: Iterable[str], spec: str, columns: int) -> tuple[Rows, Chart]:
    key, title = f"{QUANTIZATION}/{spec}/absolute_error", spec_title(spec)
    during = canvas.during(INCREASE, key, title, runs, series="while training")
    column = LOSS_INCREASE.of(spec)
    saved = Rows()
    # The probe may round by a method that checkpoints are not measured with.
    if any(column in row for row in canvas.table):
        saved = canvas.along(INCREASE, column, title, has_bars=False, series="checkpoint")
    points = marks(saved, canvas.runs, canvas.tokens, INCREASE, has_line=False)
    layers = [_lines(canvas, during, INCREASE), *([points] if saved else [])]
    return [*during, *saved], canvas.panel(layers, title, columns)


def _outputs(
    canvas: Canvas, runs: Iterable[str], linear: str, specs: tuple[str, str], columns: int
) -> tuple[Rows, Chart]:
    title, rows = f"{linear}, {parse_spec(specs[0]).bits} bits", Rows()
    for spec in specs:
        key = f"{QUANTIZATION}/{spec}/output_error/{linear}"
        rows += canvas.during(OUTPUT, key, title, runs, series=parse_spec(spec).title)
    return rows, canvas.panel([_lines(canvas, rows, OUTPUT)], title, columns)


def _lines(canvas: Canvas, rows: Rows, quantity: Quantity) -> Chart:
    """Return a line per run and series."""
    encoding = {"x": canvas.tokens.encoding(), "y": quantity.encoding()}
    series = list(dict.fromkeys(row["series"] for row in rows))
    if len(series) > 1:
        dashes = {"domain": series, "range": [[5, 3], [1, 0]]}
        encoding["strokeDash"] = METHOD | {"scale": dashes}
    encoding["color"] = canvas.runs.colour
    return data(rows, mark=LINE | {"point": {"size": 16}}, encoding=encoding)
