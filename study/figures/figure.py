"""One figure of a report: its name, its caption, its rows and the chart of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.figure import Figure as Picture

from study.definition import Study
from study.figures.canvas import Canvas
from study.figures.charts import Chart, Rows, grid


class Drawn(NamedTuple):
    """A figure with data.

    Attributes:
        rows: one per value; written beside the picture, a column per quantity with its unit.
        chart: Vega-Lite, or a picture of matplotlib's where Vega-Lite has no such mark (contours).
    """

    rows: Rows
    chart: Chart | Picture


@dataclass(frozen=True)
class Figure:
    """A figure as the report knows it; `draw` returns None where nothing of it is measured yet."""

    name: str
    place: int
    caption: str
    applies: Callable[[Study], bool]
    draw: Callable[[Canvas], Drawn | None]


def figure(
    name: str, place: int, caption: str, applies: Callable[[Study], bool] = lambda _: True
) -> Callable[[Callable[[Canvas], Drawn | None]], Figure]:
    """Make a figure of a function.

    Args:
        name: of its files.
        place: order in the report.
        caption: shown below it.
        applies: False for a study that will never hold such data.
    """
    return lambda draw: Figure(name, place, caption, applies, draw)


def drawn(
    panels: Sequence[tuple[Rows, Chart]], columns: int, rates: Sequence[dict[str, object]] = ()
) -> Drawn | None:
    """Return a figure of panels with their rows, side by side; None without any.

    Learning rates are drawn in the panels, so they are among the rows of the figure.
    """
    rows = [row for own, _ in panels for row in own]
    charts = [chart for _, chart in panels]
    return Drawn([*rows, *rates], grid(charts, columns)) if rows else None
