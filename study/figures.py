"""The figures of a report, drawn as in the reference study (arXiv 2510.06213, figures 1, 6 and 23)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from quant_eval.specs import parse_spec
from study.canvas import LEARNING_RATE_COLOUR, OPEN_MARKER, SMALL_MARKER, STYLE, Bounds, Canvas, Rows
from study.collect import trained
from study.recipes import Study, spec_title
from study.steps import FIGURES
from train.run_directory import RunDirectory
from train.tracking import read_metrics


def interval_of(column: str) -> Bounds:
    """The bounds that a row holds beside the column."""
    return lambda row: (row[f"{column}_low"], row[f"{column}_high"])


def around(column: str, margin: Callable[[dict[str, Any]], float]) -> Bounds:
    """Bounds at the same distance on either side."""
    return lambda row: (row[column] - margin(row), row[column] + margin(row))


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
    canvas.legend([rate, *canvas.average_handles()])
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
        averages = canvas.averages(run.name, "held_out_loss")
        averaged = [row["held_out_loss"] for row in averages]
        style: Any = OPEN_MARKER | {"marker": look.marker, "color": look.colour}
        axis.plot([row["tokens"] / canvas.unit for row in averages], averaged, **style)
        smallest += losses + marked + averaged
        late += marked + [row["held_out_loss"] for row in curve if row["step"] >= 0.08 * run.total_steps]
    axis.set_ylabel("held-out loss (nats per token)")
    if late:
        margin = 0.06 * (max(late) - min(smallest)) or 0.1
        axis.set_ylim(min(smallest) - margin, max(late) + margin)  # the first steps, far above, would flatten the rest
    canvas.legend(canvas.average_handles())
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
            averages = canvas.averages(run, before)
            open_: Any = OPEN_MARKER | {"marker": look.marker, "color": look.colour}
            axis.plot([row[before] for row in averages], [row[after] for row in averages], **open_)
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
    marked: Any = {"linestyle": "none", "marker": "o", "color": "#555555"}
    early = Line2D([], [], markersize=SMALL_MARKER, label="before the anneal", **marked)
    annealed = Line2D([], [], label="in it", **marked)
    nothing = Line2D([], [], color="#555555", linestyle="--", label="nothing lost")
    canvas.legend([early, annealed, *canvas.average_handles(), nothing])
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
