"""The figures of a report, drawn as in the reference study (arXiv 2510.06213, figures 1, 6 and 23).

One colour and marker per run, from a sequence that stays readable without colour vision and in grey: the runs are
ordered by their peak learning rate, so are the colours. Bars are the intervals of the results.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from quant_eval.specs import parse_spec
from study.recipes import Study, spec_title
from study.steps import FIGURES
from train.config import RunConfig
from train.run_directory import RunDirectory
from train.schedules import learning_rate
from train.tracking import read_metrics

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
LEARNING_RATE_COLOUR, ANNEAL_COLOUR = "#777777", "#f3f1e7"
Rows = list[dict[str, Any]]
Bounds = Callable[[dict[str, Any]], tuple[float, float]]  # of a row: lower and upper end of the bar


@dataclass(frozen=True)
class Look:
    """How a run is drawn in every figure."""

    label: str
    colour: str
    marker: str


def looks_of(study: Study) -> dict[str, Look]:
    """Colours from dark violet for the lowest peak to orange for the highest; yellow, unreadable on white, is left."""
    runs = sorted(study.runs, key=lambda run: run.optimizer.peak_lr)
    span = max(len(runs) - 1, 1)
    colours = matplotlib.colormaps["plasma"]
    return {
        run.name: Look(
            f"{run.optimizer.peak_lr:g}", to_hex(colours(0.02 + 0.76 * index / span)), MARKERS[index % len(MARKERS)]
        )
        for index, run in enumerate(runs)
    }


def token_unit(study: Study) -> tuple[float, str]:
    """Divisor and name of the unit that suits the longest run."""
    longest = max(run.total_steps * run.tokens_per_step for run in study.runs)
    return (1e9, "billion") if longest >= 1e9 else (1e6, "million")


class Canvas:
    """A row of panels with one legend above them."""

    def __init__(self, study: Study, rows: Rows, panels: int) -> None:
        self.study, self.rows, self.looks = study, rows, looks_of(study)
        self.figure = Figure(figsize=(4.6 * panels + 0.4 if panels > 1 else 6.4, 3.9), dpi=170, layout="constrained")
        self.axes: list[Axes] = list(self.figure.subplots(1, panels, squeeze=False)[0])
        self.unit, self.unit_name = token_unit(study)

    def points(self, run: str, column: str) -> Rows:
        """Rows of one run where the column has a value."""
        return [row for row in self.rows if row["run"] == run and row[column] is not None]

    def lines(self, axis: Axes, column: str, bounds: Bounds) -> None:
        """One line per run of a column against tokens, with bars between its bounds."""
        for run, look in self.looks.items():
            rows = self.points(run, column)
            values = [row[column] for row in rows]
            below = [row[column] - bounds(row)[0] for row in rows]
            above = [bounds(row)[1] - row[column] for row in rows]
            axis.errorbar(
                [row["tokens"] / self.unit for row in rows],
                values,
                yerr=[below, above],
                color=look.colour,
                marker=look.marker,
                elinewidth=0.9,
                capsize=2,
            )

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
        handles = [
            Line2D([], [], color=look.colour, marker=look.marker, label=look.label) for look in self.looks.values()
        ]
        handles = [Line2D([], [], linestyle="none", label="peak learning rate"), *handles, *extra]
        self.figure.legend(
            handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.6, columnspacing=1.2
        )

    def save(self, path: Path) -> None:
        """Writes the PNG, without the version of the library in it."""
        self.figure.savefig(path, format="png", metadata={"Software": None})


def interval_of(column: str) -> Bounds:
    """The bounds that a row holds beside the column."""
    return lambda row: (row[f"{column}_low"], row[f"{column}_high"])


def around(column: str, margin: Callable[[dict[str, Any]], float]) -> Bounds:
    """Bounds at the same distance on either side."""
    return lambda row: (row[column] - margin(row), row[column] + margin(row))


def _schedule_curve(run: RunConfig) -> tuple[tuple[int, ...], tuple[float, ...], int]:
    """Steps, learning rate / peak at them, and tokens per step: at most some 400 points, the corners among them."""
    corners = {0, run.warmup_steps, run.total_steps}
    if run.schedule.anneal:
        corners.add(run.schedule.anneal.start_step)
    stride = max(1, run.total_steps // 400)
    steps = tuple(sorted(corners | set(range(0, run.total_steps, stride))))
    peak_lr = run.optimizer.peak_lr
    return steps, tuple(round(learning_rate(run, step) / peak_lr, 9) for step in steps), run.tokens_per_step


def draw_quantization(study: Study, rows: Rows, path: Path, figure: str) -> None:
    """`relative_error` or `kl_divergence` against tokens, a panel per spec; learning rate dotted on a second axis."""
    specs = study.quantization.specs
    canvas = Canvas(study, rows, len(specs))
    for axis, spec in zip(canvas.axes, specs, strict=True):
        column = f"quant/{spec}/{figure}"
        canvas.tokens_axis(axis)
        canvas.learning_rates(axis, labelled=spec == specs[-1])
        canvas.lines(axis, column, interval_of(column))
        axis.set_title(spec_title(spec), pad=16)
        if figure == "relative_error":
            axis.set_ylabel("relative error of the loss")
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        else:
            axis.set_ylabel("KL(full || quantized), nats per token")
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    canvas.legend([Line2D([], [], color=LEARNING_RATE_COLOUR, linestyle=":", label="learning rate")])
    canvas.save(path)


def draw_validation_loss(study: Study, rows: Rows, directory: Path, path: Path) -> None:
    """Held-out loss during training against tokens, from metrics.jsonl; checkpoints are marked."""
    canvas = Canvas(study, rows, 1)
    axis = canvas.axes[0]
    canvas.tokens_axis(axis)
    canvas.learning_rates(axis, labelled=True)
    smallest, late = [], []
    for run in study.runs:
        look = canvas.looks[run.name]
        curve = [row for row in read_metrics(RunDirectory(directory / run.name).metrics) if "held_out_loss" in row]
        tokens, losses = [row["tokens"] / canvas.unit for row in curve], [row["held_out_loss"] for row in curve]
        axis.plot(tokens, losses, color=look.colour, linewidth=1.2)
        saved = canvas.points(run.name, "held_out_loss")
        marked = [row["held_out_loss"] for row in saved]
        axis.plot([row["tokens"] / canvas.unit for row in saved], marked, look.marker, color=look.colour)
        smallest += losses + marked
        late += marked + [row["held_out_loss"] for row in curve if row["step"] >= 0.08 * run.total_steps]
    axis.set_ylabel("held-out loss (nats per token)")
    if late:
        margin = 0.06 * (max(late) - min(smallest)) or 0.1
        axis.set_ylim(min(smallest) - margin, max(late) + margin)  # the first steps, far above, would flatten the rest
    canvas.legend([Line2D([], [], color=LEARNING_RATE_COLOUR, linestyle=":", label="learning rate")])
    canvas.save(path)


def draw_full_against_quantized(study: Study, rows: Rows, path: Path) -> None:
    """Loss after quantization against loss before it, checkpoint by checkpoint; on the dashed line nothing is lost.

    The frame holds the second half of training: the first loses most of its loss, and would hide the rest.
    """
    specs = sorted(study.quantization.specs, key=lambda spec: -parse_spec(spec).bits)
    canvas = Canvas(study, rows, len(specs))
    last_tokens = max(row["tokens"] for row in rows)
    for axis, spec in zip(canvas.axes, specs, strict=True):
        before, after = f"quant/{spec}/cross_entropy", f"quant/{spec}/cross_entropy_quantized"
        for run, look in canvas.looks.items():
            points = canvas.points(run, before)
            axis.plot([row[before] for row in points], [row[after] for row in points], color=look.colour, linewidth=0.8)
            for row in points:
                annealed = row["phase"] == "anneal"
                face = look.colour if annealed else "white"
                axis.plot(row[before], row[after], look.marker, color=look.colour, markerfacecolor=face)
        late = [row for row in rows if row[before] is not None and row["tokens"] >= 0.5 * last_tokens]
        if late:
            losses = [row[column] for row in late for column in (before, after)]
            margin = 0.06 * (max(losses) - min(losses)) or 0.1
            ends = (min(losses) - margin, max(losses) + margin)
            axis.plot(ends, ends, color="#555555", linestyle="--", linewidth=1, zorder=1)
            axis.set_xlim(ends[0], max(row[before] for row in late) + margin)
            axis.set_ylim(ends)
        axis.set_title(spec_title(spec))
        axis.set_xlabel("full-precision loss (nats per token)")
        axis.set_ylabel("quantized loss (nats per token)")
    filled = Line2D([], [], linestyle="none", marker="o", color="#555555", label="in the anneal")
    canvas.legend([filled, Line2D([], [], color="#555555", linestyle="--", label="nothing lost")])
    canvas.save(path)


def draw_curvature(study: Study, rows: Rows, path: Path) -> None:
    """Trace of the Hessian (bars: two standard errors) and its largest eigenvalue against tokens."""
    canvas = Canvas(study, rows, 2)
    trace, top = "curvature/trace", "curvature/lambda_max"
    for axis in canvas.axes:
        canvas.tokens_axis(axis)
    canvas.lines(canvas.axes[0], trace, around(trace, lambda row: 2 * float(row[f"{trace}_standard_error"])))
    # the residual bounds the distance to the nearest eigenvalue
    canvas.lines(canvas.axes[1], top, around(top, lambda row: float(row[f"{top}_residual"] * abs(row[top]))))
    open_points = [row for row in rows if row[top] is not None and not row[f"{top}_converged"]]
    for row in open_points:
        look = canvas.looks[row["run"]]
        place = (row["tokens"] / canvas.unit, row[top])
        canvas.axes[1].plot(*place, look.marker, color=look.colour, markerfacecolor="white", zorder=5)
    for axis, title in zip(canvas.axes, ("Trace", "Largest eigenvalue"), strict=True):
        axis.set_title(f"{title} of the Hessian", pad=16)
        axis.set_ylabel("nats per token / (unit of the parameters)$^2$")
        # bars that reach zero have no place on a logarithmic axis
        if axis.get_lines() and axis.dataLim.ymin > 0:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
    label = "not converged"
    unfilled = Line2D([], [], linestyle="none", marker="o", color="#555555", markerfacecolor="white", label=label)
    canvas.legend([unfilled] if open_points else [])
    canvas.save(path)


def draw_all(directory: Path, study: Study, rows: Rows) -> dict[str, Path]:
    """Draws every figure into STUDY/figures; returns caption -> path in the order of the report."""
    folder = directory / "figures"
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.png" for name in FIGURES}
    with matplotlib.rc_context(STYLE):
        draw_quantization(study, rows, paths["quantization_error"], "relative_error")
        draw_quantization(study, rows, paths["kl_divergence"], "kl_divergence")
        draw_validation_loss(study, rows, directory, paths["validation_loss"])
        draw_full_against_quantized(study, rows, paths["full_against_quantized"])
        draw_curvature(study, rows, paths["curvature"])
    return paths
