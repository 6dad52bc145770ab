"""The loss on the named planes of a study, and on the planes of its trajectories.

Contours, which Vega-Lite has none of: the pictures are matplotlib's, on the page too.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from base.quantities import MILLI, MILLINATS
from ckpt_tools.hf.measured import ProjectedPoint, Slice, TrajectoryPlane
from ckpt_tools.hf.results import read_result
from curvature.slices.figure import (
    BAR_INCHES,
    HALO,
    INK,
    LOOK,
    add_colour_bar,
    costs,
    draw_contours,
    draw_plane,
    increase_over,
    levels_of,
)
from study.figures.canvas import Canvas
from study.figures.charts import NATS, Rows
from study.figures.figure import Drawn, figure
from study.measurements.planes import BranchedRun
from study.paths import MeasuredModel, hf_directory

HEIGHT = 3.7  # inches of the planes
BESIDE, ABOVE = 1.0, 1.2  # inches of the labels beside a plane, and of those above and below it
# Points of a letter's width and of a line's height in small words, and of a checkpoint's mark.
LETTER, LINE, MARK = 4.9, 11, 4
REACHES = (12, 24, 36)  # points of a name from its place, as far as others are nearer
DISTANCE = "distance of the weights"
X, Y = f"{DISTANCE}, along x", f"{DISTANCE}, along y"
LOSS = f"loss, {NATS}"
BRANCH, TRUNK = "#1f66a8", INK  # of lines: the runs that branch off, and the one they leave


@figure(
    "planes",
    "The loss on planes through three models each, over that of the first one on the same"
    " sequences. Distances are those of all weights, the same in both directions; each is beside"
    " its line. Above each: the increases at the other two points, with their standard errors over"
    " sequences.",
    lambda study: bool(study.planes),
)
def planes(canvas: Canvas) -> Drawn | None:
    """Draw a panel per named plane."""
    results = {}
    for plane in canvas.study.resolved_planes:
        path = canvas.directory / plane.result
        if path.exists():
            content = read_result(path, Slice).measured.model_dump()
            results[plane.name] = {"measured": content}
    if not results:
        return None
    return Drawn(_plane_rows(results), _plane_picture(results))


@matplotlib.rc_context(LOOK)
def _plane_picture(results: Mapping[str, dict[str, Any]]) -> Picture:
    # Levels over all planes, so that a colour is the same increase in every panel.
    increases = [increase_over(plane).ravel() for plane in results.values()]
    levels = levels_of(np.concatenate(increases))
    grids = [plane["measured"]["grid"] for plane in results.values()]
    picture, axes = _panels(grids)
    for axis, (name, plane) in zip(axes, results.items(), strict=True):
        points = plane["measured"]["points"]
        filled = draw_plane(axis, plane, levels)
        _draw_distances(axis, points)
        axis.set(xlabel=f"{DISTANCE}, from {points[0]['name']} to {points[1]['name']}")
        axis.set(ylabel=f"{DISTANCE}, across, towards {points[2]['name']}")
        axis.annotate(
            costs(plane), (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8,
            linespacing=1.4,
        )  # fmt: skip
        axis.set_title(name, loc="left", pad=36)
    firsts = {plane["measured"]["points"][0]["name"] for plane in results.values()}
    over = firsts.pop() if len(firsts) == 1 else "the first point"
    add_colour_bar(picture, filled, _bar_beside(axes[-1], grids[-1]), over)
    return picture


def _draw_distances(axes: Axes, points: Sequence[dict[str, Any]]) -> None:
    """Draw the triangle of the points, each side with its length."""
    for first, second in combinations(points, 2):
        x, y = ([point[axis] for point in (first, second)] for axis in "xy")
        axes.plot(x, y, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
        length = math.hypot(x[1] - x[0], y[1] - y[0])
        axes.annotate(
            f"{length:.3g}", (sum(x) / 2, sum(y) / 2), fontsize=8, ha="center", va="center",
            color=INK, zorder=4, path_effects=HALO,
        )  # fmt: skip


def _plane_rows(results: Mapping[str, dict[str, Any]]) -> Rows:
    """Return the grids, and the points with their errors and distances from the first."""
    rows = Rows()
    for name, plane in results.items():
        measured, head = plane["measured"], {"plane": name}
        rows += _grid_rows(head, measured["grid"])
        for point in measured["points"]:
            values = {X: point["x"], Y: point["y"], LOSS: point["loss"]}
            error = MILLI * point["increase_standard_error"]
            values |= {f"increase over the first, {MILLINATS}": MILLI * point["increase"]}
            values |= {f"its standard error, {MILLINATS}": error}
            rows.append(head | {"series": point["name"]} | values)
    return rows


def _grid_rows(head: dict[str, Any], grid: dict[str, Any]) -> Rows:
    return [
        head | {"series": "grid", X: x, Y: y, LOSS: loss}
        for y, losses in zip(grid["y"], grid["loss"], strict=True)
        for x, loss in zip(grid["x"], losses, strict=True)
    ]


@figure(
    "trajectory_plane",
    "The loss on the plane of the first two principal components of a run's checkpoints, over that"
    " at the projection of its last one. Lines join the projections of checkpoints: of the run,"
    " black, and of the runs that branch from it, blue, which have no part in the components. No"
    " checkpoint is in the plane itself: above are the shares of the ends' distances from the mean"
    " that are off it.",
    lambda study: study.pca is not None,
)
def trajectory_plane(canvas: Canvas) -> Drawn | None:
    """Draw a panel per run that others branch from."""
    planes_by_run, lines = {}, {}
    for trajectory in canvas.study.branched_runs:
        path = canvas.directory / trajectory.result
        if path.exists():
            measured = read_result(path, TrajectoryPlane).measured
            planes_by_run[trajectory.run] = measured.model_dump()
            lines[trajectory.run] = _lines(trajectory, measured)
    if not planes_by_run:
        return None
    labels = {name: look.label for name, look in canvas.runs.looks.items()}
    # All of one picture have one seed.
    names = {run.name: canvas.study.group_of(run).label for run in canvas.study.runs}
    picture = _trajectory_picture(planes_by_run, lines, names)
    return Drawn(_trajectory_rows(planes_by_run, lines, labels), picture)


class Projected(NamedTuple):
    """A checkpoint of a run on the plane."""

    run: str
    model: MeasuredModel
    point: ProjectedPoint


def _lines(branched: BranchedRun, measured: TrajectoryPlane) -> dict[str, list[Projected]]:
    """Return the checkpoints along every line, by its run; a branch begins where it leaves."""
    # RUN/hf/CHECKPOINT, wherever the study is
    points = {Path(*Path(point.path).parts[-3:]): point for point in measured.points}
    return {
        name: [Projected(run, model, points[hf_directory(run, model)]) for run, model in line]
        for name, line in branched.lines.items()
    }


def _over_the_end(plane: dict[str, Any]) -> NDArray[np.float64]:
    """Return the losses of a grid over that at the place of the run's last checkpoint, [Y, X]."""
    end = [point for point in plane["points"] if point["fitted"]][-1]["loss"]
    return np.array(plane["grid"]["loss"]) - float(end)


