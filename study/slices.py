"""The loss on the plane through the last two checkpoints of a run and its quantized weights, a panel per run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from curvature.slices.figure import (
    ALONG_X,
    ALONG_Y,
    BAR_INCHES,
    INK,
    MARKERS,
    SYMBOLS,
    add_colour_bar,
    draw_plane,
    increase_over,
    levels_of,
    with_error,
)
from study.canvas import Canvas
from study.collect import read_measured
from study.drawing import STYLE
from study.layout import slice_result
from study.plots import Axis, Mark, Panel, Plane, Plot, Point, Series, wrapped
from study.settings import Study, spec_title
from study.trajectories import NATS
from train.command import UserError
from train.run_directory import step_name

HEIGHT = 4.4  # inches of the planes
POINTS = {"base": "last weights", "previous": "one checkpoint before", "quantized": "quantized"}
POINT = Mark(colour=INK, line="", size=7, is_open=True, order=5)
BESIDE, ABOVE = 0.62, 1.7  # inches that labels take up beside every plane, and labels and legend above and below


def read_slice(path: Path) -> dict[str, Any]:
    """What is drawn of a slice's result.json; UserError where it is none."""
    measured = read_measured(path)
    if not {"grid", "points"} <= measured.keys():
        raise UserError(f"{path} is no result of a slice; remove it and run the study again")
    return {"measured": measured}


def slices_figure(canvas: Canvas, directory: Path) -> tuple[Figure | None, Plot]:
    """In the order of the runs, with one scale of colours; of the distances every panel has its own."""
    study = canvas.study
    spec, runs = study.quantization.by_block[0], {run.name: run for run in study.runs}
    places = {look.label: directory / slice_result(runs[run], spec) for run, look in canvas.looks.items()}
    results = {label: read_slice(place) for label, place in places.items() if place.exists()}
    if not results:
        return None, Plot(panels=(), **canvas.legend)
    levels = levels_of(np.concatenate([increase_over(result).ravel() for result in results.values()]))
    with matplotlib.rc_context(STYLE):
        figure, colours = _picture(study, spec, results, levels)
    panels = tuple(
        _panel(label, f"{study.heading} {label}", result, levels, colours) for label, result in results.items()
    )
    keys = {words: replace(POINT, marker=MARKERS[name]) for name, words in POINTS.items()}
    placed, rows = wrapped(panels)
    return figure, Plot(panels=placed, rows=rows, keys=keys, height=5.0 * rows, **canvas.legend)


def _picture(
    study: Study, spec: str, results: dict[str, dict[str, Any]], levels: list[float]
) -> tuple[Figure, list[str]]:
    """The figure, and the colours between its levels."""
    shapes = [_width_over_height(result) for result in results.values()]
    width = HEIGHT * sum(shapes) + BESIDE * len(shapes) + 1.1
    figure = Figure(figsize=(width, HEIGHT + ABOVE), dpi=170, layout="constrained")
    axes = list(figure.subplots(1, len(shapes), squeeze=False, width_ratios=shapes)[0])
    for axis in axes:
        axis.grid(visible=False)
        axis.spines[["top", "right"]].set_visible(True)
    for axis, (label, result) in zip(axes, results.items(), strict=True):
        filled = draw_plane(axis, result, levels)
        axis.set_xlabel(ALONG_X)
        axis.annotate(
            _costs(result, SYMBOLS), (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8, linespacing=1.4
        )
        axis.set_title(f"{study.heading} {label}", loc="left", pad=36)
    axes[0].set_ylabel(ALONG_Y)
    add_colour_bar(figure, filled, axes[-1].inset_axes((1.06, 0.0, BAR_INCHES / (HEIGHT * shapes[-1]), 1.0)))
    names = _names(study, spec)
    look: Any = {"linestyle": "none", "color": "white", "markeredgecolor": INK, "markersize": 6.5}
    handles = [
        Line2D([], [], marker=MARKERS[name], label=f"{SYMBOLS[name]}  {words}", **look) for name, words in names.items()
    ]
    columns = len(handles) if width > 9 else 1  # a narrow figure has them below each other
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handletextpad=0.3, columnspacing=1.6)
    return figure, [to_hex(colour) for colour in filled.get_cmap()(np.arange(len(levels) - 1))]


def _names(study: Study, spec: str) -> dict[str, str]:
    """The points in words, with their steps where all runs have the same."""
    before, last = (f" ({step_name(step)})" for step in study.runs[0].save_steps[-2:])
    if len({run.save_steps[-2:] for run in study.runs}) > 1:
        before = last = ""
    return {
        "base": f"weights at the end of training{last}",
        "previous": f"weights one checkpoint before{before}",
        "quantized": f"quantized: {spec_title(spec)}",
    }


def _panel(label: str, title: str, result: dict[str, Any], levels: list[float], colours: list[str]) -> Panel:
    """The same as data."""
    grid = result["measured"]["grid"]
    points = [
        Series(
            replace(POINT, marker=MARKERS[point["name"]]),
            (Point(x=point["x"], y=point["y"], facts=_facts_of(point)),),
            label,
            POINTS[point["name"]],
        )
        for point in result["measured"]["points"]
    ]
    plane = Plane(grid["x"], grid["y"], increase_over(result), levels, colours, "loss over that of the last", NATS)
    x, y = Axis(title="distance along the last step"), Axis(title="distance towards the quantized weights")
    return Panel(
        x=x,
        y=y,
        series=tuple(points),
        title=f"{title}\n{_costs(result, POINTS)}",
        run=label,
        plane=plane,
        is_square=True,
    )


def _facts_of(point: dict[str, Any]) -> dict[str, Any]:
    return {
        "loss over that of the last (nats per token)": point["increase"],
        "standard error (nats per token)": point["increase_standard_error"],
    }


def _costs(result: dict[str, Any], names: dict[str, str]) -> str:
    """What the points other than the origin cost, with standard errors over sequences."""
    return "\n".join(
        f"{names[point['name']]}  {with_error(point['increase'], point['increase_standard_error'], '+')}"
        for point in result["measured"]["points"][1:]
    )


def _width_over_height(result: dict[str, Any]) -> float:
    grid = result["measured"]["grid"]
    width, height = (grid[axis][-1] - grid[axis][0] for axis in "xy")
    return float(width / height)
