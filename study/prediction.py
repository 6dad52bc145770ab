"""The second-order prediction of the loss increase beside the measured one, at the end of training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from scipy.special import stdtr

from ckpt_tools.holm import holm
from curvature.slices.figure import with_error
from study.canvas import NEUTRAL, Canvas, Look
from study.layout import step_result
from study.paired import Row
from study.plots import DELTA, HALF, TRANSPOSED, Axis, Line, Mark, Panel, Plot, Point, Series, around, ends, logarithmic
from study.settings import Study, spec_title
from study.steps import INTERVAL_LEVEL
from study.summary import RunSummary, last_rows, listed
from study.trajectories import DIAGONAL, NATS
from train.command import UserError

BARS: Any = {"colour": NEUTRAL, "line": "", "bar": 0.7, "cap": 0.0}
WHOLE = Mark(size=6.5, order=4, **BARS)
BLOCK = Mark(size=4, is_open=True, order=3, **BARS)
SECOND_ORDER = f"g\N{MIDDLE DOT}{DELTA} + {HALF} {DELTA}{TRANSPOSED}H{DELTA}"
FAINT = 0.33  # opacity of bars that cross each other
SPREAD = 0.3  # of the room between two runs that the marks of one take up on either side
MARGIN = 0.08  # of the range of the values, around them


class Known(BaseModel):
    """A mean over microbatches; of a ratio, the ratio of means."""

    mean: float
    standard_error: float
    interval: tuple[float, float]


class Part(BaseModel):
    """The whole step, or that of one block."""

    predicted: Known
    measured: Known
    remainder: Known
    relative_difference: Known | None


class Measured(BaseModel):
    """What the figure reads of the step's result."""

    whole: Part
    blocks: dict[str, Part]


class StepResult(BaseModel):
    """result.json of 'python -m curvature step'."""

    measured: Measured


def read_step_result(path: Path) -> Measured:
    """UserError where the file is no result of a quantization step."""
    try:
        return StepResult.model_validate_json(path.read_bytes()).measured
    except ValidationError:
        raise UserError(f"{path} is no result of a quantization step; remove it and run the study again") from None


def prediction_plot(canvas: Canvas, directory: Path) -> Plot:
    """Above, predicted against measured increase, on the line where they agree; below, what is left between them."""
    study = canvas.study
    specs, runs = study.quantization.by_block, {run.name: run for run in study.runs}
    above, below = [], []
    for spec in specs:
        results: dict[str, Measured] = {}
        for name in canvas.looks:
            path = directory / step_result(runs[name], spec)
            if path.exists():
                results[name] = read_step_result(path)
        above.append(_pairs(canvas, results, spec_title(spec)))
        below.append(_remainders(canvas, results))
    keys = {
        "whole step": replace(WHOLE, colour=NEUTRAL, marker="o"),
        "step of one block alone": replace(BLOCK, colour=NEUTRAL, marker="o"),
        "predicted = measured": DIAGONAL,
    }
    rows: Any = {"rows": 2, "row_heights": (3, 2), "height": 7.6}
    return Plot(panels=(*above, *below), keys=keys, **rows, **canvas.legend)


def _parts(measured: Measured) -> list[tuple[str, Part]]:
    """Every part with its name: blocks, then the whole."""
    return [*measured.blocks.items(), ("whole", measured.whole)]


def _series(look: Look, points: dict[str, Point], opacity: float) -> list[Series]:
    """Marks of the blocks, and over them that of the whole."""
    blocks = tuple(point for part, point in points.items() if part != "whole")
    style: Any = {"colour": look.colour, "marker": look.marker, "opacity_of_bars": opacity}
    return [
        Series(replace(BLOCK, **style), blocks, look.label, "one block"),
        Series(replace(WHOLE, **style), (points["whole"],), look.label, "whole step"),
    ]


def _pairs(canvas: Canvas, results: dict[str, Measured], title: str) -> Panel:
    series: list[Series] = []
    for name, measured in results.items():
        points = {
            part: Point(
                x=known.measured.mean,
                y=known.predicted.mean,
                x_interval=known.measured.interval,
                y_interval=known.predicted.interval,
                facts={"part": part},
            )
            for part, known in _parts(measured)
        }
        series += _series(canvas.looks[name], points, FAINT)
    x = Axis(title="measured loss increase", unit=NATS)
    y = Axis(title="second-order prediction of it", unit=NATS, written=f"{SECOND_ORDER} ({NATS})")
    drawn = [point for one in series for point in one.points]
    values = [*ends(drawn, "x"), *ends(drawn, "y")]
    zeros: tuple[Line, ...] = (Line(0.0), Line(0.0, "x"))
    if values:
        limits = around(values, MARGIN)
        x, y = logarithmic(x, values), logarithmic(y, values)
        if x.is_log:
            limits, zeros = (min(values) / 1.2, max(values) * 1.2), ()
        x, y = replace(x, limits=limits), replace(y, limits=limits)
        series.append(Series(DIAGONAL, tuple(Point(x=end, y=end) for end in limits), is_data=False))
    return Panel(x=x, y=y, series=tuple(series), title=title, lines=zeros, is_square=True)


