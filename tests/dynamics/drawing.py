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


def layers_of(chart: dict[str, Any]) -> list[dict[str, Any]]:
    """A chart and all of its layers, those of layers too."""
    return [chart, *(inner for layer in chart.get("layer", []) for inner in layers_of(layer))]
