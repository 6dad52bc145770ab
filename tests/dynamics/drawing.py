"""Figures of a study as tests look at them."""

from typing import Any

from study.figures.canvas import Canvas
from study.figures.figure import Drawn, Figure
from tests.present import present


def drawn(figure: Figure, canvas: Canvas) -> Drawn:
    """The figure, of which there are data."""
    return present(figure.draw(canvas))


def chart_of(drawing: Drawn) -> dict[str, Any]:
    """Its chart, which is none of matplotlib's pictures."""
    assert isinstance(drawing.chart, dict)
    return drawing.chart
