"""Parts of a chart that the figures share: quantities on axes, runs in their colours, panels.

A chart is Vega-Lite's JSON (https://vega.github.io/vega-lite/docs): the same draws the picture, the
PDF and the page. A row is what is known of one value: its keys are the columns of the CSV file, the
fields of the chart and the lines of the tooltip.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.ticker import MaxNLocator

from base.grouping import grouped
from base.quantities import DIGITS, MILLI, MILLINATS
from study.figures.looks import GREY, WIDE, Runs

Chart = dict[str, Any]
Rows = list[dict[str, Any]]
Span = tuple[float, float]
HIDDEN = "hidden"  # signal of the page: labels of the runs that the reader has switched off
SHOWN = {"filter": f"indexof({HIDDEN}, datum.run) < 0"}
NATS, PERCENT = "nats/token", "%"
WIDTHS = {1: 560, 2: 355, 3: 215, 4: 160}  # pixels of a panel, by panels side by side
HEIGHT = 250
MOST_COLUMNS = 4
NEAR = 0.06  # of the range of the values, between them and the ends of an axis
INK, SHADE = "#1c1c1c", "#f3f1e7"
LINE: Chart = {"type": "line", "clip": True, "strokeWidth": WIDE}
POINT: Chart = {"type": "point", "clip": True, "filled": True, "opacity": 1, "size": 40}
OPEN: Chart = {"fill": "#ffffff", "strokeWidth": 1.4}
BAND: Chart = {"type": "area", "clip": True, "opacity": 0.18, "tooltip": None}
PLACE = "place"  # of a row on an axis with a part in order; nothing known: in no file or tooltip
PLACE_SHARE, GAP_SHARE = 0.08, 0.03  # of the axis: a place in order, and what is left before them
WORDS = " in words"  # end of the name of a column
LETTER = 5.5  # pixels of the names of places
NUMBERS = 16  # pixels between an axis and its title that its numbers take
LOW, HIGH = "low", "high"  # ends of an interval
ENDS = ("lowest seed", "highest seed")  # of a band
FIRST = ("run", "step", "tokens")  # lines of a tooltip
FAINT = 0.35  # opacity of single seeds
DASHED: Chart = {"color": "#555555", "strokeDash": [5, 3], "strokeWidth": 1}


@dataclass(frozen=True)
class Quantity:
    """The quantity of an axis.

    Attributes:
        title: with the unit, also the name of the column.
        written: text beside the axis, in place of the title.
        scale: factor that values are shown with, in rows as well.
        holds_zero: the axis reaches down to 0 at least.
        domain: ends of the axis; None: as the values have it.
        ticks: the only values with a label; empty: as Vega has it.
        in_order: names of places after the end of the domain, of rows that have no value there.
        digits: of the labels.
    """

    title: str
    unit: str = ""
    written: str = ""
    scale: float = 1.0
    is_log: bool = False
    holds_zero: bool = False
    domain: Span | None = None
    ticks: tuple[float, ...] = ()
    in_order: tuple[str, ...] = ()
    digits: int = 6

    @property
    def label(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def field(self) -> str:
        """The column that says where a row is on the axis."""
        return PLACE if self.in_order else self.label

    def values(self, value: float, interval: Span | None = None) -> dict[str, float]:
        """Return the columns of one value, with the ends of its interval, times the scale."""
        shown, *ends = (self.scale * number for number in (value, *(interval or ())))
        place = {PLACE: shown} if self.in_order else {}
        return {self.label: shown} | dict(zip(self.ends, ends, strict=False)) | place

    @property
    def ends(self) -> tuple[str, str]:
        """The columns of the ends of an interval."""
        return f"{self.label}, {LOW}", f"{self.label}, {HIGH}"

    def place_of(self, name: str, share: float = 0.5) -> float:
        """Return where on the axis a named place is: at this share of its width."""
        number = self.in_order.index(name)
        return self._at(GAP_SHARE + PLACE_SHARE * (number + share))

    @property
    def rule(self) -> float:
        """The place between the values and what is in order."""
        return self._at(GAP_SHARE / 2)

    def _at(self, beyond: float) -> float:
        """Return the place beyond the domain by a share of it."""
        assert self.domain
        start, end = self.domain
        return end + beyond * (end - start)

    def encoding(self, field: str = "") -> Chart:
        """Return the quantity as the x or y of a chart."""
        if self.in_order:
            return self._with_order()
        scale: Chart = {"type": "log"} if self.is_log else {"zero": self.holds_zero}
        scale |= {"domain": list(self.domain), "nice": False} if self.domain else {}
        scale |= {"padding": 12, "nice": False} if self.is_log and not self.domain else {}
        axis: Chart = {"format": f".{self.digits}~g"}
        axis |= {"values": list(self.ticks)} if self.ticks else {"tickCount": 6}
        encoding = {"field": field or self.label, "type": "quantitative"}
        return encoding | {"title": self.written or self.label, "scale": scale, "axis": axis}

    def _with_order(self) -> Chart:
        """Return the quantity with its places in order; `ordered` draws their names."""
        assert self.domain
        start, end = self.domain
        last = self._at(GAP_SHARE + PLACE_SHARE * len(self.in_order))
        ticks = [tick for tick in MaxNLocator(5).tick_values(start, end) if start <= tick <= end]
        plain = replace(self, domain=(start, last), ticks=tuple(map(float, ticks)), in_order=())
        encoding = plain.encoding(self.field)
        # The title is below the names, which the axis itself does not know.
        padding = LETTER * max(map(len, self.in_order)) - NUMBERS
        return encoding | {"axis": encoding["axis"] | {"titlePadding": max(padding, 4)}}

    def near(self, rows: Rows) -> "Quantity":
        """Return the quantity on an axis that ends just beside the values of these rows."""
        values = self.reach(rows)
        return replace(self, domain=around(values, NEAR)) if values else self

    def logarithmic_for(self, rows: Rows) -> "Quantity":
        """Return the quantity on a logarithmic axis if all values of the rows have a place there.

        Bars that reach zero leave the panel below.
        """
        values = [row[self.label] for row in rows if row.get(self.label) is not None]
        if not values or min(values) <= 0:
            return self
        # By the values, not by the bars: one low bar would flatten all points.
        return replace(self, is_log=True, domain=(min(values) / 2, max(self.reach(rows)) * 1.2))

    def reach(self, rows: Rows) -> list[float]:
        """Return the values of the rows with the ends of their intervals."""
        names = (self.label, *self.ends)
        return [row[name] for row in rows for name in names if row.get(name) is not None]


def thousandths(title: str, written: str = "", *, holds_zero: bool = False) -> Quantity:
    """Return an effect in nats per token, such as a difference of losses, in thousandths."""
    return Quantity(title, MILLINATS, written, holds_zero=holds_zero, scale=MILLI)


def percentage(title: str, written: str = "", *, holds_zero: bool = False) -> Quantity:
    """Return a share, in percent."""
    return Quantity(title, PERCENT, written, holds_zero=holds_zero, scale=100.0)


def around(values: Sequence[float], share: float) -> Span:
    """Return limits with a margin of this share of the values' range on both sides."""
    # Equal values have no range, and an axis needs one.
    margin = share * (max(values) - min(values)) or 0.1
    return min(values) - margin, max(values) + margin


