"""A plot as plotly draws it in a browser: traces and layout, plain data for its JavaScript."""

import math

from study.canvas import RATE_COLOUR, RATE_TITLE
from study.drawing import LINES, NOTE_COLOUR, SHADE_COLOUR, SHADE_TEXT_COLOUR
from study.plots import Axis, Limits, Panel, Plot, Span
from study.traces import DASHES, Json, contours_of, html, key_of, rate_of, traces_of

PIXELS_PER_INCH = 92
MARGINS = {"l": 72, "r": 24, "b": 56}
LINE_PIXELS = 19  # of a line of text above a panel
KEYS_PIXELS = 46  # of the keys, and of the buttons beside them
GAPS = {1: 0.0, 2: 0.1, 3: 0.09}  # between panels side by side, as shares of the width
LEAST_GAP = 0.075
ROW_PIXELS = 95  # between rows of panels
FONT: Json = {
    "family": 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif',
    "size": 12,
    "color": "#1c1c1c",
}


def interactive(plot: Plot) -> Json:
    """Traces and layout; the meta of a trace is the label of its run."""
    above = LINE_PIXELS * max(_lines_above(panel) for _, panel in plot.shown) + KEYS_PIXELS
    right = 64 if any(panel.rates or panel.plane for _, panel in plot.shown) else 24
    layout: Json = {
        "font": FONT,
        "height": round(PIXELS_PER_INCH * plot.height) + above,
        "margin": MARGINS | {"t": above, "r": right},
        "showlegend": bool(plot.keys),
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"size": 12, "color": "#1c1c1c"}},
        "plot_bgcolor": "#ffffff",
        "paper_bgcolor": "#ffffff",
        "shapes": [],
        "annotations": [],
    }
    if plot.keys:
        above_all: Json = {"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top"}
        layout["legend"] = above_all | {"itemclick": False, "itemdoubleclick": False}
    traces: list[Json] = []
    for place, panel in plot.shown:
        across, down = _domains(plot, place)
        _add_panel(layout, traces, panel, place, (across, down), plot)
    traces += [key_of(label, mark) for label, mark in plot.keys.items()]
    return {"data": traces, "layout": layout}


def _lines_above(panel: Panel) -> int:
    return 1 + panel.title.count("\n") + (1 if panel.shade else 0)


def _domains(plot: Plot, place: int) -> tuple[Span, Span]:
    """The place of a panel, as shares of the picture's width and height from below."""
    row, column = divmod(place, plot.columns)
    gap = 0.03 if plot.shares_y else GAPS.get(plot.columns, LEAST_GAP)
    width = (1 - gap * (plot.columns - 1)) / plot.columns
    left = column * (width + gap)
    between = ROW_PIXELS / (PIXELS_PER_INCH * plot.height)
    heights = plot.row_heights or (1.0,) * plot.rows
    total = sum(heights) / (1 - between * (plot.rows - 1))
    top = 1 - sum(heights[:row]) / total - between * row
    return (round(left, 6), round(left + width, 6)), (
        round(max(top - heights[row] / total, 0), 6),
        round(top, 6),
    )


