"""The end of training: annealed against not annealed, and against what the study varies.

Peak learning rates, weight decays, or budgets of tokens under one schedule and another (arXiv
2510.06213, figures 3 to 5; the last is the question of arXiv 2411.04330).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from base.grouping import grouped
from dynamics.figures.quantization import AXES
from quant_eval.estimate import Estimate
from study.axes import Value, Varied
from study.definition import Study
from study.figures.canvas import Canvas, described, interval_of
from study.figures.charts import (
    INK,
    WIDTHS,
    Chart,
    Quantity,
    Rows,
    columns_of,
    data,
    level,
    marks,
    panel,
    tooltip,
)
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import DASHED, GREY, LETTER_WIDTH, SOLID, Runs, colours, looks_for
from study.measurements.titles import spec_title
from study.results.averages import lowest_spec
from study.results.paired import Paired, Weighted
from study.results.summary import summarize

MOST_TICKS = 8  # as many values are written below the axis, each at its place
GROUP = "group"
ANNEALED = "annealed"  # where only controls say more of themselves


@figure(
    "ends",
    "Quantization at the end of every run against the first quantity in which the runs differ; the"
    " others are the colours, dashed: not annealed. A row of panels per error. Bars are intervals.",
    lambda study: study.varied is not None,
)
def ends(canvas: Canvas) -> Drawn | None:
    """Draw a panel per figure and spec."""
    varied, specs = canvas.study.varied, canvas.study.quantization.specs
    assert varied
    # Controls without a number of their own have no place, and are left out below.
    x, places = _place(canvas, varied)
    field = x.label if isinstance(x, Quantity) else varied.name
    lines, columns = _lines(canvas.study, varied, canvas.runs), columns_of(len(specs))
    panels: list[tuple[Rows, Chart]] = []
    for measure in canvas.study.quantization.measures:
        y = AXES[measure]
        for spec in specs:
            column, title = measure.of(spec), spec_title(spec)
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
        return x | {"axis": {"labelAngle": 0}}, {
            run: str(value) for run, value in varied.values.items()
        }

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
        digits=3 if is_tokens else Quantity.digits,
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
    # A control has the values of its runs on the other axes, and so their colour.
    of_group = {
        group: ", ".join(axis.text_of(run) for axis in others) for group, run in groups.items()
    }
    values = list(dict.fromkeys(of_group.values()))
    shades = dict(zip(values, colours(len(values)) if len(values) > 1 else [INK], strict=True))
    looks = {
        look.label: replace(
            look,
            colour=shades[of_group[look.label]],
            is_dashed=groups[look.label] in study.controls,
        )
        for look in looks_for(groups)
    }
    return Runs(" and ".join(axis.name for axis in others), looks, field=GROUP)


def _panel(rows: Rows, lines: Runs, x: Quantity | Chart, y: Quantity, columns: int) -> Chart:
    # Words are no scale along which points could be joined.
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


SERIES = ("annealed", "not annealed")
PANEL_HEIGHT = 170


@figure(
    "anneal_against_control",
    "Annealed against not annealed at equal tokens: the error of quantization at the fewest bits,"
    " and the paired difference. Points are means over seeds. Bars are 95% intervals over held-out"
    " documents, and over calibration draws and seeds where there are several; those of the"
    " difference decide.",
    lambda study: bool(study.controls),
    headline=lambda _: True,
)
def anneal_against_control(canvas: Canvas) -> Drawn | None:
    """Draw the error with and without the anneal of every group of runs, and the difference."""
    spec, measure = lowest_spec(canvas.study), canvas.study.quantization.measures[0]
    column, quantity = measure.of(spec), AXES[measure]
    title = "annealed - not annealed"
    difference = replace(quantity, title=title, written=f"difference, {quantity.unit}")
    measured = [
        end
        for end in summarize(canvas.study, canvas.table)
        if end.control and end.last and None not in (end.control[column], end.last[column])
    ]

    paired, errors, differences = Paired(canvas.directory), Rows(), Rows()
    for group, ends in grouped(measured, lambda end: end.group).items():
        head = {"panel": spec_title(spec), "run": group, "seeds": len(ends)}
        # Ends of one group are at one step.
        head |= {key: ends[0].last[key] for key in ("step", "tokens") if ends[0].last}
        annealed: list[Weighted] = [[(end.last, 1.0)] for end in ends if end.last]
        control: list[Weighted] = [[(end.control, 1.0)] for end in ends if end.control]
        # Minus the control, seed by seed: the difference is paired before it is averaged.
        change = [
            [*weighted, (row, -1.0)]
            for weighted, ((row, _),) in zip(annealed, control, strict=True)
        ]
        for series, weighted in zip(SERIES, (annealed, control), strict=True):
            estimate = paired.estimate(weighted, spec, measure)
            errors.append(head | {"series": series} | _values(quantity, estimate))
        estimate = paired.estimate(change, spec, measure)
        p_value = {"p, not corrected": estimate.p_value()}
        differences.append(head | p_value | _values(difference, estimate))
    panels = [
        (rows, _anneal_panel(rows, canvas.runs, y, title))
        for rows, y, title in (
            (errors, quantity, spec_title(spec)),
            (differences, difference, "Annealed - not annealed, paired"),
        )
        if rows
    ]
    return drawn(panels, 2)


def _values(quantity: Quantity, estimate: Estimate) -> dict[str, float]:
    return quantity.values(estimate.value, estimate.interval())


def _labels_below(labels: Sequence[str], width: float) -> Chart:
    """Return an axis with level labels, or steep ones where they would run into each other."""
    if LETTER_WIDTH * max(map(len, labels)) <= width / len(labels):
        return {"labelAngle": 0}
    return {"labelAngle": -35, "labelAlign": "right", "labelLimit": 260}


def _anneal_panel(rows: Rows, runs: Runs, quantity: Quantity, title: str) -> Chart:
    """Points with their intervals above the name of the group, annealed beside not annealed.

    Groups have their colours, as in all figures; bars of what is not annealed are dashed.
    """
    shown = list(dict.fromkeys(row["run"] for row in rows))
    axis = _labels_below(shown, WIDTHS[2])
    x: Chart = {"field": "run", "type": "nominal", "title": runs.heading, "sort": None}
    x |= {"axis": axis}
    groups = {group: looks[0].colour for group, looks in runs.groups.items()}
    scale = {"domain": shown, "range": [groups[group] for group in shown]}
    colour = {"field": "run", "type": "nominal", "scale": scale, "legend": None}
    encoding: Chart = {"x": x, "y": quantity.encoding(), "color": colour}
    low, high = quantity.ends
    bar = {"y": quantity.encoding(low), "y2": {"field": high}}
    if "series" in rows[0]:
        series = {"field": "series", "type": "nominal", "title": "at equal tokens"}
        encoding |= {"xOffset": series | {"sort": list(SERIES)}}
        dashes = {"domain": list(SERIES), "range": [SOLID, DASHED]}
        legend = {"symbolType": "stroke", "symbolSize": 700, "symbolStrokeWidth": 1.6}
        bar |= {"strokeDash": series | {"scale": dashes, "legend": legend}}
    point: Chart = {"tooltip": tooltip(rows)}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 1.6}, "encoding": bar},
        {"mark": {"type": "point", "filled": True, "opacity": 1, "size": 55}, "encoding": point},
    ]
    return panel([level(0.0), data(rows, encoding=encoding, layer=layers)], title, 2, PANEL_HEIGHT)
