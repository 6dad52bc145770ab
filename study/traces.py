"""A plot's series as plotly's traces, and what is shown of a point under the pointer.

Everything a reader could have named is escaped: plotly takes its texts for HTML.
"""

from html import escape
from typing import Any

import numpy as np

from curvature.slices.figure import refined
from study.canvas import RATE_TITLE
from study.plots import Axis, Mark, Panel, Plane, Plot, Point, Series

Json = dict[str, Any]
SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down"}
SYMBOLS |= {"P": "cross", "X": "x", "*": "star"}
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
PIXELS, THIN = 1.6, 1.28  # of a marker, and of a line, for each of its points
SMALL = 0.58
COARSER = 2  # the picture's grid for each of the page's


def html(text: str) -> str:
    """A text with its line breaks, as plotly shows it."""
    return escape(text, quote=False).replace("\n", "<br>")


def _line(mark: Mark) -> Json:
    return {"color": mark.colour, "width": THIN * mark.width, "dash": DASHES[mark.line or "-"]}


def _mode(mark: Mark) -> str:
    return "+".join(word for word, there in (("lines", mark.line), ("markers", mark.marker)) if there)


def _marker(mark: Mark, points: tuple[Point, ...]) -> Json:
    size = PIXELS * mark.size
    filled = "#ffffff" if mark.is_open else mark.colour
    return {
        "symbol": SYMBOLS[mark.marker],
        "size": [SMALL * size if point.is_small else size for point in points],
        "color": ["#ffffff" if point.is_open else filled for point in points],
        "opacity": 1,
        "line": {"color": mark.edge or mark.colour, "width": 1.2},
    }


def key_of(label: str, mark: Mark) -> Json:
    """An entry of the legend: a trace without points."""
    trace: Json = {"type": "scatter", "x": [None], "y": [None], "name": html(label), "mode": _mode(mark)}
    trace |= {"line": _line(mark), "showlegend": True}
    return trace | ({"marker": _marker(mark, ()) | _plain(mark)} if mark.marker else {})


def _plain(mark: Mark) -> Json:
    return {"size": PIXELS * mark.size, "color": "#ffffff" if mark.is_open else mark.colour}


def traces_of(series: Series, panel: Panel, plot: Plot) -> list[Json]:
    """The series, over a band where its intervals are one."""
    mark, points = series.mark, series.points
    trace: Json = {
        "type": "scatter",
        "x": [point.x for point in points],
        "y": [point.y for point in points],
        "mode": _mode(mark),
        "line": _line(mark),
        "showlegend": False,
    }
    if series.run is not None:
        trace["meta"] = series.run
    if mark.marker:
        trace["marker"] = _marker(mark, points)
    if series.is_data:
        texts = [_hover(series, point, panel, plot) for point in points]
        trace |= {"text": texts, "hovertemplate": "%{text}<extra></extra>"}
    else:
        trace["hoverinfo"] = "skip"
    for which in ("x", "y"):
        bars = None if which == "y" and mark.has_band else _bars(points, which, mark)
        trace |= {f"error_{which}": bars} if bars else {}
    return [*([_band(series)] if mark.has_band else []), trace]


def _bars(points: tuple[Point, ...], which: str, mark: Mark) -> Json | None:
    above, below = [], []
    for point in points:
        value, interval = (point.x, point.x_interval) if which == "x" else (point.y, point.y_interval)
        low, high = interval or (value, value)
        above.append(high - value)
        below.append(value - low)
    if not any(above) and not any(below):
        return None
    red, green, blue = (int(mark.colour[start : start + 2], 16) for start in (1, 3, 5))
    colour = f"rgba({red},{green},{blue},{mark.opacity_of_bars:g})"
    style: Json = {"color": colour, "thickness": THIN * mark.bar, "width": PIXELS * mark.cap}
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below} | style


def _band(series: Series) -> Json:
    spans = [point.y_interval or (point.y, point.y) for point in series.points]
    x = [point.x for point in series.points]
    y = [low for low, _ in spans] + [high for _, high in reversed(spans)]
    band: Json = {"type": "scatter", "x": x + x[::-1], "y": y, "mode": "lines", "line": {"width": 0}, "fill": "toself"}
    band |= {"fillcolor": f"{series.mark.colour}21", "hoverinfo": "skip", "showlegend": False}
    return band | ({"meta": series.run} if series.run is not None else {})


def rate_of(series: Series, panel: Panel, plot: Plot) -> Json:
    """A curve of learning rates."""
    (trace,) = traces_of(series, panel, plot)
    return trace | {"text": [], "hovertemplate": f"{RATE_TITLE}: %{{y:.3~g}}<extra></extra>"}


def _hover(series: Series, point: Point, panel: Panel, plot: Plot) -> str:
    """Everything known of a point, a line each."""
    lines = [f"<b>{html(f'{plot.heading} {series.run}')}</b>"] if series.run is not None else []
    lines += [html(series.label)] if series.label else []
    lines += [f"{html(name)}: {html(_written(value))}" for name, value in point.facts.items() if value is not None]
    for axis, value, interval in ((panel.x, point.x, point.x_interval), (panel.y, point.y, point.y_interval)):
        is_known = axis.is_place or ("tokens" in point.facts and axis.title == "training tokens")
        if not is_known:
            bounds = f" [{', '.join(_number(end, axis) for end in interval)}]" if interval else ""
            lines.append(f"{html(axis.label)}: {_number(value, axis)}{bounds}")
    return "<br>".join(lines)


def _written(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float, axis: Axis) -> str:
    return f"{100 * value:.4g}%" if axis.is_percent else f"{value:.4g}"


def contours_of(plane: Plane, panel: Panel, has_bar: bool) -> Json:
    """Filled contours, whose levels are not equally far apart: heights are drawn as shares of the way between two."""
    fine = refined(refined(plane.increase).T).T[::COARSER, ::COARSER]
    x, y = (refined(np.array(values)[:, None])[::COARSER, 0] for values in (plane.x, plane.y))
    last = len(plane.levels) - 1
    height = np.interp(fine, plane.levels, range(last + 1))
    scale = [[index / max(last - 1, 1), colour] for index, colour in enumerate(plane.colours)]
    bar = {"tickvals": list(range(last + 1)), "ticktext": [f"{level:g}" for level in plane.levels], "thickness": 14}
    bar["title"] = {"text": html(f"{plane.title} ({plane.unit})"), "side": "right"}
    names = [f"{html(axis.label)}: %{{{value}:.3~g}}" for axis, value in ((panel.x, "x"), (panel.y, "y"))]
    return {
        "type": "contour",
        "x": _rounded(x),
        "y": _rounded(y),
        "z": [_rounded(row) for row in height],
        "customdata": [_rounded(row) for row in fine],
        "contours": {"start": 1, "end": last - 1, "size": 1, "coloring": "fill"},
        "line": {"width": 0.5, "color": "#222222"},
        "colorscale": scale,
        "zmin": 0.5,
        "zmax": last - 0.5,
        "zauto": False,
        "autocontour": False,
        "showscale": has_bar,
        "colorbar": bar,
        "meta": panel.run,
        "hovertemplate": "<br>".join([*names, f"{html(plane.title)}: %{{customdata:.3~g}}<extra></extra>"]),
    }


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