def _remainders(canvas: Canvas, results: dict[str, Measured]) -> Panel:
    series: list[Series] = []
    ticks: list[tuple[float, str]] = []
    for place, (name, look) in enumerate(canvas.looks.items()):
        ticks.append((float(place), f"{look.label}\n{relative_text(results[name].whole) if name in results else ''}"))
        if name not in results:
            continue
        points, parts = {}, _parts(results[name])
        for index, (part, known) in enumerate(parts):
            offset = SPREAD * (2 * index / max(len(parts) - 1, 1) - 1)
            left = known.remainder
            points[part] = Point(x=place + offset, y=left.mean, y_interval=left.interval, facts={"part": part})
        series += _series(look, points, 1.0)
    title = f"{canvas.study.heading}; below it predicted / measured - 1"
    x = Axis(title=title, is_place=True, ticks=tuple(ticks), limits=(-0.6, len(ticks) - 0.4))
    values = ends([point for one in series for point in one.points], "y")
    limits = around(values, MARGIN) if values else (None, None)
    y = Axis(title="measured - predicted", unit=NATS, limits=limits)
    return Panel(x=x, y=y, series=tuple(series), lines=(Line(0.0),))


def relative_text(whole: Part) -> str:
    """The relative difference in percent with its standard error; a dash where the increase is not told from 0."""
    low, high = whole.measured.interval
    if whole.relative_difference is None or low <= 0 <= high:
        return "\N{EM DASH}"
    return percent(whole.relative_difference.mean, whole.relative_difference.standard_error)


def percent(value: float, error: float) -> str:
    """A share with its standard error as a percentage.

    >>> percent(-0.0534, 0.027).replace(chr(0x2212), "-").replace(chr(0xB1), "+-")
    '-5.3 +- 2.7%'
    """
    return f"{with_error(100 * value, 100 * error, '+')}%"


def step_findings(study: Study, summaries: list[RunSummary]) -> list[str]:
    """Two sentences per spec: whether its step is sharper than a random one, and how far the second order predicts it.

    Of what is measured of every run.
    """
    sentences = []
    for spec in study.quantization.by_block:
        column = f"curvature/step-{spec}"
        ends = last_rows(summaries, f"{column}/step_to_mean")
        if ends:
            sentences.append(_sharpness(study, spec, ends, f"{column}/step_to_mean"))
        ends = last_rows(summaries, f"{column}/measured")
        if ends:
            sentences.append(_prediction(spec, ends, column))
    return sentences


def _sharpness(study: Study, spec: str, ends: dict[str, Row], column: str) -> str:
    """By Student's t of the ratio against 1, with Holm's correction over the runs."""
    found = {label: (row[column], row[f"{column}_standard_error"]) for label, row in ends.items()}
    assert study.curvature is not None
    degrees = study.curvature.step_microbatches - 1
    p_values = [2 * float(stdtr(degrees, -_standardized(ratio - 1, error))) for ratio, error in found.values()]
    groups: dict[str, list[str]] = {"flatter than": [], "sharper than": [], "not told apart from": []}
    for (label, (ratio, error)), p in zip(found.items(), holm(p_values), strict=True):
        words = "not told apart from" if p > 1 - INTERVAL_LEVEL else "sharper than" if ratio > 1 else "flatter than"
        groups[words].append(f"{label} ({with_error(ratio, error)})")
    clauses = [
        f"{words} a random step at {study.heading} {listed(labels)}" for words, labels in groups.items() if labels
    ]
    return f"The step of {spec_title(spec)}, is {'; '.join(clauses)}."


def _standardized(difference: float, error: float) -> float:
    return abs(difference) / error if error else math.inf


def _prediction(spec: str, ends: dict[str, Row], column: str) -> str:
    """Of an increase that may be 0 no share is told; then what is left over is held against the second-order term."""
    told, others = [], []
    for label, row in ends.items():
        difference = row[f"{column}/relative_difference"]
        if difference is None or row[f"{column}/measured_low"] <= 0 <= row[f"{column}/measured_high"]:
            term = row[f"{column}/second_order"]
            left, error = row[f"{column}/remainder"] / term, row[f"{column}/remainder_standard_error"] / abs(term)
            others.append(f"{percent(left, error)} ({label})")
        else:
            error = row[f"{column}/relative_difference_standard_error"]
            told.append(f"{percent(difference, error)} ({label})")
    clauses = [f"lies {listed(told)} off the measured one"] if told else []
    if others:
        clauses.append(
            f"leaves over {listed(others)} of delta'H delta / 2, where the measured increase itself is not told from 0"
        )
    return f"The second-order prediction of the loss increase of {spec_title(spec)}, {'; it '.join(clauses)}."