def data(rows: Rows, **chart: Any) -> Chart:
    """Return a chart of rows, less those of the runs that the reader has switched off."""
    transforms = [SHOWN] if any("run" in row for row in rows) else []
    transforms += in_words(rows)
    used = {"transform": transforms} if transforms else {}
    return {"data": {"values": rows}} | used | chart


def marks(
    rows: Rows,
    runs: Runs,
    x: Quantity | Chart,
    y: Quantity | Chart,
    *,
    has_line: bool = True,
    bar_opacity: float = 0.6,
    open_where: str = "false",
    lines: Chart | None = None,
    points: Chart | None = None,
    match: str = "",
    **both: Chart,
) -> Chart:
    """Return lines, bars of the intervals and points of rows in the colours of their runs.

    Of replicates the line is the mean, in a band from the lowest to the highest of them, and their
    own points are faint.

    Args:
        rows: all of one panel.
        runs: their looks.
        x: the horizontal axis: a quantity, or the encoding of a category.
        y: the vertical axis, likewise.
        has_line: whether the points of a run are joined.
        bar_opacity: of the intervals.
        open_where: Vega's expression of the rows whose points are open.
        lines: further encodings of the lines, or others than the runs' own.
        points: those of the points.
        match: the column by which points of replicates belong together; empty: that of x.
        both: those of all marks.
    """
    axes = {"x": x, "y": y}
    quantities = {name: axis for name, axis in axes.items() if isinstance(axis, Quantity)}
    encodings = axes | {name: axis.encoding() for name, axis in quantities.items()}
    replicates: list[Rows] = []
    # A mean line needs numbers on both axes.
    if has_line and len(quantities) == 2:
        replicates = replicates_of(rows, runs, match or quantities["x"].field)
    # Fewer groups than rows: some rows are replicates of each other.
    has_bands = 0 < len(replicates) < len(rows)
    means = means_of(replicates, runs, quantities["x"], quantities["y"]) if has_bands else []

    layers: list[Chart] = []
    if means:
        layers.append(data(means, mark=BAND, encoding=band_of(quantities["x"], quantities["y"])))
    if has_line:
        layers.append(line(means, runs, {"strokeDash": runs.dash} | (lines or {})))
    opacity = bar_opacity * FAINT if has_bands else bar_opacity
    # Without lines the bars say what is a control.
    layers += _interval_bars(rows, quantities, opacity, {} if has_line else runs.dash)
    looks = {"shape": runs.shape, "tooltip": tooltip(rows)} | (points or {})
    if any(quantity.in_order for quantity in quantities.values()):
        # Vega's own words for a screen reader would call a place in order a value.
        looks["description"] = {"field": runs.field, "type": "nominal"}
    layers += _points(looks, runs, open_where, {"opacity": FAINT} if has_bands else {})
    return data(rows, encoding=encodings | {"color": runs.colour} | both, layer=layers)


