"""What the figures of a report share: a look per run, axes in tokens, learning rates, a legend.

One colour and marker per run, from a sequence that stays readable without colour vision and in grey: the runs are
ordered by their peak learning rate, so are the colours. Bars are the intervals of the results.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from study.settings import Study
from train.config import RunConfig
from train.schedules import learning_rate

MARKERS = "osD^vPX*"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
}
SMALL_MARKER = 2.6
LEARNING_RATE_COLOUR, ANNEAL_COLOUR = "#777777", "#f3f1e7"
Rows = list[dict[str, Any]]
Bounds = Callable[[dict[str, Any]], tuple[float, float]]  # of a row: lower and upper end of the bar


@dataclass(frozen=True)
class Look:
    """How a run is drawn in every figure."""

    label: str
    colour: str
    marker: str


def looks_for(labels: Iterable[str]) -> list[Look]:
    """Colours from dark violet for the first to orange for the last; yellow, unreadable on white, is left out."""
    names = list(labels)
    span = max(len(names) - 1, 1)
    colours = matplotlib.colormaps["plasma"]
    return [
        Look(label, to_hex(colours(0.02 + 0.76 * index / span)), MARKERS[index % len(MARKERS)])
        for index, label in enumerate(names)
    ]


def looks_of(study: Study) -> dict[str, Look]:
    """Of every run, by rising peak learning rate."""
    runs = sorted(study.runs, key=lambda run: run.optimizer.peak_lr)
    return dict(zip([run.name for run in runs], looks_for(map(study.label_of, runs)), strict=True))


def panels_of(count: int, height: float = 3.9, rows: int = 1, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a row of panels, or with more rows of as many, listed one after the other."""
    figure = Figure(figsize=(4.6 * count + 0.4 if count > 1 else 6.4, height), dpi=170, layout="constrained")
    return figure, list(figure.subplots(rows, count, squeeze=False, **shared).flat)


def legend_above(figure: Figure, heading: str, looks: Iterable[Look], extra: Iterable[Line2D] = ()) -> None:
    """One legend above all panels, in as many rows as it needs."""
    handles = [Line2D([], [], color=look.colour, marker=look.marker, label=look.label) for look in looks]
    handles = [Line2D([], [], linestyle="none", label=heading), *handles, *extra]
    inches = sum(0.5 + 0.065 * len(str(handle.get_label())) for handle in handles)
    columns = math.ceil(len(handles) / math.ceil(inches / figure.get_figwidth()))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.2)


def logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with its values written out, the powers of ten alone where it spans many."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    """Writes the PNG, without the version of the library in it."""
    figure.savefig(path, format="png", metadata={"Software": None})


def token_unit(study: Study) -> tuple[float, str]:
    """Divisor and name of the unit that suits the longest run."""
    longest = max(run.total_steps * run.tokens_per_step for run in study.runs)
    return (1e9, "billion") if longest >= 1e9 else (1e6, "million")


def _schedule_curve(run: RunConfig) -> tuple[tuple[int, ...], tuple[float, ...], int]:
    """Steps, learning rate / peak at them, and tokens per step: at most some 400 points, the corners among them."""
    corners = {0, run.warmup_steps, run.total_steps}
    if run.schedule.anneal:
        corners.add(run.schedule.anneal.start_step)
    stride = max(1, run.total_steps // 400)
    steps = tuple(sorted(corners | set(range(0, run.total_steps, stride))))
    peak_lr = run.optimizer.peak_lr
    return steps, tuple(round(learning_rate(run, step) / peak_lr, 9) for step in steps), run.tokens_per_step


class Canvas:
    """A row of panels with one legend above them."""

    def __init__(self, study: Study, rows: Rows, panels: int) -> None:
        self.study, self.rows, self.looks = study, rows, looks_of(study)
        self.figure, self.axes = panels_of(panels)
        self.unit, self.unit_name = token_unit(study)

    def points(self, run: str, column: str, average: str | None = None) -> Rows:
        """Rows of one run's weights, or of an average of them, where the column has a value."""
        rows = (row for row in self.rows if row["run"] == run and row["average"] == average)
        return [row for row in rows if row[column] is not None]

    def lines(
        self,
        axis: Axes,
        column: str,
        bounds: Bounds | None,
        average: str | None = None,
        style: dict[str, Any] | None = None,
    ) -> None:
        """A column against tokens, one line per run: of its weights, or of an average; with bars between the bounds."""
        for run, look in self.looks.items():
            rows = self.points(run, column, average)
            bars = None
            if bounds:
                below = [row[column] - bounds(row)[0] for row in rows]
                bars = [below, [bounds(row)[1] - row[column] for row in rows]]
            tokens, values = [row["tokens"] / self.unit for row in rows], [row[column] for row in rows]
            drawn: Any = {"color": look.colour, "marker": look.marker, **(style or {})}
            axis.errorbar(tokens, values, yerr=bars, elinewidth=0.9, capsize=2, **drawn)

    def tokens_axis(self, axis: Axes) -> None:
        """The x axis in tokens, with the anneal shaded where all runs share it."""
        axis.set_xlabel(f"training tokens ({self.unit_name})")
        axis.set_xlim(0, max(run.total_steps * run.tokens_per_step for run in self.study.runs) / self.unit * 1.02)
        spans = {
            (run.schedule.anneal.start_step * run.tokens_per_step, run.total_steps * run.tokens_per_step)
            for run in self.study.runs
            if run.schedule.anneal
        }
        if len(spans) == 1 and all(run.schedule.anneal for run in self.study.runs):
            start, end = next(iter(spans))
            axis.axvspan(start / self.unit, end / self.unit, color=ANNEAL_COLOUR, zorder=0, linewidth=0)
            middle = (start + end) / 2 / self.unit
            axis.text(
                middle, 1.0, "anneal", transform=axis.get_xaxis_transform(), ha="center", va="bottom", color="#8a8468"
            )

    def learning_rates(self, axis: Axes, labelled: bool) -> None:
        """Learning rate as a share of its peak, dotted, on a second axis; schedules that coincide are drawn once."""
        second = axis.twinx()
        second.spines["right"].set_visible(True)
        second.spines["right"].set_color(LEARNING_RATE_COLOUR)
        second.tick_params(colors=LEARNING_RATE_COLOUR)
        second.grid(False)
        second.set_ylim(0, 1.06)
        if labelled:
            second.set_ylabel("learning rate / its peak (dotted)", color=LEARNING_RATE_COLOUR)
        else:
            second.set_yticklabels([])
        curves = {_schedule_curve(run): run.name for run in self.study.runs if run.optimizer.peak_lr > 0}
        for (steps, shares, tokens_per_step), run in curves.items():
            colour = LEARNING_RATE_COLOUR if len(curves) == 1 else self.looks[run].colour
            tokens = [step * tokens_per_step / self.unit for step in steps]
            second.plot(tokens, shares, color=colour, linestyle=(0, (1, 1.6)), linewidth=1.2)

    def legend(self, extra: Iterable[Line2D] = ()) -> None:
        """The legend of the runs above the panels."""
        legend_above(self.figure, "peak learning rate", self.looks.values(), extra)

    def save(self, path: Path) -> None:
        """Writes the PNG."""
        save(self.figure, path)
