"""The figure of what a study varies: quantization at the end of every run against it, a line per group.

Peak learning rates, weight decays, or budgets of tokens under one schedule and another (arXiv 2510.06213, figures 3 to
5; the last is the question of arXiv 2411.04330).
"""

from dataclasses import replace
from typing import Any

from study.canvas import NEUTRAL, Canvas, facts_of
from study.plots import ROW_INCHES, Axis, Mark, Panel, Plot, Point, Series, wrapped
from study.settings import Varied, spec_title
from study.trajectories import MEASURES

MOST_TICKS = 8  # as many values are written below the axis, each at its place
GROUP_LINES: Any = ("-", "--", "-.", ":")


def ends_plot(canvas: Canvas, varied: Varied) -> Plot:
    """Relative error above, KL divergence below; a panel per spec.

    Raises:
        ValueError: a value has no place on the logarithmic axis that the study asks for.
    """
    if varied.scale == "log" and min(varied.values.values(), default=1.0) <= 0:
        raise ValueError(f"{varied.name} has values that are not positive; let its scale be linear")
    groups = list(dict.fromkeys(varied.groups.get(run, "") for run in varied.values))
    marks = {
        group: Mark(colour=NEUTRAL, line=GROUP_LINES[place % len(GROUP_LINES)], width=1, order=1)
        for place, group in enumerate(groups)
    }
    specs = canvas.study.quantization.specs
    by_figure = [wrapped([_panel(canvas, varied, spec, figure, marks) for spec in specs]) for figure in MEASURES]
    panels, rows = tuple(panel for placed, _ in by_figure for panel in placed), sum(rows for _, rows in by_figure)
    keys = marks if len(groups) > 1 else {}
    return Plot(panels=panels, rows=rows, height=ROW_INCHES * rows, keys=keys, **canvas.legend)


def _panel(canvas: Canvas, varied: Varied, spec: str, figure: str, marks: dict[str, Mark]) -> Panel:
    column, last = f"quant/{spec}/{figure}", canvas.last_rows()
    measured = {run: row for run, row in last.items() if run in varied.values and row.get(column) is not None}
    series, by_group = [], dict[str, list[Point]]()
    for run, look in canvas.looks.items():
        if run not in measured:
            continue
        row, group = measured[run], varied.groups.get(run, "")
        interval = (row[f"{column}_low"], row[f"{column}_high"])
        facts = {"group": group, "run": run} if len(marks) > 1 else {"run": run}
        point = Point(x=varied.values[run], y=row[column], y_interval=interval, facts=facts | facts_of(row))
        by_group.setdefault(group, []).append(point)
        series.append(Series(look.mark, (point,), look.label))
    for group, points in by_group.items():
        path = [replace(point, y_interval=None) for point in sorted(points, key=lambda point: point.x)]
        series.append(Series(marks[group], tuple(path), is_data=False))
    values = sorted(set(varied.values.values()))
    ticks = tuple((value, f"{value:g}") for value in values) if len(values) <= MOST_TICKS else ()
    x = Axis(title=varied.name, unit=varied.unit, is_log=varied.scale == "log", ticks=ticks)
    return Panel(x=x, y=MEASURES[figure], series=tuple(series), title=spec_title(spec))