def line(rows: Rows, runs: Runs, channels: Chart) -> Chart:
    """Return lines in the widths of the runs: of these rows, or of the panel's where none are."""
    used = {name: channel for name, channel in channels.items() if channel}
    mark = dict(LINE)
    if runs.width:
        used["strokeWidth"] = runs.width
        del mark["strokeWidth"]  # that of the mark would overrule them
    lines: Chart = {"mark": mark, "encoding": used}
    return data(rows, **lines) if rows else lines


def _interval_bars(
    rows: Rows, quantities: dict[str, Quantity], opacity: float, dash: Chart
) -> list[Chart]:
    """Return the bars of the intervals that the rows have, by axis."""
    bars: list[Chart] = []
    for name, quantity in quantities.items():
        low, high = quantity.ends
        if not any(low in row for row in rows):
            continue
        # Rows of one panel may have no interval.
        transform: list[Chart] = [{"filter": f"isValid(datum['{low}'])"}]
        if quantity.is_log and quantity.domain:
            # no logarithm has a place for an end below zero
            lowest = f"max(datum['{low}'], {quantity.domain[0]})"
            transform.append({"calculate": lowest, "as": low})
        ends = {name: quantity.encoding(low), f"{name}2": {"field": high}}
        ends |= {"strokeDash": dash} if dash else {}
        mark = {"type": "rule", "clip": True, "opacity": opacity}
        bars.append({"transform": transform, "mark": mark, "encoding": ends})
    return bars


