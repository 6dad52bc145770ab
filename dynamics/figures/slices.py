"""The loss on the plane through the last two checkpoints of a run and its quantized weights.

Contours, which Vega-Lite has none of: the picture is matplotlib's, on the page too.
"""

import math
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

from base.quantities import MILLI, MILLINATS
from ckpt_tools.hf.measured import Slice
from curvature.slices.figure import (
    BAR_INCHES,
    INK,
    LOOK,
    MARKERS,
    add_colour_bar,
    costs,
    draw_plane,
    increase_over,
    levels_of,
    symbol_of,
)
from study.figures.canvas import Canvas
from study.figures.charts import Rows
from study.figures.figure import Drawn, figure
from study.measurements.titles import spec_title
from study.paths import slice_result

SIDE, COLUMNS = 4.4, 2  # inches of the longer side of a plane, and planes beside each other
BLANK = "#f0f0f0"  # of a panel, where its plane was not measured
BESIDE, ABOVE = 0.7, 1.2  # inches of the labels beside a plane, and above and below it
LEGEND = (1.1, 0.7)  # inches of the colour bar, and of the legend
NAMES = {"base": "weights at the end of training", "previous": "one checkpoint before"}
ALONG = ("along the last step", "towards the quantized weights")
LENGTH = "distance / length of the quantization step"
X, Y = (f"{LENGTH}, {along}" for along in ALONG)
INCREASE = f"loss over that of the last, {MILLINATS}"


@figure(
    "slices",
    "The loss on the plane through the last two checkpoints and the quantized last one, over that"
    " of the last checkpoint on the same sequences. All panels have one scale of colours and one of"
    " distances, in lengths of the run's own quantization step: where colours are paler, the same"
    " relative step costs less. Above each: the increases at the points, with their standard errors"
    " over sequences.",
    lambda study: bool(study.quantization.by_block),
)
def slices(canvas: Canvas) -> Drawn | None:
    """Draw a plane per run, in the order of the runs."""
    spec = canvas.study.quantization.by_block[0]
    measured = canvas.results(partial(slice_result, spec=spec), Slice)
    results = {label: _in_steps(plane) for label, plane in measured.items()}
    if not results:
        return None
    return Drawn(_rows(results), _picture(results, canvas.runs.heading, spec))


def _in_steps(measured: Slice) -> dict[str, Any]:
    """Return a slice as in result.json, its distances in lengths of the quantization step."""
    content = measured.model_dump()
    grid, points = content["grid"], content["points"]
    quantized = next(point for point in points if point["name"] == "quantized")
    # The last checkpoint is the origin, so this is the length of the quantization step.
    length = math.hypot(quantized["x"], quantized["y"])
    for axis in "xy":
        grid[axis] = [at / length for at in grid[axis]]
        for point in points:
            point[axis] /= length
    return {"measured": content}


@matplotlib.rc_context(LOOK)
def _picture(results: dict[str, dict[str, Any]], heading: str, spec: str) -> Picture:
    # Levels over all runs, so that a colour is the same increase in every panel.
    levels = levels_of(np.concatenate([increase_over(plane).ravel() for plane in results.values()]))
    grids = [result["measured"]["grid"] for result in results.values()]
    # One range for all runs: planes then have one scale of distances.
    limits = {
        axis: (min(grid[axis][0] for grid in grids), max(grid[axis][-1] for grid in grids))
        for axis in "xy"
    }
    shape = (limits["x"][1] - limits["x"][0]) / (limits["y"][1] - limits["y"][0])
    panel = (min(SIDE, SIDE * shape), min(SIDE, SIDE / shape))
    columns = min(len(grids), COLUMNS)
    rows = math.ceil(len(grids) / columns)
    width = (panel[0] + BESIDE) * columns + LEGEND[0]
    height = (panel[1] + ABOVE) * rows + LEGEND[1]
    picture = Picture(figsize=(width, height), dpi=170, layout="constrained")
    axes, empty = np.split(picture.subplots(rows, columns, squeeze=False).ravel(), [len(grids)])
    for axis in empty:
        axis.remove()
    for axis, (label, result) in zip(axes, results.items(), strict=True):
        filled = draw_plane(axis, result, levels)
        axis.set(xlim=limits["x"], ylim=limits["y"], facecolor=BLANK)
        axis.set_xlabel(X.replace(", ", ",\n"))
        axis.annotate(
            costs(result), (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8,
            linespacing=1.4,
        )  # fmt: skip
        axis.set_title(f"{heading} {label}", loc="left", pad=36)
    for axis in axes[::columns]:
        axis.set_ylabel(Y.replace(", ", ",\n"))
    bar = axes[columns - 1].inset_axes((1.06, 0.0, BAR_INCHES / panel[0], 1.0))
    add_colour_bar(picture, filled, bar, symbol_of("base"))

    names = NAMES | {"quantized": f"quantized: {spec_title(spec)}"}
    look: Any = {"linestyle": "none", "color": "white", "markeredgecolor": INK, "markersize": 6.5}
    handles = [
        Line2D([], [], marker=marker, label=f"{symbol_of(name)}  {words}", **look)
        for marker, (name, words) in zip(MARKERS, names.items(), strict=True)
    ]
    beside = len(handles) if width > 9 else 1  # a narrow figure has them below each other
    picture.legend(handles=handles, loc="outside upper left", ncols=beside)
    return picture


def _rows(results: dict[str, dict[str, Any]]) -> Rows:
    """Return the grids and the points on them."""
    rows = []
    for label, result in results.items():
        measured = result["measured"]
        grid, head = measured["grid"], {"run": label}
        for y, losses in zip(grid["y"], increase_over(result).tolist(), strict=True):
            for x, loss in zip(grid["x"], losses, strict=True):
                point_values = {X: x, Y: y, INCREASE: MILLI * loss}
                rows.append(head | {"series": "grid"} | point_values)
        for point in measured["points"]:
            point_values = {X: point["x"], Y: point["y"], INCREASE: MILLI * point["increase"]}
            error = {f"standard error, {MILLINATS}": MILLI * point["increase_standard_error"]}
            rows.append(head | {"series": point["name"]} | point_values | error)
    return rows
