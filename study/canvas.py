"""What the figures of a report share: a look per run, axes in tokens, learning rates, lines along training.

One colour and marker per run, from a sequence that stays readable without colour vision and in grey: the runs are
ordered by what the study varies, so are the colours. Bars are the intervals of the results.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from study.plots import Axis, Limits, Mark, Panel, Point, Series, Shade, Span, around, ends
from study.settings import Study
from train.config import RunConfig
from train.schedules import first_step, learning_rate

MARKERS = "osD^vPX*"
NEUTRAL = "#555555"  # of legend entries that belong to no run
RATE_COLOUR = "#777777"
RATE_TITLE = "learning rate / its peak"
MOST_RATES = 400  # points of a curve of learning rates, its corners aside
NEAR = 0.06  # of the range of the values, around them
Row = dict[str, Any]
Rows = list[Row]
Bounds = Callable[[Row], Span]  # of a row: lower and upper end of the bar


@dataclass(frozen=True)
class Look:
    """How a run is drawn in every figure."""

    label: str
    colour: str
    marker: str

    @property
    def mark(self) -> Mark:
        """A line with markers."""
        return Mark(colour=self.colour, marker=self.marker)


def looks_for(labels: Iterable[str]) -> list[Look]:
    """Colours from dark violet for the first to orange for the last; yellow, unreadable on white, is left out."""
    names = list(labels)
    colours = _colours(len(names))
    return [Look(label, colours[index], MARKERS[index % len(MARKERS)]) for index, label in enumerate(names)]


def _colours(count: int) -> list[str]:
    scale = matplotlib.colormaps["plasma"]
    return [to_hex(scale(0.02 + 0.76 * index / max(count - 1, 1))) for index in range(count)]


def looks_of(study: Study) -> dict[str, Look]:
    """Of every run, by rising peak learning rate, or by what the study varies, those without a value first.

    Where what is varied has groups, the colour is that of the value and the marker that of the group.
    """
    varied = study.varied

    def rank(name: str) -> float:
        if varied:
            return varied.values.get(name, float("-inf"))
        return next((run.optimizer.peak_lr for run in study.trained if run.name == name), 0.0)

    runs = sorted(study.runs, key=lambda run: rank(run.name))
    looks = dict(zip([run.name for run in runs], looks_for(map(study.label_of, runs)), strict=True))
    if varied and len(set(varied.groups.values())) > 1:
        values = sorted({rank(run.name) for run in runs})
        groups = list(dict.fromkeys(varied.groups.get(run.name, "") for run in runs))
        for name, look in looks.items():
            colour = _colours(len(values))[values.index(rank(name))]
            marker = MARKERS[groups.index(varied.groups.get(name, "")) % len(MARKERS)]
            looks[name] = replace(look, colour=colour, marker=marker)
    return looks


def legend_of(looks: Iterable[Look]) -> dict[str, Mark]:
    """What a plot says of its runs."""
    return {look.label: look.mark for look in looks}


def facts_of(row: Row) -> dict[str, Any]:
    """What is known of a row besides what is drawn."""
    return {"step": row["step"], "tokens": row["tokens"], "learning rate": row["learning_rate"], "phase": row["phase"]}


def interval_of(column: str) -> Bounds:
    """The bounds that a row holds beside the column."""
    return lambda row: (row[f"{column}_low"], row[f"{column}_high"])


def residual_of(column: str) -> Bounds:
    """Bounds on the distance to the nearest eigenvalue."""

    def bounds(row: Row) -> Span:
        reach = row[f"{column}_residual"] * abs(row[column])
        return row[column] - reach, row[column] + reach

    return bounds


class Canvas:
    """Builds the panels of a study along training."""

    def __init__(self, study: Study, rows: Rows) -> None:
        self.study, self.rows, self.looks = study, rows, looks_of(study)
        planned = [run.total_steps * run.tokens_per_step for run in study.trained]
        self.most_tokens = max([*planned, *(row["tokens"] for row in rows if row["tokens"] is not None)], default=1)
        self.unit, self.unit_name = (1e9, "billion") if self.most_tokens >= 1e9 else (1e6, "million")
        self.rates, self.shade = self._rates(), self._shade()

    @property
    def legend(self) -> dict[str, Any]:
        """Heading and looks of a plot."""
        return {"heading": self.study.heading, "looks": legend_of(self.looks.values())}

    def rows_of(self, run: str, column: str, average: str | None = None) -> Rows:
        """Rows of one run's weights, or of an average of them, where the column and its tokens are known."""
        rows = (row for row in self.rows if row["run"] == run and row["average"] == average)
        return [row for row in rows if row.get(column) is not None and row["tokens"] is not None]

    def last_rows(self) -> dict[str, Row]:
        """Run -> the row of its last weights, where there is one."""
        last = {run.name: run.total_steps for run in self.study.runs}
        return {row["run"]: row for row in self.rows if row["average"] is None and row["step"] == last[row["run"]]}

    def point(self, row: Row, column: str, bounds: Bounds | None) -> Point:
        """A column against tokens."""
        interval = bounds(row) if bounds else None
        return Point(x=row["tokens"] / self.unit, y=row[column], y_interval=interval, facts=facts_of(row))

    def lines(
        self, column: str, bounds: Bounds | None, average: str | None = None, label: str = "weights", **style: Any
    ) -> list[Series]:
        """A column against tokens, one line per run: of its weights, or of an average; with bars between the bounds.

        The weights of a branch go on from the checkpoint of its parent, by a line that has no marker there.
        """
        found = []
        for run, look in self.looks.items():
            points = tuple(self.point(row, column, bounds) for row in self.rows_of(run, column, average))
            found.append(Series(replace(look.mark, **style), points, look.label, label))
            origin = self._origin(run, column) if average is None else None
            if origin and points:
                link = (self.point(origin, column, None), replace(points[0], y_interval=None))
                found.append(Series(Mark(colour=look.colour), link, look.label, is_data=False))
        return found

    def _origin(self, name: str, column: str) -> Row | None:
        """The parent's row that a branch starts from."""
        run = next((run for run in self.study.trained if run.name == name and run.branch_from), None)
        if run is None or run.branch_from is None:
            return None
        rows = self.rows_of(self.study.parent_of(run).name, column)
        return next((row for row in rows if row["step"] == run.branch_from.step), None)

    def panel(self, y: Axis, series: Iterable[Series], title: str = "", **more: Any) -> Panel:
        """Series against tokens, with the learning rates."""
        limits = (0.0, 1.02 * self.most_tokens / self.unit)
        x = Axis(title="training tokens", unit=self.unit_name, limits=limits)
        return Panel(x=x, y=y, series=tuple(series), title=title, rates=self.rates, shade=self.shade, **more)

    def _shade(self) -> Shade | None:
        """The anneal where all runs share it."""
        runs = self.study.trained
        spans = {
            (run.schedule.anneal.start_step * run.tokens_per_step, run.total_steps * run.tokens_per_step)
            for run in runs
            if run.schedule.anneal
        }
        if len(spans) != 1 or len(runs) < len(self.study.runs) or not all(run.schedule.anneal for run in runs):
            return None
        ((start, end),) = spans
        return Shade((start / self.unit, end / self.unit), "anneal")

    def _rates(self) -> tuple[Series, ...]:
        """Learning rates as shares of their peaks; schedules that coincide are one line, which belongs to no run."""
        curves: dict[tuple[Span, ...], list[str]] = {}
        for run in self.study.runs:
            curve = _schedule(run) if isinstance(run, RunConfig) else self._released(run.name)
            if curve:
                curves.setdefault(curve, []).append(run.name)
        series = []
        for curve, runs in curves.items():
            look = self.looks[runs[0]] if len(runs) == 1 and len(curves) > 1 else None
            points = tuple(Point(x=tokens / self.unit, y=share) for tokens, share in curve)
            mark = Mark(colour=look.colour if look else RATE_COLOUR, line=":", width=1.2)
            series.append(Series(mark, points, look.label if look else None, "learning rate"))
        return tuple(series)

    def _released(self, name: str) -> tuple[Span, ...]:
        """Of a released model: what is known at its checkpoints."""
        rows = self.rows_of(name, "learning_rate")
        peak = max((row["learning_rate"] for row in rows), default=0.0)
        return tuple((row["tokens"], row["learning_rate"] / peak) for row in rows) if peak > 0 else ()


def _schedule(run: RunConfig) -> tuple[Span, ...]:
    """Tokens and learning rate / peak: at most some MOST_RATES points, the corners among them."""
    peak, start = run.optimizer.peak_lr, first_step(run)
    if peak <= 0:
        return ()
    corners = {start, run.warmup_steps, run.total_steps}
    if run.schedule.anneal:
        corners.add(run.schedule.anneal.start_step)
    steps = sorted({*corners, *range(start, run.total_steps, max(1, run.total_steps // MOST_RATES))})
    return tuple(
        (float(step * run.tokens_per_step), round(learning_rate(run, step) / peak, 9))
        for step in steps
        if step >= start
    )


def late_limits(series: Iterable[Series], since: float) -> Limits:
    """Limits of the y axis that hold what lies behind `since`: the first steps, far above, would flatten the rest."""
    values = ends([point for one in series for point in one.points if point.x >= since], "y")
    return around(values, NEAR) if values else (None, None)