def _points(looks: Chart, runs: Runs, open_where: str, faint: Chart) -> list[Chart]:
    """Return the points of the rows: all filled, or in two layers, those that are open apart."""
    if open_where == "false":
        return [{"mark": POINT | faint, "encoding": looks}]
    # Their outlines have the colours as a property: as a channel they would change the legend.
    colours = {look.label: look.colour for look in runs.looks.values()}
    outline = {"stroke": {"expr": f"({json.dumps(colours)})[datum['{runs.field}']]"}}
    outlined = looks | {"color": None}
    kinds = {f"!({open_where})": ({}, looks), open_where: (OPEN | outline, outlined)}
    return [
        {"transform": [{"filter": where}], "mark": POINT | style | faint, "encoding": encoding}
        for where, (style, encoding) in kinds.items()
    ]


def replicates_of(rows: Rows, runs: Runs, match: str) -> list[Rows]:
    """Return the rows that belong together: of one group and series, with one value of `match`."""
    together = grouped(rows, lambda row: (runs.group_of(row), row.get("series"), row[match]))
    return list(together.values())


def means_of(replicates: Sequence[Rows], runs: Runs, x: Quantity, y: Quantity) -> Rows:
    """Return the means of replicates with the ends of their range, named as their first run."""
    means = []
    low, high = (f"{y.label}, {end}" for end in ENDS)
    for alike in replicates:
        values = [row[y.label] for row in alike]
        mean_x = sum(row[x.field] for row in alike) / len(alike)
        mean = {x.field: mean_x, y.label: sum(values) / len(values)}
        head = {key: alike[0].get(key) for key in ("run", runs.field, "series", "step")}
        means.append(head | mean | {low: min(values), high: max(values)})
    return means


def band_of(x: Quantity, y: Quantity) -> Chart:
    """Return the places of the band of means: from the lowest replicate to the highest."""
    low, high = (f"{y.label}, {end}" for end in ENDS)
    return {"x": x.encoding(), "y": y.encoding(low), "y2": {"field": high}}


def tooltip(rows: Rows) -> list[Chart]:
    """Return everything known of a row, a line each; the run and its place are first."""
    formats, words = _formats(rows), {each["as"] for each in in_words(rows)}
    names = [name for name in FIRST if name in formats]
    names += [name for name in formats if name not in names and not _is_end(name, formats)]
    lines = []
    for name in names:
        form = formats[name]
        line: Chart = {"field": name, "type": "quantitative" if form else "nominal"}
        line |= {"format": form} if form else {}
        if f"{name}{WORDS}" in words:
            line = {"field": f"{name}{WORDS}", "type": "nominal"}
        lines.append(line | {"title": name})
    return lines


def in_words(rows: Rows) -> list[Chart]:
    """Return the transforms that make words of values with intervals, and of missing numbers.

    A tooltip would show a number that is missing as 0.
    """
    formats, transforms = _formats(rows), []
    for name, form in formats.items():
        if not form or _is_end(name, formats):
            continue
        low, high = (f"{name}, {end}" for end in (LOW, HIGH))
        shown = f"format(datum['{name}'], '{form}')"
        if low in formats:
            ends = f"' [' + {_plain(low)} + ', ' + {_plain(high)} + ']'"
            shown = f"{_plain(name)} + (isValid(datum['{low}']) ? {ends} : '')"
        elif all(row.get(name) is not None for row in rows):
            continue
        shown = f"isValid(datum['{name}']) ? {shown} : 'none'"
        transforms.append({"calculate": shown, "as": f"{name}{WORDS}"})
    return transforms


def _plain(name: str) -> str:
    """Return Vega's expression of a number in three digits, and of a large one without exponent."""
    value = f"datum['{name}']"
    return f"format({value}, abs({value}) < 1000 ? '.{DIGITS}~g' : ',.0f')"


def _is_end(name: str, formats: dict[str, str]) -> bool:
    """Return whether a column is an end of the interval of another one."""
    value, _, end = name.rpartition(", ")
    return end in (LOW, HIGH) and value in formats


def _formats(rows: Rows) -> dict[str, str]:
    """Return the columns that are shown, with the format of numbers; empty for words."""
    formats = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != PLACE):
        example = next((row[name] for row in rows if row.get(name) is not None), "")
        formats[name] = ""
        if isinstance(example, int | float):
            formats[name] = "," if isinstance(example, int) else ".4~g"
    return formats


