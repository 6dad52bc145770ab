"""A plot as a picture, by matplotlib."""

import math
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from study.canvas import RATE_COLOUR, RATE_TITLE
from study.plots import Axis, Mark, Panel, Plot, Point, Series, Span

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.limits": (-4, 5),
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
LINES: dict[str, Any] = {
    "plain": {"color": "#999999", "linewidth": 0.8, "zorder": 0},
    "faint": {"color": "#dddddd", "linewidth": 0.6, "zorder": 0},
    "dashed": {"color": "#555555", "linewidth": 1, "linestyle": "--", "zorder": 1},
}
SHADE_COLOUR, SHADE_TEXT_COLOUR, NOTE_COLOUR = "#f3f1e7", "#8a8468", "#777777"
DOTTED: Any = (0, (1, 1.6))
SMALL = 0.58  # of a marker's size
SQUARE_TICKS = 6
SAVED: dict[str, Any] = {  # without versions and dates, so that the same numbers make the same file
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


def save(figure: Figure, path: Path, kind: str = "png") -> None:
    """Writes a PNG or a PDF; the layout is made once, by the first of them."""
    figure.savefig(path, format=kind, metadata=SAVED[kind])
    figure.set_layout_engine("none")


def drawn(plot: Plot) -> Figure:
    """The picture of a plot."""
    with matplotlib.rc_context(STYLE):
        width = 4.6 * plot.columns + 0.4 if plot.columns > 1 else 6.4
        figure = Figure(figsize=(width, plot.height), dpi=170, layout="constrained")
        grid: Any = {"height_ratios": plot.row_heights or (1,) * plot.rows, "sharey": plot.shares_y}
        axes = list(figure.subplots(plot.rows, plot.columns, squeeze=False, **grid).flat)
        for place, panel in plot.shown:
            is_last = (place + 1) % plot.columns == 0
            _draw_panel(axes[place], panel, is_last, labels_y=not plot.shares_y or place % plot.columns == 0)
        for axis, is_there in zip(axes, plot.panels, strict=True):
            axis.set_visible(is_there is not None)
        _legend(figure, plot)
        return figure


def _draw_panel(axis: Axes, panel: Panel, labels_rates: bool, labels_y: bool) -> None:
    axis.set_title(panel.title, pad=16 if panel.shade else None)
    for series in panel.series:
        _draw_series(axis, series)
    if panel.note:
        axis.text(0.5, 0.5, panel.note, transform=axis.transAxes, ha="center", color=NOTE_COLOUR)
    for line in panel.lines:
        (axis.axhline if line.across == "y" else axis.axvline)(line.at, **LINES[line.kind])
    _set_axis(axis, "x", panel.x)
    _set_axis(axis, "y", panel.y)
    axis.set_xlabel(panel.x.written or panel.x.label)
    axis.set_ylabel((panel.y.written or panel.y.label) if labels_y else "")
    if panel.is_square:
        axis.set_aspect("equal")
        for one in (axis.xaxis, axis.yaxis):
            if one.get_scale() == "linear":
                one.set_major_locator(MaxNLocator(SQUARE_TICKS, steps=[1, 2, 2.5, 5, 10]))
    if panel.shade:
        axis.axvspan(*panel.shade.span, color=SHADE_COLOUR, zorder=0, linewidth=0)
        place: Any = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom"}
        axis.text(sum(panel.shade.span) / 2, 1.0, panel.shade.name, color=SHADE_TEXT_COLOUR, **place)
    if panel.rates:
        _draw_rates(axis, panel.rates, labels_rates)


def _set_axis(axes: Axes, which: Literal["x", "y"], of: Axis) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    if of.is_log:
        axes.set(**{f"{which}scale": "log"})
    axes.set(**{f"{which}lim": of.limits})
    if of.holds_zero:
        axes.set(**{f"{which}lim": (min(0.0, axis.get_view_interval()[0]), None)})
    if of.is_percent:
        axis.set_major_formatter(PercentFormatter(1.0))
    if of.is_integer:
        axis.set_major_locator(MaxNLocator(integer=True))
    if of.is_place and of.ticks:
        axes.grid(visible=False, axis=which)
        axes.tick_params(axis=which, length=0)
    if of.ticks:
        axis.set_ticks([place for place, _ in of.ticks], [text for _, text in of.ticks])
        axis.set_minor_locator(NullLocator())
    elif of.is_log:  # values written out, the powers of ten alone where there are many
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _draw_rates(axis: Axes, rates: tuple[Series, ...], is_labelled: bool) -> None:
    second = axis.twinx()
    second.spines["right"].set_visible(True)
    second.spines["right"].set_color(RATE_COLOUR)
    second.tick_params(colors=RATE_COLOUR)
    second.grid(False)
    second.set_ylim(0, 1.06)
    if is_labelled:
        second.set_ylabel(f"{RATE_TITLE} (dotted)", color=RATE_COLOUR)
    else:
        second.set_yticklabels([])
    for series in rates:
        _draw_series(second, series)


def _bars(points: tuple[Point, ...], which: str) -> list[list[float]] | None:
    """Lengths below and above; None where no point has an interval."""
    below, above = [], []
    for point in points:
        value, interval = (point.x, point.x_interval) if which == "x" else (point.y, point.y_interval)
        low, high = interval or (value, value)
        below.append(value - low)
        above.append(high - value)
    return [below, above] if any(below) or any(above) else None


def _draw_series(axis: Axes, series: Series) -> None:
    mark, points = series.mark, series.points
    if not points:
        return
    x, y = [point.x for point in points], [point.y for point in points]
    odd = [point for point in points if point.is_open or point.is_small]
    plain = [index for index, point in enumerate(points) if point not in odd]
    style = _style(mark)
    bars: Any = {"yerr": None if mark.has_band else _bars(points, "y"), "xerr": _bars(points, "x")}
    colour = matplotlib.colors.to_rgba(mark.colour, mark.opacity_of_bars)
    axis.errorbar(x, y, ecolor=colour, elinewidth=mark.bar, capsize=mark.cap, markevery=plain, **bars, **style)
    for point in odd:
        changed = style | {"linestyle": "none", "zorder": mark.order + 1}
        if point.is_open:
            changed["markerfacecolor"] = "white"
        if point.is_small:
            changed["markersize"] = SMALL * mark.size
        axis.plot([point.x], [point.y], **changed)
    if mark.has_band:
        spans: list[Span] = [point.y_interval or (point.y, point.y) for point in points]
        low, high = zip(*spans, strict=True)
        axis.fill_between(x, low, high, color=mark.colour, alpha=0.13, linewidth=0)


def _style(mark: Mark) -> dict[str, Any]:
    style: dict[str, Any] = {
        "color": mark.colour,
        "linestyle": DOTTED if mark.line == ":" else mark.line or "none",
        "marker": mark.marker or "none",
        "linewidth": mark.width,
        "markersize": mark.size,
        "zorder": mark.order,
    }
    if mark.is_open:
        style["markerfacecolor"] = "white"
    if mark.edge:
        style |= {"markeredgecolor": mark.edge, "markeredgewidth": 0.6}
    return style


def _legend(figure: Figure, plot: Plot) -> None:
    """One legend above all panels, in as many rows as it needs."""
    handles = [Line2D([], [], linestyle="none", label=plot.heading)]
    handles += [
        Line2D([], [], label=label, **_style(mark)) for label, mark in (*plot.looks.items(), *plot.keys.items())
    ]
    inches = sum(0.5 + 0.065 * len(str(handle.get_label())) for handle in handles)
    columns = math.ceil(len(handles) / math.ceil(inches / figure.get_figwidth()))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.2)
