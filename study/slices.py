"""The loss on the plane through the last two checkpoints of a run and its quantized weights, a panel per run."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
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
from study.canvas import looks_of, save
from study.collect import read_measured
from study.layout import slice_result
from study.settings import Study, spec_title
from train.command import UserError
from train.run_directory import step_name

HEIGHT = 4.4  # inches of the planes
BESIDE, ABOVE = 0.62, 1.7  # inches that labels take up beside every plane, and labels and legend above and below


def read_slice(path: Path) -> dict[str, Any]:
    """What is drawn of a slice's result.json; UserError where it is none."""
    measured = read_measured(path)
    if not {"grid", "points"} <= measured.keys():
        raise UserError(f"{path} is no result of a slice; remove it and run the study again")
    return {"measured": measured}


def draw_slices(study: Study, directory: Path, path: Path) -> None:
    """By rising peak learning rate, with one scale of colours; of the distances every panel has its own."""
    spec, runs = study.quantization.by_block[0], {run.name: run for run in study.runs}
    places = {look.label: directory / slice_result(runs[run], spec) for run, look in looks_of(study).items()}
    results = {label: read_slice(place) for label, place in places.items() if place.exists()}
    shapes = [_width_over_height(result) for result in results.values()] or [1.0]
    width = HEIGHT * sum(shapes) + BESIDE * len(shapes) + 1.1
    figure = Figure(figsize=(width, HEIGHT + ABOVE), dpi=170, layout="constrained")
    axes = list(figure.subplots(1, len(shapes), squeeze=False, width_ratios=shapes)[0])
    for axis in axes:
        axis.grid(visible=False)
        axis.spines[["top", "right"]].set_visible(True)
    if not results:
        axes[0].text(0.5, 0.5, "not measured", transform=axes[0].transAxes, ha="center", color="#777777")
        save(figure, path)
        return
    levels = levels_of(np.concatenate([increase_over(result).ravel() for result in results.values()]))
    for axis, (label, result) in zip(axes, results.items(), strict=True):
        filled = draw_plane(axis, result, levels)
        _title(axis, label, result["measured"]["points"])
    axes[0].set_ylabel(ALONG_Y)
    add_colour_bar(figure, filled, axes[-1].inset_axes((1.06, 0.0, BAR_INCHES / (HEIGHT * shapes[-1]), 1.0)))
    before, last = (step_name(step) for step in study.runs[0].save_steps[-2:])
    same = len({run.save_steps[-2:] for run in study.runs}) == 1
    names = {
        "base": f"weights at the end of training ({last})" if same else "weights at the end of training",
        "previous": f"weights one checkpoint before ({before})" if same else "weights one checkpoint before",
        "quantized": f"quantized: {spec_title(spec)}",
    }
    look: Any = {"linestyle": "none", "color": "white", "markeredgecolor": INK, "markersize": 6.5}
    handles = [
        Line2D([], [], marker=MARKERS[name], label=f"{SYMBOLS[name]}  {words}", **look) for name, words in names.items()
    ]
    columns = len(handles) if width > 9 else 1  # a narrow figure has them below each other
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handletextpad=0.3, columnspacing=1.6)
    save(figure, path)


def _width_over_height(result: dict[str, Any]) -> float:
    grid = result["measured"]["grid"]
    width, height = (grid[axis][-1] - grid[axis][0] for axis in "xy")
    return float(width / height)


def _title(axis: Axes, label: str, points: list[dict[str, Any]]) -> None:
    """The run, and what the points other than the origin cost, with standard errors over sequences."""
    axis.set_xlabel(ALONG_X)
    lines = [
        f"{SYMBOLS[point['name']]}  {with_error(point['increase'], point['increase_standard_error'], '+')}"
        for point in points[1:]
    ]
    axis.annotate("\n".join(lines), (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8, linespacing=1.4)
    axis.set_title(f"peak learning rate {label}", loc="left", pad=36)
