"""Figures along training (arXiv 2510.06213, figures 1, 3, 4, 6, 8 and 23): errors, losses, averages and curvature."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from quant_eval.specs import parse_spec
from study.averages import average_label, kept_averages, lowest_spec
from study.canvas import NEAR, NEUTRAL, RATE_COLOUR, Canvas, facts_of, interval_of, late_limits, residual_of
from study.plots import POWER_2, ROW_INCHES, Axis, Mark, Panel, Plot, Point, Series, around, ends, logarithmic, wrapped
from study.settings import spec_title
from train.run_directory import RunDirectory
from train.tracking import read_metrics

NATS = "nats per token"
ERROR = Axis(title="relative error of the loss", is_percent=True, holds_zero=True)
DIVERGENCE = Axis(title="KL(full || quantized)", unit=NATS, holds_zero=True)
MEASURES = {"relative_error": ERROR, "kl_divergence": DIVERGENCE}
RATE_KEY = {"learning rate": Mark(colour=RATE_COLOUR, line=":")}
KEPT_LINES: Any = ("--", "-.", ":")  # of averages kept in training, whose markers are open
KEPT: Any = {"is_open": True, "width": 1.1, "order": 3}
SOUP: Any = {"line": "", "marker": "*", "size": 11.0, "edge": "white", "order": 4}
POINT = Mark(colour=NEUTRAL, marker="o", line="")
DIAGONAL = Mark(colour=NEUTRAL, line="--", width=1, order=1)
BEFORE_ANNEAL = ("warmup", "stable")  # phases of runs that are trained here; released ones name their own
FIRST_SHARE = 0.08  # of training, whose losses lie far above the others
LATE_SHARE = 0.5  # of training: the first half loses most of its loss, and would hide the rest


def quantization_plot(canvas: Canvas, figure: str) -> Plot:
    """`relative_error` or `kl_divergence` against tokens, a panel per spec."""
    panels = []
    for spec in canvas.study.quantization.specs:
        column = f"quant/{spec}/{figure}"
        lines = canvas.lines(column, interval_of(column))
        panels.append(canvas.panel(MEASURES[figure], lines, spec_title(spec)))
    placed, rows = wrapped(panels)
    return Plot(panels=placed, rows=rows, height=rows * ROW_INCHES, keys=RATE_KEY, **canvas.legend)


def validation_plot(canvas: Canvas, directory: Path) -> Plot:
    """Held-out loss during training against tokens, from metrics.jsonl; checkpoints are marked."""
    curves = []
    for run in canvas.study.trained:
        look = canvas.looks[run.name]
        rows = [row for row in read_metrics(RunDirectory(directory / run.name).metrics) if "held_out_loss" in row]
        points = tuple(
            Point(
                x=row["tokens"] / canvas.unit,
                y=row["held_out_loss"],
                facts={"step": row["step"], "tokens": row["tokens"]},
            )
            for row in rows
        )
        curves.append(Series(Mark(colour=look.colour, width=1.2), points, look.label, "during training"))
    saved = canvas.lines("held_out_loss", None, label="checkpoint", line="")
    late = late_limits([*curves, *saved], FIRST_SHARE * canvas.most_tokens / canvas.unit)
    y = Axis(title="held-out loss", unit=NATS, limits=late)
    return Plot(panels=(canvas.panel(y, [*curves, *saved]),), keys=RATE_KEY, **canvas.legend)


def averages_plot(canvas: Canvas) -> Plot:
    """Full-precision loss, and KL divergence at the lowest width, of weights, averages kept in training, and soups.

    The loss has no bars: its intervals are over documents, which all models share, and are as wide as the panel.
    """
    study, rows = canvas.study, canvas.rows
    spec = lowest_spec(study)
    loss, divergence = f"quant/{spec}/cross_entropy", f"quant/{spec}/kl_divergence"
    measured = {row["average"] for row in rows}
    kept = [average for average in kept_averages(study) if average.name in measured]
    labels = {average.name: average_label(average, kept) for average in kept}
    styles = {average.name: KEPT | {"line": line} for average, line in zip(kept, cycle(KEPT_LINES), strict=False)}
    soups = {soup.name: SOUP for soup in study.soups if soup.name in measured}
    models: list[tuple[str | None, str, Any]] = [(None, "weights", {})]
    models += [(name, labels[name], style) for name, style in styles.items()]
    models += [(name, name, style) for name, style in soups.items()]

    def lines(column: str, has_bars: bool) -> list[Series]:
        bounds = interval_of(column) if has_bars else None
        return [one for name, label, style in models for one in canvas.lines(column, bounds, name, label, **style)]

    losses = lines(loss, has_bars=False)
    since = min((row["tokens"] for row in rows if row["average"] and row["tokens"] is not None), default=0)
    y = Axis(title="loss", unit=NATS, limits=late_limits(losses, since / canvas.unit))
    panels = (
        canvas.panel(y, losses, "Full precision"),
        canvas.panel(DIVERGENCE, lines(divergence, has_bars=True), spec_title(spec)),
    )
    neutral = Mark(colour=NEUTRAL, marker="o")
    keys = {"weights": neutral} | {labels[name]: replace(neutral, **style) for name, style in styles.items()}
    keys |= {"soup": replace(neutral, **SOUP)} if soups else {}
    return Plot(panels=panels, keys=keys | RATE_KEY, **canvas.legend)


def quantized_loss_plot(canvas: Canvas) -> Plot:
    """Loss after quantization against loss before it, model by model; on the dashed line nothing is lost."""
    specs = sorted(canvas.study.quantization.specs, key=lambda spec: -parse_spec(spec).bits)
    panels, rows = wrapped([_before_and_after(canvas, spec) for spec in specs])
    sizes = {"before the anneal": replace(POINT, size=2.6), "in it": POINT} if canvas.study.trained else {}
    keys = sizes | {"nothing lost": DIAGONAL}
    return Plot(panels=panels, rows=rows, height=rows * ROW_INCHES, keys=keys, **canvas.legend)


def _before_and_after(canvas: Canvas, spec: str) -> Panel:
    before, after = f"quant/{spec}/cross_entropy", f"quant/{spec}/cross_entropy_quantized"
    series, late = [], []
    for run, look in canvas.looks.items():
        rows = canvas.rows_of(run, before)
        points = [
            Point(x=row[before], y=row[after], facts=facts_of(row), is_small=row["phase"] in BEFORE_ANNEAL)
            for row in rows
        ]
        since = LATE_SHARE * max((row["tokens"] for row in rows), default=0)
        late += [point for point, row in zip(points, rows, strict=True) if row["tokens"] >= since]
        series.append(Series(replace(look.mark, width=0.8), tuple(points), look.label))
    x, y = Axis(title="full-precision loss", unit=NATS), Axis(title="quantized loss", unit=NATS)
    if late:
        low, high = around([*ends(late, "x"), *ends(late, "y")], NEAR)
        _, last = around(ends(late, "x"), NEAR)
        series.append(Series(DIAGONAL, (Point(x=low, y=low), Point(x=high, y=high)), is_data=False))
        x, y = replace(x, limits=(low, last)), replace(y, limits=(low, high))
    return Panel(x=x, y=y, series=tuple(series), title=spec_title(spec))


def curvature_plot(canvas: Canvas) -> Plot:
    """Trace of the Hessian with its interval against tokens, and its largest eigenvalue with its residual if measured.

    A study of traces alone has one panel.
    """
    trace, top = "curvature/trace", "curvature/lambda_max"
    open_ones = {
        (row["run"], row["step"]) for row in canvas.rows if row.get(top) is not None and not row[f"{top}_converged"]
    }
    labels = {look.label: run for run, look in canvas.looks.items()}
    eigenvalues = []
    for one in canvas.lines(top, residual_of(top)):
        assert one.run is not None
        is_open = [one.is_data and (labels[one.run], point.facts["step"]) in open_ones for point in one.points]
        points = tuple(replace(point, is_open=mark) for point, mark in zip(one.points, is_open, strict=True))
        eigenvalues.append(replace(one, points=points))
    panels = []
    shown = [("Trace", canvas.lines(trace, interval_of(trace)))]
    if canvas.study.curvature and canvas.study.curvature.lambda_max:
        shown.append(("Largest eigenvalue", eigenvalues))
    for title, lines in shown:
        unit = f"{NATS} / (unit of the parameters)"
        y = Axis(title=f"{title} of the Hessian", unit=f"{unit}^2", written=f"{unit}{POWER_2}")
        values = ends([point for one in lines for point in one.points], "y")
        panels.append(
            canvas.panel(logarithmic(y, values), lines, y.title)
        )  # bars that reach zero have no place on that scale
    keys = {"not converged": replace(POINT, is_open=True)} if open_ones else {}
    return Plot(panels=tuple(panels), keys=keys | RATE_KEY, **canvas.legend)
