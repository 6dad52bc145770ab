"""Quantization at the end of every run against what the study varies.

Peak learning rates, weight decays, or budgets of tokens under one schedule and another (arXiv
2510.06213, figures 3 to 5; the last is the question of arXiv 2411.04330).
"""

from collections.abc import Iterable

from study.axes import Varied
from study.definition import Study
from study.figures.canvas import Canvas, described, interval_of
from study.figures.charts import GREY, Chart, Quantity, Rows, columns_of, data, marks, panel
from study.figures.drawn.quantization import MEASURES
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import Runs, looks_for
from study.measurements.titles import spec_title

MOST_TICKS = 8  # as many values are written below the axis, each at its place
GROUP = "group"
ANNEALED = "annealed"  # where only controls say more of themselves


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
    # amounts of tokens are in the unit of the study's other figures
    is_tokens = varied.unit == "tokens"
    per = canvas.unit if is_tokens else 1
    places = {run: value / per for run, value in varied.values.items()}
    x = Quantity(
        varied.name,
        f"{canvas.tokens.unit} tokens" if is_tokens else varied.unit,
        is_log=varied.scale == "log",
        ticks=_ticks(places.values()),
    )
    lines, columns = _lines(canvas.study, varied, canvas.runs), columns_of(len(specs))
    panels: list[tuple[Rows, Chart]] = []
    for name, y in MEASURES.items():
        for spec in specs:
            column, title = f"quant/{spec}/{name}", spec_title(spec)
            rows = []
            for run, row in canvas.last_rows(column).items():
                if run in places:
                    values = x.values(places[run]) | y.values(row[column], interval_of(row, column))
                    group = {GROUP: varied.groups[run] or ANNEALED}
                    rows.append(described(row, title, canvas.runs.looks[run], **group) | values)
            if rows:
                panels.append((rows, _panel(rows, lines, x, y, columns)))
    return drawn(panels, columns)


def _ticks(places: Iterable[float]) -> tuple[float, ...]:
    values = tuple(sorted(set(places)))
    return values if len(values) <= MOST_TICKS else ()


def _lines(study: Study, varied: Varied, runs: Runs) -> Runs:
    """Return a colour for each group of runs; where there is one group, those of the runs."""
    groups = list(dict.fromkeys(text or ANNEALED for text in varied.groups.values()))
    if len(groups) < 2:
        return runs
    heading = " and ".join(axis.name for axis in study.axes if axis.key != varied.key)
    looks = dict(zip(groups, looks_for(groups), strict=True))
    return Runs(heading, looks, field=GROUP)


def _panel(rows: Rows, lines: Runs, x: Quantity, y: Quantity, columns: int) -> Chart:
    is_grouped = lines.field == GROUP
    layers = [marks(rows, lines, x, y, has_line=is_grouped)]
    if not is_grouped:
        mark = {"type": "line", "color": GREY, "strokeWidth": 1}
        layers.insert(0, data(rows, mark=mark, encoding={"x": x.encoding(), "y": y.encoding()}))
    return panel(layers, rows[0]["panel"], columns)