def level(at: float, channel: str = "y", **style: Any) -> Chart:
    """Return a straight line across a panel."""
    mark = {"type": "rule", "color": "#999999", "strokeWidth": 0.8, "tooltip": None} | style
    return {"data": {"values": [{}]}, "mark": mark, "encoding": {channel: {"datum": at}}}


def diagonal(x: Quantity, y: Quantity) -> Chart:
    """Return the line of equal values of two quantities over the domain that both have, named."""
    equal = [{x.label: end, y.label: end} for end in x.domain or ()]
    line = DASHED | {"type": "line"}
    # Below the line at its lower end: what quantization adds is above it.
    text = {"type": "text", "text": "x = y", "align": "left", "dx": 26, "dy": -12}
    axes = {"x": x.encoding(), "y": y.encoding()}
    name = data(equal[:1], mark=text | {"color": DASHED["color"]}, encoding=axes)
    return {"layer": [data(equal, mark=line, encoding=axes), name]}


def ordered(x: Quantity, heading: str, height: int = HEIGHT) -> list[Chart]:
    """Return a rule where the part of an axis that is in order begins, its heading and names."""
    if not x.in_order:
        return []
    rule = level(x.rule, "x", strokeDash=[4, 3])
    places: Rows = [{PLACE: x.place_of(name), "name": name} for name in x.in_order]
    right_end = x.place_of(x.in_order[-1], 1.0)
    style = {"type": "text", "color": INK, "tooltip": None}
    names = {
        "data": {"values": places},
        "mark": style | {"angle": 270, "align": "right", "baseline": "middle", "fontSize": 10},
        "encoding": {
            "x": x.encoding(),
            "y": {"value": height + 6},
            "text": {"field": "name", "type": "nominal"},
        },
    }
    words = {
        "data": {"values": [{}]},
        "mark": style | {"text": heading, "color": GREY, "align": "right", "baseline": "bottom"},
        "encoding": {"x": {"datum": right_end}, "y": {"value": -4}},
    }
    return [rule, names, words]


def panel(layers: Sequence[Chart], title: str, columns: int, height: int = HEIGHT) -> Chart:
    """Return layers over each other, as wide as their place among `columns` side by side."""
    size = {"width": WIDTHS[min(columns, MOST_COLUMNS)], "height": height}
    return {"title": title.split("\n"), "layer": list(layers)} | size


def columns_of(count: int) -> int:
    """Return how many of `count` panels are side by side, so that they stay readable."""
    # As few rows as MOST_COLUMNS allows, filled evenly: 5 panels are 3 + 2, not 4 + 1.
    return -(-count // max(-(-count // MOST_COLUMNS), 1))


def grid(panels: Sequence[Chart], columns: int) -> Chart:
    """Return panels row by row below one legend, with the signal of the runs to hide."""
    shared = {"color": "shared", "shape": "shared", "strokeDash": "shared"}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "params": [{"name": HIDDEN, "value": []}],
        "concat": list(panels),
        "columns": columns,
        "spacing": 26,
        "resolve": {"scale": shared},
        "config": CONFIG,
    }


CONFIG: Chart = {
    "font": "DejaVu Sans, system-ui, sans-serif",
    "background": "#ffffff",
    "view": {"stroke": None},
    "axis": {
        "gridColor": "#e6e6e6",
        "gridWidth": 0.6,
        "domainColor": INK,
        "tickColor": INK,
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
    },
    "title": {"fontSize": 12, "fontWeight": "normal", "color": INK},
    "legend": {
        "orient": "top",
        "titleOrient": "left",
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "labelLimit": 400,
        "titleLimit": 400,
        "layout": {"top": {"anchor": "start", "direction": "vertical", "margin": 6}},
        "symbolOpacity": 1,
        "symbolSize": 60,
        # lines that are dashed would cut up the outline of the markers
        "symbolStrokeWidth": 0,
    },
}
