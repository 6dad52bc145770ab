"""Quantization while training: the probe's figures beside those of the saved checkpoints."""

from typing import Any

from quant_eval.specs import parse_spec
from study.figures.canvas import Canvas
from study.figures.charts import LINE, NATS, Chart, Quantity, Rows, columns_of, data, marks
from study.figures.figure import Drawn, drawn, figure
from study.measurements.quantization import LOSS_INCREASE
from study.measurements.titles import spec_title
from train.run.directory import RunDirectory
from train.run.metrics import QUANTIZATION, read_metrics
from train.run.probe import short_name

INCREASE = Quantity("quantized - full loss", NATS, holds_zero=True)
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
    metrics = {name: read_metrics(RunDirectory(canvas.directory / name).metrics) for name in probes}
    pairs, linears = dict[tuple[str, str], None](), dict[str, None]()
    for run in probes.values():
        assert run.probe
        pairs |= dict.fromkeys(run.probe.specs(bits) for bits in run.probe.bits)
        linears |= dict.fromkeys(map(short_name, run.probe.linears(run.model)))

    rows_of = _Rows(canvas, metrics)
    columns = columns_of(max(len(pairs), 2))
    panels = [_losses(rows_of, rtn, columns) for rtn, _ in pairs]
    panels += [_outputs(rows_of, linear, pair, columns) for linear in linears for pair in pairs]
    return drawn([(rows, chart) for rows, chart in panels if rows], columns, canvas.rates)


class _Rows:
    """The rows of metrics.jsonl of every run, as rows of a figure."""

    def __init__(self, canvas: Canvas, metrics: dict[str, list[dict[str, Any]]]) -> None:
        self.canvas, self._metrics = canvas, metrics

    def __call__(self, key: str, quantity: Quantity, panel: str, series: str) -> Rows:
        """Return a figure of the probe along training."""
        canvas, rows = self.canvas, Rows()
        for run, of_run in self._metrics.items():
            head = {"panel": panel, "run": canvas.runs.looks[run].label, "series": series}
            for row in of_run:
                if key in row:
                    values = canvas.tokens.values(row["tokens"] / canvas.unit)
                    values |= quantity.values(row[key])
                    rows.append(head | {"step": row["step"], "tokens": row["tokens"]} | values)
        return rows


def _losses(rows_of: _Rows, spec: str, columns: int) -> tuple[Rows, Chart]:
    canvas, title = rows_of.canvas, spec_title(spec)
    during = rows_of(f"{QUANTIZATION}/{spec}/absolute_error", INCREASE, title, "while training")
    column = LOSS_INCREASE.of(spec)
    saved = Rows()
    if any(column in row for row in canvas.table):
        saved = canvas.along(INCREASE, column, title, has_bars=False, series="checkpoint")
    points = marks(saved, canvas.runs, canvas.tokens, INCREASE, has_line=False)
    layers = [_lines(canvas, during, INCREASE), *([points] if saved else [])]
    return [*during, *saved], canvas.panel(layers, title, columns)


def _outputs(
    rows_of: _Rows, linear: str, specs: tuple[str, str], columns: int
) -> tuple[Rows, Chart]:
    canvas, bits = rows_of.canvas, parse_spec(specs[0]).bits
    title = f"{linear}, {bits} bits"
    rows = [
        row
        for spec in specs
        for row in rows_of(
            f"{QUANTIZATION}/{spec}/output_error/{linear}",
            OUTPUT,
            title,
            parse_spec(spec).title,
        )
    ]
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
