"""A slice as a picture: the rise of the loss over theta_K, with the points of the plane marked.

Shapes: Y and X coordinates of the grid, F of the finer one that is drawn.
"""

import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

LOOK: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
}
INK = "#222222"
SIDE = 4.2  # inches of the plane, were it square
LABELLED_SHARE = 0.1  # of the picture that a contour encloses if there is room for its label
CLEAR_SHARE = 0.07  # of the picture's diagonal: nearer to a point no contour is labelled
DARK_FROM = 0.6  # of the levels: what is written on the colours above is white
LEAST_WIDTH = 5.4  # inches, for the legend
BAR_INCHES = 0.22
MOST_LEVELS = 10  # above zero; as many below where the loss falls
FINER = 12  # drawn intervals for each of the grid's
MARKERS = {"base": "o", "previous": "s", "quantized": "^"}
SYMBOLS = {"base": r"$\theta_K$", "previous": r"$\theta_{K-1}$", "quantized": r"$\hat\theta_K$"}
ALONG_X, ALONG_Y = (
    r"distance along $\theta_{K-1} - \theta_K$",
    r"distance orthogonal to it, towards $\hat\theta_K$",
)
LABEL_OFFSETS = {
    "base": (-8, -4, "right", "top"),
    "previous": (8, -4, "left", "top"),
    "quantized": (0, 8, "center", "bottom"),
}


def increase_over(result: dict[str, Any]) -> NDArray[np.float64]:
    """Return the losses of the grid over theta_K's, [Y, X]."""
    measured = result["measured"]
    return np.array(measured["grid"]["loss"]) - float(measured["points"][0]["loss"])


def levels_of(increase: NDArray[np.float64]) -> list[float]:
    """Return contour levels: 0, 1, 2 and 5 x 10^k up to the highest value, the same below 0."""

    def ladder(top: float) -> list[float]:
        decade = int(np.floor(np.log10(top)))
        rungs = [
            rung * 10.0**power for power in range(decade - 4, decade + 2) for rung in (1, 2, 5)
        ]
        last = next(index for index, rung in enumerate(rungs) if rung >= top)
        return rungs[last + 1 - MOST_LEVELS : last + 1]

    high, low = float(increase.max()), float(increase.min())
    above = ladder(high) if high > 0 else []
    below = ladder(-low) if low < 0 else []
    smallest = above[0] if above else 0.0
    return [-level for level in reversed(below) if level >= smallest] + [0.0] + above