@matplotlib.rc_context(LOOK)
def _trajectory_picture(
    planes_by_run: Mapping[str, dict[str, Any]],
    lines: Mapping[str, Mapping[str, list[Projected]]],
    names: Mapping[str, str],
) -> Picture:
    increases = {run: _over_the_end(plane) for run, plane in planes_by_run.items()}
    levels = levels_of(np.concatenate([increase.ravel() for increase in increases.values()]))
    grids = [plane["grid"] for plane in planes_by_run.values()]
    picture, axes = _panels(grids)
    for axis, (run, plane) in zip(axes, planes_by_run.items(), strict=True):
        filled = draw_contours(axis, plane["grid"], increases[run], levels)
        for name, line in lines[run].items():
            _draw_line(axis, line, is_trunk=name == run)
        _name_ends(axis, plane["grid"], lines[run], names, trunk=run)
        shares = plane["variance_shares"]
        axis.set_xlabel(f"{DISTANCE}, component 1 ({shares[0]:.0%} of the variance)")
        axis.set_ylabel(f"{DISTANCE},\ncomponent 2 ({shares[1]:.0%})")
        outside = ", ".join(
            # one that is not wrapped within
            f"{names[name]} {line[-1].point.off_plane_share:.0%}".replace(" ", "\N{NO-BREAK SPACE}")
            for name, line in lines[run].items()
        )
        letters = round(72 * _inches(plane["grid"]) / LETTER)
        axis.annotate(
            "\n".join(wrap(f"ends off the plane: {outside}", width=letters)),
            (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8,
        )  # fmt: skip
    add_colour_bar(picture, filled, _bar_beside(axes[-1], grids[-1]), "the last projection")
    return picture


def _draw_line(axes: Axes, line: list[Projected], *, is_trunk: bool) -> None:
    """Draw the projections of a run's checkpoints."""
    colour = TRUNK if is_trunk else BRANCH
    x, y = ([getattr(place.point, axis) for place in line] for axis in "xy")
    axes.plot(
        x, y, "o-", color=colour, markersize=3.5, linewidth=1.3, markeredgecolor="white",
        markeredgewidth=0.6, zorder=4 if is_trunk else 5, path_effects=HALO if is_trunk else [],
    )  # fmt: skip


def _name_ends(
    axes: Axes,
    grid: dict[str, Any],
    lines: Mapping[str, list[Projected]],
    names: Mapping[str, str],
    *,
    trunk: str,
) -> None:
    """Write the first and last step of the run, and the name of each branch at its end."""
    first, *_, last = lines[trunk]
    notes = [(place.point, _step(place.model), TRUNK) for place in (first, last)]
    notes += [
        (line[-1].point, names[name], BRANCH) for name, line in lines.items() if name != trunk
    ]
    # Both axes have one scale.
    scale = 72 * HEIGHT / _width(grid["y"])
    points = [place.point for line in lines.values() for place in line]
    taken = [
        Bbox.from_bounds(scale * point.x - MARK / 2, scale * point.y - MARK / 2, MARK, MARK)
        for point in points
    ]
    for point, text, colour in notes:
        at = (scale * point.x, scale * point.y)
        offset, reach = _free_offset(at, len(text) * LETTER, taken)
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6}
        axes.annotate(
            text, (point.x, point.y), offset, textcoords="offset points", fontsize=7.5,
            color=colour, zorder=6, ha="center", va="center", path_effects=HALO,
            arrowprops=leader if reach > REACHES[0] else None,
        )  # fmt: skip


