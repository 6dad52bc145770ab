"""Quantization at the end of every run against what the study varies.

Peak learning rates, weight decays, or budgets of tokens under one schedule and another (arXiv
2510.06213, figures 3 to 5; the last is the question of arXiv 2411.04330).
"""

from dataclasses import replace
from typing import Any

from dynamics.figures.quantization import MEASURES
from study.axes import Varied
from study.definition import Study
from study.differences import Value
from study.figures.canvas import Canvas, described, interval_of
from study.figures.charts import (
    GREY,
    INK,
    Chart,
    Quantity,
    Rows,
    columns_of,
    data,
    marks,
    panel,
)
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import Runs, colours, looks_for
from study.measurements.titles import spec_title

MOST_TICKS = 8  # as many values are written below the axis, each at its place
GROUP = "group"
ANNEALED = "annealed"  # where only controls say more of themselves


@figure(
    "ends",
    30,
    "Quantization at the end of every run against the first quantity in which the runs differ; the"
    " others are the colours, dashed: not annealed. KL divergence above, the relative error of the"
    " loss below. Bars are intervals.",
    lambda study: study.varied is not None,
)
def ends(canvas: Canvas) -> Drawn | None:
    """Draw a panel per figure and spec."""
    varied, specs = canvas.study.varied, canvas.study.quantization.specs
    assert varied
    x, places = _place(canvas, varied)
    field = x.label if isinstance(x, Quantity) else varied.name
    lines, columns = _lines(canvas.study, varied, canvas.runs), columns_of(len(specs))
    panels: list[tuple[Rows, Chart]] = []
    for name, y in MEASURES.items():
        for spec in specs:
            column, title = f"quant/{spec}/{name}", spec_title(spec)
            rows = []
            for run, row in canvas.last_rows(column).items():
                if run in places:
                    values = {field: places[run]} | y.values(row[column], interval_of(row, column))
                    group = {GROUP: varied.groups[run] or ANNEALED}
                    rows.append(described(row, title, canvas.runs.looks[run], **group) | values)
            if rows:
                panels.append((rows, _panel(rows, lines, x, y, columns)))
    return drawn(panels, columns)


def _place(canvas: Canvas, varied: Varied) -> tuple[Quantity | Chart, dict[str, Value]]:
    """Return what is varied as the horizontal axis, and the place of every run on it."""
    numbers = {run: value for run, value in varied.values.items() if not isinstance(value, str)}
    if not varied.has_numbers:
        words = list(dict.fromkeys(map(str, varied.values.values())))
        x: Chart = {"field": varied.name, "type": "nominal", "sort": words}
        return x | {"axis": {"labelAngle": 0}}, {run: str(of) for run, of in varied.values.items()}

    # amounts of tokens are in the unit of the study's other figures
    is_tokens = varied.unit == "tokens"
    per = canvas.unit if is_tokens else 1
    places: dict[str, Value] = {run: value / per for run, value in numbers.items()}
    ticks = tuple(sorted({value / per for value in numbers.values()}))
    quantity = Quantity(
        varied.name,
        f"{canvas.tokens.unit} tokens" if is_tokens else varied.unit,
        is_log=varied.scale == "log",
        ticks=ticks if len(ticks) <= MOST_TICKS else (),
    )
    return quantity, places


def _lines(study: Study, varied: Varied, runs: Runs) -> Runs:
    """Return a colour for each group of runs; where there is one group, those of the runs.

    Runs and their controls, which have dashes, are of one colour.
    """
    groups = {text or ANNEALED: run for run, text in varied.groups.items()}
    if len(groups) < 2:
        return runs
    others = [axis for axis in study.axes if axis.key != varied.key]
    of_group = {
        group: ", ".join(axis.text_of(run) for axis in others) for group, run in groups.items()
    }
    values = list(dict.fromkeys(of_group.values()))
    shades = dict(zip(values, colours(len(values)) if len(values) > 1 else [INK], strict=True))
    looks = {
        look.label: replace(
            look,
            colour=shades[of_group[look.label]],
            is_control=groups[look.label] in study.controls,
        )
        for look in looks_for(groups)
    }
    return Runs(" and ".join(axis.name for axis in others), looks, field=GROUP)


def _panel(rows: Rows, lines: Runs, x: Quantity | Chart, y: Quantity, columns: int) -> Chart:
    is_grouped, is_quantity = lines.field == GROUP, isinstance(x, Quantity)
    beside: dict[str, Any] = {}
    if is_grouped and not is_quantity:
        order = [look.label for look in lines.looks.values()]
        beside = {"xOffset": {"field": GROUP, "type": "nominal", "sort": order}}
    layers = [marks(rows, lines, x, y, has_line=is_grouped and is_quantity, **beside)]
    if isinstance(x, Quantity) and not is_grouped:
        mark = {"type": "line", "color": GREY, "strokeWidth": 1}
        layers.insert(0, data(rows, mark=mark, encoding={"x": x.encoding(), "y": y.encoding()}))
    return panel(layers, rows[0]["panel"], columns)
