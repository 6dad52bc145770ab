"""The figures of a report, drawn as in the reference study (arXiv 2510.06213, figures 1, 4, 6 and 23)."""

from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from quant_eval.specs import parse_spec
from study.averages import average_label, kept_averages, lowest_spec
from study.blocks import draw_blocks, read_block_result
from study.canvas import LEARNING_RATE_COLOUR, SMALL_MARKER, STYLE, Bounds, Canvas, Rows, logarithmic, looks_of
from study.collect import trained
from study.layout import blocks_result, figures_of
from study.methods import draw_methods
from study.prediction import draw_prediction
from study.settings import Study, spec_title
from study.slices import draw_slices
from train.run_directory import RunDirectory
from train.tracking import read_metrics

KEPT_LINES = ("--", "-.", ":")  # of averages kept in training, whose markers are open
KEPT: Any = {"markerfacecolor": "white", "linewidth": 1.1, "zorder": 3}
SOUP: Any = {
    "linestyle": "none",
    "marker": "*",
    "markersize": 11,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
    "zorder": 4,
}
NEUTRAL: Any = {"color": "#555555", "marker": "o"}  # of legend entries that belong to no run


def interval_of(column: str) -> Bounds:
    """The bounds that a row holds beside the column."""
    return lambda row: (row[f"{column}_low"], row[f"{column}_high"])


def residual_of(column: str) -> Bounds:
    """Bounds on the distance to the nearest eigenvalue."""
    return lambda row: (
        row[column] - row[f"{column}_residual"] * abs(row[column]),
        row[column] + row[f"{column}_residual"] * abs(row[column]),
    )


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
    rate = Line2D([], [], color=LEARNING_RATE_COLOUR, linestyle=":", label="learning rate")
    canvas.legend([rate])
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
    canvas.legend()
    canvas.save(path)


def draw_averages(study: Study, rows: Rows, path: Path) -> None:
    """Full-precision loss, and KL divergence at the lowest width, of weights, averages kept in training, and soups.

    The loss has no bars: its intervals are over documents, which all models share, and are as wide as the panel.
    """
    spec = lowest_spec(study)
    loss, divergence = f"quant/{spec}/cross_entropy", f"quant/{spec}/kl_divergence"
    measured = {row["average"] for row in rows}
    kept = [average for average in kept_averages(study) if average.name in measured]
    soups = [soup for soup in study.soups if soup.name in measured]
    styles = {average.name: KEPT | {"linestyle": line} for average, line in zip(kept, cycle(KEPT_LINES), strict=False)}
    canvas = Canvas(study, rows, 2)
    for axis, column, bounds in zip(canvas.axes, (loss, divergence), (None, interval_of(divergence)), strict=True):
        canvas.tokens_axis(axis)
        for average, style in (None, {}), *styles.items(), *((soup.name, SOUP) for soup in soups):
            canvas.lines(axis, column, bounds, average, style)
    left, right = canvas.axes
    left.set_title("Full precision", pad=16)
    left.set_ylabel("loss (nats per token)")
    since = min((row["tokens"] for row in rows if row["average"]), default=0)
    shown = [row[loss] for row in rows if row[loss] is not None and row["tokens"] >= since]
    if shown:  # the first steps, far above, would flatten the rest
        margin = 0.06 * (max(shown) - min(shown)) or 0.1
        left.set_ylim(min(shown) - margin, max(shown) + margin)
    right.set_title(spec_title(spec), pad=16)
    right.set_ylabel("KL(full || quantized), nats per token")
    right.set_ylim(bottom=0.0)
    handles = [Line2D([], [], label="weights", **NEUTRAL)]
    handles += [
        Line2D([], [], label=average_label(average, kept), **(NEUTRAL | styles[average.name])) for average in kept
    ]
    canvas.legend([*handles, *([Line2D([], [], label="soup", **(NEUTRAL | SOUP))] if soups else [])])
    canvas.save(path)


def draw_full_against_quantized(study: Study, rows: Rows, path: Path) -> None:
    """Loss after quantization against loss before it, model by model; on the dashed line nothing is lost.

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
                size = None if row["phase"] == "anneal" else SMALL_MARKER
                axis.plot(row[before], row[after], look.marker, color=look.colour, markersize=size)
        late = [row for row in trained(rows) if row[before] is not None and row["tokens"] >= 0.5 * last_tokens]
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
    early = Line2D([], [], linestyle="none", markersize=SMALL_MARKER, label="before the anneal", **NEUTRAL)
    annealed = Line2D([], [], linestyle="none", label="in it", **NEUTRAL)
    nothing = Line2D([], [], color="#555555", linestyle="--", label="nothing lost")
    canvas.legend([early, annealed, nothing])
    canvas.save(path)


def draw_curvature(study: Study, rows: Rows, path: Path) -> None:
    """Trace of the Hessian with its interval, and its largest eigenvalue with its residual, against tokens."""
    canvas = Canvas(study, rows, 2)
    trace, top = "curvature/trace", "curvature/lambda_max"
    for axis in canvas.axes:
        canvas.tokens_axis(axis)
    canvas.lines(canvas.axes[0], trace, interval_of(trace))
    canvas.lines(canvas.axes[1], top, residual_of(top))
    open_points = [row for row in trained(rows) if row[top] is not None and not row[f"{top}_converged"]]
    for row in open_points:
        look = canvas.looks[row["run"]]
        place = (row["tokens"] / canvas.unit, row[top])
        canvas.axes[1].plot(*place, look.marker, color=look.colour, markerfacecolor="white", zorder=5)
    for axis, title in zip(canvas.axes, ("Trace", "Largest eigenvalue"), strict=True):
        axis.set_title(f"{title} of the Hessian", pad=16)
        axis.set_ylabel("nats per token / (unit of the parameters)$^2$")
        # bars that reach zero have no place on a logarithmic axis
        if axis.get_lines() and axis.dataLim.ymin > 0:
            logarithmic(axis, "y")
    label = "not converged"
    unfilled = Line2D([], [], linestyle="none", marker="o", color="#555555", markerfacecolor="white", label=label)
    canvas.legend([unfilled] if open_points else [])
    canvas.save(path)


def draw_blocks_of(study: Study, directory: Path, path: Path) -> None:
    """The last checkpoints block by block, a line per run."""
    spec, looks = study.quantization.by_block[0], looks_of(study)
    paths = {run.name: directory / blocks_result(run, spec) for run in study.runs}
    results = [(look, read_block_result(paths[run])) for run, look in looks.items() if paths[run].exists()]
    draw_blocks("peak learning rate", results, path)


def draw_all(directory: Path, study: Study, rows: Rows) -> dict[str, Path]:
    """Draws every figure into STUDY/figures; returns name -> path in the order of the report."""
    paths = {name: directory / path for name, path in figures_of(study).items()}
    (directory / "figures").mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        draw_quantization(study, rows, paths["quantization_error"], "relative_error")
        draw_quantization(study, rows, paths["kl_divergence"], "kl_divergence")
        draw_validation_loss(study, rows, directory, paths["validation_loss"])
        draw_averages(study, rows, paths["averages"])
        if "methods" in paths:
            draw_methods(study, rows, paths["methods"])
        if "blocks" in paths:
            draw_blocks_of(study, directory, paths["blocks"])
        draw_full_against_quantized(study, rows, paths["full_against_quantized"])
        draw_curvature(study, rows, paths["curvature"])
        if "prediction" in paths:
            draw_prediction(study, directory, paths["prediction"])
        if "slices" in paths:
            draw_slices(study, directory, paths["slices"])
    return paths