def _add_panel(
    layout: Json, traces: list[Json], panel: Panel, place: int, domains: tuple[Span, Span], plot: Plot
) -> None:
    """Axes, lines and traces of one panel; each has two y axes, the second one for learning rates."""
    across, down = domains
    number = str(place + 1) if place else ""  # the first axis has none
    x, y, second = f"x{number}", f"y{number}", f"y{place + 1 + len(plot.panels)}"
    is_left, is_last = place % plot.columns == 0, (place + 1) % plot.columns == 0
    layout[_axis_name(x)] = _axis(panel.x, True) | {"domain": across, "anchor": y}
    shows_y = is_left or not plot.shares_y
    layout[_axis_name(y)] = _axis(panel.y, shows_y) | {"domain": down, "anchor": x, "showticklabels": shows_y}
    if panel.is_square:
        layout[_axis_name(y)] |= {"scaleanchor": x, "constrain": "domain"}
        layout[_axis_name(x)]["constrain"] = "domain"
    if panel.shade:
        start, end = panel.shade.span
        style = {"fillcolor": SHADE_COLOUR, "line": {"width": 0}, "layer": "below"}
        layout["shapes"].append(_shape("rect", x, f"{y} domain", (start, end), (0, 1)) | style)
        text = _text(panel.shade.name, x, f"{y} domain", (start + end) / 2, 1, SHADE_TEXT_COLOUR)
        layout["annotations"].append(text)
    for line in panel.lines:
        style = {"line": _line_style(LINES[line.kind]), "layer": "below"}
        level = (line.at, line.at)
        ends = (f"{x} domain", y, (0, 1), level) if line.across == "y" else (x, f"{y} domain", level, (0, 1))
        layout["shapes"].append(_shape("line", *ends) | style)
    if panel.title:
        title = _text(panel.title, f"{x} domain", f"{y} domain", 0.5, 1, FONT["color"])
        layout["annotations"].append(title | {"font": {"size": 13}, "yshift": LINE_PIXELS if panel.shade else 2})
    if panel.note:
        layout["annotations"].append(_text(panel.note, f"{x} domain", f"{y} domain", 0.5, 0.5, NOTE_COLOUR))
    if panel.rates:
        layout[_axis_name(second)] = _rate_axis(y, x, is_last)
        traces += [rate_of(series, panel, plot) | {"xaxis": x, "yaxis": second} for series in panel.rates]
    if panel.plane:
        traces.append(contours_of(panel.plane, panel, is_last) | {"xaxis": x, "yaxis": y})
    for series in panel.series:
        if series.points:
            traces += [trace | {"xaxis": x, "yaxis": y} for trace in traces_of(series, panel, plot)]


def _axis_name(reference: str) -> str:
    return f"{reference[0]}axis{reference[1:]}"


def _text(text: str, xref: str, yref: str, x: float, y: float, colour: str) -> Json:
    place = {"xref": xref, "yref": yref, "x": x, "y": y, "xanchor": "center", "yanchor": "bottom"}
    return place | {"text": html(text), "showarrow": False, "font": {"color": colour}}


def _shape(kind: str, xref: str, yref: str, x: Span, y: Span) -> Json:
    return {"type": kind, "xref": xref, "yref": yref, "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1]}


def _line_style(style: Json) -> Json:
    dash = DASHES[style.get("linestyle", "-")]
    return {"color": style["color"], "width": style["linewidth"], "dash": dash}


def _axis(of: Axis, is_titled: bool) -> Json:
    axis: Json = {
        "title": {"text": html(of.written or of.label) if is_titled else "", "standoff": 8, "font": {"size": 12}},
        "type": "log" if of.is_log else "linear",
        "gridcolor": "#e6e6e6",
        "linecolor": "#1c1c1c",
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "automargin": True,
        "exponentformat": "power",
        "hoverformat": ".4~g",
    }
    if of.is_log:
        axis |= {"dtick": "D2", "tickformat": "~g"}
    if of.is_percent:
        axis["tickformat"] = ".4~%"
    if of.is_integer:
        axis["tickformat"] = "d"
    if of.ticks:
        axis |= {"tickvals": [place for place, _ in of.ticks], "ticktext": [html(text) for _, text in of.ticks]}
        axis |= {"showgrid": False, "ticks": ""} if of.is_place else {}
    if of.limits != (None, None):
        axis["range"] = _range(of.limits, of.is_log)
    if of.holds_zero:
        axis["rangemode"] = "tozero"
    return axis


def _range(limits: Limits, is_log: bool) -> list[float | None]:
    return [math.log10(limit) if is_log and limit is not None else limit for limit in limits]


def _rate_axis(over: str, beside: str, is_labelled: bool) -> Json:
    colour: Json = {"color": RATE_COLOUR}
    return {
        "overlaying": over,
        "anchor": beside,
        "side": "right",
        "range": [0, 1.06],
        "tickmode": "array",
        "tickvals": [0, 0.2, 0.4, 0.6, 0.8, 1],
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
        "showline": True,
        "linecolor": RATE_COLOUR,
        "tickfont": colour,
        "ticks": "outside",
        "tickcolor": RATE_COLOUR,
        "showticklabels": is_labelled,
        "title": {"text": f"{RATE_TITLE} (dotted)" if is_labelled else "", "font": colour | {"size": 12}},
    }
