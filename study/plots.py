"""A figure as data: panels of series of points, from which come its picture, its interactive form and its table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from numpy.typing import NDArray

MOST_COLUMNS = 4
ROW_INCHES = 3.9
Span = tuple[float, float]
Limits = tuple[float | None, float | None]  # None: as the values have it
POWER_2, DELTA, TRANSPOSED, HALF = "\u00b2", "\u03b4", "\u1d40", "\u00bd"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis shows.

    Attributes:
        title: the quantity; also the column of the table.
        unit: empty where there is none.
        written: what stands beside it, where that is not title and unit.
        is_place: positions without a meaning of their own, left out of the table: the points' facts say what is there.
        ticks: places that are named instead of numbered.
        holds_zero: it reaches down to 0 at least.
    """

    title: str
    unit: str = ""
    written: str = ""
    is_log: bool = False
    is_percent: bool = False
    is_integer: bool = False
    is_place: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    limits: Limits = (None, None)
    holds_zero: bool = False

    @property
    def label(self) -> str:
        """Title and unit."""
        if not self.unit:
            return self.title
        return f"{self.title}, {self.unit}" if self.title.endswith(")") else f"{self.title} ({self.unit})"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value with its intervals.

    Attributes:
        facts: what else is known of it, by name and unit: step, tokens, learning rate.
        is_small, is_open: its marker, where it differs from the others of the series.
    """

    x: float
    y: float
    x_interval: Span | None = None
    y_interval: Span | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    is_small: bool = False
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How a series is drawn; marker and line are matplotlib's, empty for none."""

    colour: str
    marker: str = ""
    line: Literal["-", "--", "-.", ":", ""] = "-"
    width: float = 1.4
    size: float = 4.5
    is_open: bool = False
    edge: str | None = None
    bar: float = 0.9
    cap: float = 2.0
    opacity_of_bars: float = 1.0
    has_band: bool = False
    order: float = 2.0


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    Attributes:
        label: what it is; empty: the run's weights.
        run: label of the run that it belongs to, by which the reader hides and shows it; None: no run's.
        is_data: a line that only leads the eye is not; it is in no table.
    """

    mark: Mark
    points: tuple[Point, ...]
    run: str | None = None
    label: str = ""
    is_data: bool = True


@dataclass(frozen=True)
class Line:
    """A straight line across a panel, at a value of one axis."""

    at: float
    across: Literal["x", "y"] = "y"
    kind: Literal["plain", "faint", "dashed"] = "plain"


@dataclass(frozen=True)
class Shade:
    """A named stretch of the x axis."""

    span: Span
    name: str


@dataclass(frozen=True)
class Plane:
    """A loss over a plane: what is drawn as contours.

    Attributes:
        x, y: coordinates of the grid.
        increase: [y, x].
        levels: of the contours.
        colours: one between every two levels.
    """

    x: list[float]
    y: list[float]
    increase: NDArray[Any]
    levels: list[float]
    colours: list[str]
    title: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it; lines are broken by newlines.
        rates: learning rates as shares of their peaks, dotted, on an axis of their own.
        is_square: both axes have one scale.
        note: written into it where there is nothing to draw.
    """

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    title: str = ""
    rates: tuple[Series, ...] = ()
    lines: tuple[Line, ...] = ()
    shade: Shade | None = None
    is_square: bool = False
    note: str = ""
    run: str | None = None
    plane: Plane | None = None


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure: rows of equally many panels, below one legend.

    Attributes:
        heading: what tells the runs apart.
        panels: row by row; None leaves a place empty.
        looks: label of a run -> how its legend entry is drawn.
        keys: further entries of the legend.
        height: inches of its picture.
        row_heights: relative; by default all alike.
    """

    heading: str
    looks: dict[str, Mark]
    panels: tuple[Panel | None, ...]
    keys: dict[str, Mark] = field(default_factory=dict)
    rows: int = 1
    row_heights: tuple[float, ...] = ()
    height: float = ROW_INCHES
    shares_y: bool = False

    @property
    def shown(self) -> list[tuple[int, Panel]]:
        """The panels with their places."""
        return [(place, panel) for place, panel in enumerate(self.panels) if panel]

    @property
    def has_data(self) -> bool:
        """Whether anything was measured that it shows."""
        return any(panel.plane or any(one.is_data and one.points for one in panel.series) for _, panel in self.shown)

    @property
    def columns(self) -> int:
        """Panels side by side."""
        return len(self.panels) // self.rows


def wrapped(panels: Sequence[Panel]) -> tuple[tuple[Panel | None, ...], int]:
    """Panels in as many rows as keep them readable, and how many those are."""
    rows = max(math.ceil(len(panels) / MOST_COLUMNS), 1)
    columns = math.ceil(len(panels) / rows)
    return (*panels, *[None] * (rows * columns - len(panels))), rows


def ends(points: Iterable[Point], which: Literal["x", "y"]) -> list[float]:
    """The values of one axis with the ends of their intervals."""
    found = []
    for point in points:
        interval = point.x_interval if which == "x" else point.y_interval
        found += [point.x if which == "x" else point.y, *(interval or ())]
    return found


def around(values: list[float], share: float) -> Span:
    """Limits with a margin of this share of the range on both sides of the values, of which there are some."""
    margin = share * (max(values) - min(values)) or 0.1
    return min(values) - margin, max(values) + margin


def logarithmic(axis: Axis, values: list[float]) -> Axis:
    """The axis in a logarithmic scale where all values, of which there are some, have a place on one."""
    return replace(axis, is_log=bool(values) and min(values) > 0)