def _free_offset(
    at: tuple[float, float], width: float, taken: list[Bbox]
) -> tuple[tuple[float, float], float]:
    """Return where the middle of a name is from its place, in points, and how far that is.

    Nearest are tried first; where all touch what is `taken`, it is the first. Its box is added.
    """
    beside = width / 2
    tried = [
        ((dx, dy), reach)
        for reach in REACHES
        for dx, dy in ((0, reach), (0, -reach), (beside + reach, 0), (-beside - reach, 0))
    ]
    boxes = [
        Bbox.from_bounds(at[0] + dx - beside, at[1] + dy - LINE / 2, width, LINE)
        for (dx, dy), _ in tried
    ]
    free = [index for index, box in enumerate(boxes) if not box.count_overlaps(taken)]
    chosen = free[0] if free else 0
    taken.append(boxes[chosen])
    return tried[chosen]


def _step(model: MeasuredModel) -> str:
    return model.revision or f"step {model.step:,}"


def _trajectory_rows(
    planes_by_run: Mapping[str, dict[str, Any]],
    lines: Mapping[str, Mapping[str, list[Projected]]],
    labels: Mapping[str, str],
) -> Rows:
    """Return the grids, and the places of the checkpoints with both of their losses."""
    rows = Rows()
    for run, plane in planes_by_run.items():
        head = {"plane": labels[run]}
        rows += _grid_rows(head, plane["grid"])
        places = [place for line in lines[run].values() for place in line]
        # Branches that leave one checkpoint share it.
        for place in dict.fromkeys(places):
            point = place.point
            values: dict[str, Any] = {"step": place.model.step, X: point.x, Y: point.y}
            values |= {LOSS: point.loss}
            values |= {f"loss of the checkpoint itself, {NATS}": point.checkpoint_loss}
            values |= {"distance off the plane": point.off_plane}
            values |= {"its share of the distance from the mean": point.off_plane_share}
            rows.append(head | {"series": labels[place.run]} | values)
    return rows


def _panels(grids: Sequence[dict[str, Any]]) -> tuple[Picture, list[Axes]]:
    """Return a picture with a panel per grid, as wide as it is, and with an axis for each."""
    widths = [_inches(grid) for grid in grids]
    size = (sum(widths) + BESIDE * len(grids) + 1.6, HEIGHT + ABOVE)
    picture = Picture(figsize=size, dpi=170, layout="constrained")
    axes = picture.subplots(1, len(grids), squeeze=False, width_ratios=widths)[0]
    return picture, list(axes)


def _inches(grid: dict[str, Any]) -> float:
    """Return the width of the panel of a grid."""
    return HEIGHT * _width(grid["x"]) / _width(grid["y"])


def _width(coordinates: Sequence[float]) -> float:
    return coordinates[-1] - coordinates[0]


def _bar_beside(axes: Axes, grid: dict[str, Any]) -> Axes:
    """Return where the scale of the colours is drawn, beside the panel of a grid."""
    width = _inches(grid)
    return axes.inset_axes((1 + 0.12 / width, 0.0, BAR_INCHES / width, 1.0))
