"""Quantization at the end of every run against what the study varies.

Peak learning rates, weight decays, or budgets of tokens under one schedule and another (arXiv
2510.06213, figures 3 to 5; the last is the question of arXiv 2411.04330).
"""

from study.axes import Varied
from study.definition import Study
from study.figures.canvas import Canvas, facts_of, interval_of
from study.figures.charts import GREY, Chart, Quantity, Rows, columns_of, data, grid, marks, panel
from study.figures.drawn.quantization import MEASURES
from study.figures.figure import Drawn, figure
from study.figures.looks import Runs, looks_for
from study.measurements.titles import spec_title

MOST_TICKS = 8  # as many values are written below the axis, each at its place
GROUP = "group"


@figure(
    "ends",
    30,
    "Quantization at the end of every run against the first quantity in which the runs differ; the"
    " others are the colours. KL divergence above, the relative error of the loss below. Bars are"
    " intervals.",
    lambda study: study.varied is not None,
)
def ends(canvas: Canvas) -> Drawn | None:
    """Draw a panel per figure and spec."""
    varied, specs = canvas.study.varied, canvas.study.quantization.specs
    assert varied
    x, lines = _axis(canvas, varied), _lines(canvas.study, varied, canvas.runs)
    columns = columns_of(len(specs))
    rows: Rows = []
    panels: list[Chart] = []
    for name, y in MEASURES.items():
        for spec in specs:
            own = _rows(canvas, varied, x, y, f"quant/{spec}/{name}", spec_title(spec))
            if own:
                panels.append(_panel(own, lines, x, y, columns))
            rows += own
    return Drawn(rows, grid(panels, columns)) if rows else None


def _axis(canvas: Canvas, varied: Varied) -> Quantity:
    """The first axis of the study, on which amounts of tokens are in the unit of the study."""
    per = canvas.unit if varied.unit == "tokens" else 1
    unit = f"{canvas.tokens.unit} tokens" if varied.unit == "tokens" else varied.unit
    values = sorted({value / per for value in varied.values.values()})
    ticks = tuple(values) if len(values) <= MOST_TICKS else ()
    return Quantity(varied.name, unit, is_log=varied.scale == "log", ticks=ticks)


def _lines(study: Study, varied: Varied, runs: Runs) -> Runs:
    """A colour for each group of runs; where there is one group, those of the runs."""
    groups = list(dict.fromkeys(varied.groups.values()))
    if len(groups) < 2:
        return runs
    heading = " and ".join(axis.name for axis in study.axes if axis.key != varied.key)
    looks = dict(zip(groups, looks_for(groups), strict=True))
    return Runs(heading, looks, field=GROUP)


def _rows(
    canvas: Canvas, varied: Varied, x: Quantity, y: Quantity, column: str, title: str
) -> Rows:
    per = canvas.unit if varied.unit == "tokens" else 1
    last, rows = canvas.last_rows(), []
    for run, look in canvas.runs.looks.items():
        row = last.get(run)
        if row is None or run not in varied.values or row[column] is None:
            continue
        head = {"panel": title, "run": look.label, GROUP: varied.groups[run]}
        values = x.values(varied.values[run] / per)
        values |= y.values(row[column], interval_of(column)(row))
        rows.append(head | facts_of(row) | values)
    return rows


def _panel(rows: Rows, lines: Runs, x: Quantity, y: Quantity, columns: int) -> Chart:
    values = marks(rows, lines, x, y, has_line=lines.field == GROUP)
    if lines.field == GROUP:
        return panel([values], rows[0]["panel"], columns)
    mark = {"type": "line", "color": GREY, "strokeWidth": 1}
    line = data(rows, mark=mark, encoding={"x": x.encoding(), "y": y.encoding()})
    return panel([line, values], rows[0]["panel"], columns)