def refined(values_XN: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values along the first axis at FINER points an interval, by piecewise cubics.

    Catmull-Rom, with the parabola through the last three at either end: exact for parabolas, which
    basins are.
    """
    ends = [
        3 * values_XN[0] - 3 * values_XN[1] + values_XN[2],
        3 * values_XN[-1] - 3 * values_XN[-2] + values_XN[-3],
    ]
    padded = np.concatenate([ends[:1], values_XN, ends[1:]])
    position_F = np.linspace(0, len(values_XN) - 1, FINER * (len(values_XN) - 1) + 1)
    left_F = np.minimum(position_F.astype(int), len(values_XN) - 2)
    t = (position_F - left_F)[:, None]
    before, at, after, beyond = (padded[left_F + offset] for offset in range(4))
    slopes = (after - before) / 2, (beyond - at) / 2
    return (  # type: ignore[no-any-return]
        at * (1 - 3 * t**2 + 2 * t**3)
        + after * (3 * t**2 - 2 * t**3)
        + slopes[0] * (t - 2 * t**2 + t**3)
        + slopes[1] * (t**3 - t**2)
    )


def _colours(levels: list[float]) -> tuple[ListedColormap, BoundaryNorm]:
    """Return a colour for each interval: yellow to violet above zero, pale to full blue below."""
    falls, rises = levels.index(0.0), len(levels) - 1 - levels.index(0.0)
    blues, warm = matplotlib.colormaps["Blues"], matplotlib.colormaps["magma_r"]
    colours = [blues(0.25 + 0.45 * index / max(falls - 1, 1)) for index in reversed(range(falls))]
    colours += [warm(0.01 + 0.62 * index / max(rises - 1, 1)) for index in range(rises)]
    return ListedColormap(colours), BoundaryNorm(levels, len(colours))


def _written(level: float, _position: float | None = None) -> str:
    return f"{level:g}".replace("-", "\N{MINUS SIGN}")


def _name(identity: dict[str, Any]) -> str:
    """Return a model as a reader knows it: its directory, after its run where there is one."""
    directory = identity["path"].rstrip("/").rsplit("/", 1)[-1]
    run = identity.get("lineage", {}).get("run")
    return f"{run} {directory}" if run else directory


def with_error(value: float, error: float, sign: str = "") -> str:
    """Return a value and its standard error, to two digits of the error.

    Example:
        >>> with_error(3.14159, 0.0271)
        '3.142 ± 0.027'
    """
    digits = max(1 - math.floor(math.log10(error)), 0) if error else 6
    return f"{value:{sign}.{digits}f} \N{PLUS-MINUS SIGN} {error:.{digits}f}".replace(
        "-", "\N{MINUS SIGN}"
    )


def _mark(axes: Axes, points: list[dict[str, Any]]) -> None:
    for point in points:
        name = point["name"]
        axes.plot(
            point["x"],
            point["y"],
            MARKERS[name],
            markersize=7,
            color="white",
            markeredgecolor=INK,
            zorder=5,
            clip_on=False,
        )
        dx, dy, horizontal, vertical = LABEL_OFFSETS[name]
        axes.annotate(
            SYMBOLS[name],
            (point["x"], point["y"]),
            (dx, dy),
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            fontsize=11,
            color=INK,
            zorder=6,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )


def _legend(figure: Figure, result: dict[str, Any]) -> None:
    """Add the models and the cost of each point, with standard errors over sequences."""
    spec, points = result["spec"], result["measured"]["points"]
    loss = with_error(points[0]["loss"], points[0]["standard_error"])
    labels = [f"loss {loss} nats per token over {spec['sequences']} sequences"]
    names = (_name(spec["previous"]), spec["quantized"]["spec"])
    for point, name in zip(points[1:], names, strict=True):
        cost = with_error(point["increase"], point["increase_standard_error"], "+")
        labels.append(f"{name}: {cost}")
    look: Any = {"linestyle": "none", "color": "white", "markeredgecolor": INK, "markersize": 6}
    handles = []
    for point, label in zip(points, labels, strict=True):
        name = point["name"]
        words = f"{SYMBOLS[name]}  {label}"
        handles.append(Line2D([], [], marker=MARKERS[name], label=words, **look))
    title = f"{_name(result['model'])}, {names[1]}"
    heading: Any = {"title": title, "title_fontsize": 10, "alignment": "left"}
    figure.legend(handles=handles, loc="outside upper left", handletextpad=0.3, **heading)


def draw_plane(axes: Axes, result: dict[str, Any], levels: list[float]) -> ContourSet:
    """Draw filled contours of the increase at `levels`, and the points; return the contours.

    A label that would be on a point or on the frame is left out.
    """
    grid, points = result["measured"]["grid"], result["measured"]["points"]
    fine_FF = refined(refined(increase_over(result)).T).T
    x_F, y_F = (refined(np.array(grid[axis])[:, None])[:, 0] for axis in "xy")
    colours, norm = _colours(levels)
    drawn = np.clip(fine_FF, levels[0], levels[-1])
    filled = axes.contourf(x_F, y_F, drawn, levels=levels, cmap=colours, norm=norm)
    lines = axes.contour(
        x_F, y_F, fine_FF, levels=levels[1:-1], colors=INK, linewidths=0.5, alpha=0.7
    )
    wide = [level for level in levels[1:-1] if (fine_FF < level).mean() > LABELLED_SHARE]
    ink = ["white" if levels.index(level) > DARK_FROM * len(levels) else INK for level in wide]
    reach = CLEAR_SHARE * math.hypot(x_F[-1] - x_F[0], y_F[-1] - y_F[0])
    for text in axes.clabel(lines, wide, fontsize=7, fmt=_written, inline_spacing=3, colors=ink):
        x, y = text.get_position()
        distances = [math.dist((x, y), (point["x"], point["y"])) for point in points]
        distances += [abs(x - x_F[0]), abs(x - x_F[-1]), abs(y - y_F[0]), abs(y - y_F[-1])]
        text.set_visible(min(distances) > reach)
    _mark(axes, points)
    axes.set_aspect("equal")
    return filled


def add_colour_bar(figure: Figure, filled: ContourSet, beside: Axes) -> None:
    """Draw the scale of the colours on `beside`."""
    bar = figure.colorbar(
        filled, cax=beside, ticks=filled.levels, spacing="uniform", format=_written
    )
    bar.set_label(r"loss over that of $\theta_K$, nats per token")
    bar.minorticks_off()


def draw_slice(result: dict[str, Any]) -> Figure:
    """Draw a slice's result.json: contours of the rise over theta_K, axes in Euclidean distance."""
    grid = result["measured"]["grid"]
    width, height = (grid[axis][-1] - grid[axis][0] for axis in "xy")
    stretch = (height / width) ** 0.5
    with matplotlib.rc_context(LOOK):
        figure = Figure(
            figsize=(max(SIDE / stretch + 2.1, LEAST_WIDTH), SIDE * stretch + 1.5),
            dpi=170,
            layout="constrained",
        )
        axes = figure.subplots()
        filled = draw_plane(axes, result, levels_of(increase_over(result)))
        axes.set_xlabel(ALONG_X)
        axes.set_ylabel(ALONG_Y)
        add_colour_bar(
            figure, filled, axes.inset_axes((1.03, 0.0, BAR_INCHES * stretch / SIDE, 1.0))
        )
        _legend(figure, result)
        return figure
