"""The loss on a plane in a picture: its rise over that of one point, with the points marked.

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
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

from base.quantities import MILLI, MILLINATS, typeset

LOOK: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
}
INK = "#222222"
BAR_INCHES = 0.22
MOST_LEVELS = 10  # above zero; as many below where the loss falls
FINER = 12  # drawn intervals for each of the grid's
MARKERS = ("o", "s", "^")  # of the first point, the second and the third
# Words of a point beside its marker; others are named as they are.
SYMBOLS = {"base": r"$\theta_K$", "previous": r"$\theta_{K-1}$", "quantized": r"$\hat\theta_K$"}
# The first point is the origin, the second is to the right of it, the third above both: in points,
# and the side of the words that is at the marker.
LABEL_OFFSETS: tuple[tuple[float, float, str, str], ...] = (
    (-8, -4, "right", "top"),
    (8, -4, "left", "top"),
    (0, 8, "center", "bottom"),
)
HALO = [withStroke(linewidth=3, foreground="white")]


def symbol_of(name: str) -> str:
    """Return the words of a point of a plane."""
    return SYMBOLS.get(name, name)


def increase_over(result: dict[str, Any]) -> NDArray[np.float64]:
    """Return the losses of the grid over that of the first point, [Y, X]."""
    measured = result["measured"]
    return np.array(measured["grid"]["loss"]) - float(measured["points"][0]["loss"])


def levels_of(increase: NDArray[np.float64]) -> list[float]:
    """Return contour levels: 0, 1, 2 and 5 x 10^k up to the highest value, the same below 0.

    Args:
        increase: losses over that of one point, nats per token.

    Example:
        >>> levels = levels_of(np.array([[-0.003, 0.04]]))
        >>> levels[:2], levels[-2:]
        ([-0.005, -0.002], [0.02, 0.05])
    """

    def ladder(top: float) -> list[float]:
        decade = int(np.floor(np.log10(top)))
        # Three rungs a decade: ten levels reach less than four decades below the top.
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


def _colours(levels: list[float]) -> tuple[ListedColormap, BoundaryNorm]:
    """Return a colour for each interval: yellow to violet above zero, pale to full blue below."""
    falls, rises = levels.index(0.0), len(levels) - 1 - levels.index(0.0)
    blues, warm = matplotlib.colormaps["Blues"], matplotlib.colormaps["magma_r"]
    colours = [blues(0.25 + 0.45 * index / max(falls - 1, 1)) for index in reversed(range(falls))]
    colours += [warm(0.01 + 0.62 * index / max(rises - 1, 1)) for index in range(rises)]
    return ListedColormap(colours), BoundaryNorm(levels, len(colours))


def _written(level: float, _position: float | None = None) -> str:
    return f"{MILLI * level:g}".replace("-", "\N{MINUS SIGN}")


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


def mark_points(axes: Axes, points: list[dict[str, Any]]) -> None:
    """Draw three points of a plane with their names."""
    styles = zip(points, MARKERS, LABEL_OFFSETS, strict=True)
    for point, marker, (dx, dy, horizontal, vertical) in styles:
        axes.plot(
            point["x"],
            point["y"],
            marker,
            markersize=7,
            color="white",
            markeredgecolor=INK,
            zorder=5,
            clip_on=False,
        )
        axes.annotate(
            symbol_of(point["name"]),
            (point["x"], point["y"]),
            (dx, dy),
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            fontsize=11 if point["name"] in SYMBOLS else 9,
            color=INK,
            zorder=6,
            path_effects=HALO,
        )


def costs(result: dict[str, Any]) -> str:
    """Return the increases at the other points in thousandths, with errors over sequences."""
    return "\n".join(
        f"{symbol_of(point['name'])}  "
        + with_error(MILLI * point["increase"], MILLI * point["increase_standard_error"], "+")
        for point in result["measured"]["points"][1:]
    )


def draw_contours(
    axes: Axes, grid: dict[str, Any], increase_YX: NDArray[np.float64], levels: list[float]
) -> ContourSet:
    """Draw filled contours of increases on a grid at `levels`, and return the contours."""
    x_F, y_F = (
        np.linspace(at[0], at[-1], FINER * (len(at) - 1) + 1) for at in (grid["x"], grid["y"])
    )
    # Piecewise cubics are exact for parabolas, which basins are.
    along_x_YF = CubicSpline(grid["x"], increase_YX, axis=1)(x_F)
    fine_FF = CubicSpline(grid["y"], along_x_YF)(y_F)
    colours, norm = _colours(levels)
    # contourf leaves blank what is beyond the outermost levels, such as a cubic's overshoot.
    drawn = np.clip(fine_FF, levels[0], levels[-1])
    filled = axes.contourf(x_F, y_F, drawn, levels=levels, cmap=colours, norm=norm)
    axes.contour(x_F, y_F, fine_FF, levels=levels[1:-1], colors=INK, linewidths=0.5, alpha=0.7)
    axes.set_aspect("equal")
    return filled


def draw_plane(axes: Axes, result: dict[str, Any], levels: list[float]) -> ContourSet:
    """Draw the points and filled contours of the increase at `levels`, and return the contours."""
    filled = draw_contours(axes, result["measured"]["grid"], increase_over(result), levels)
    mark_points(axes, result["measured"]["points"])
    return filled


def add_colour_bar(figure: Figure, filled: ContourSet, beside: Axes, over: str) -> None:
    """Draw the scale of the colours on `beside`: of the loss over that of a point in words."""
    bar = figure.colorbar(
        filled, cax=beside, ticks=filled.levels, spacing="uniform", format=_written
    )
    bar.set_label(f"loss over that of {over},\n{typeset(MILLINATS)}")
    bar.minorticks_off()
