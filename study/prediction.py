"""The second-order prediction of the loss increase beside the measured one, at the end of training."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pydantic import BaseModel, ValidationError
from scipy.special import stdtr

from ckpt_tools.holm import holm
from curvature.slices.figure import with_error
from study.canvas import Look, legend_above, logarithmic, looks_of, panels_of, save
from study.layout import step_result
from study.paired import Row
from study.settings import Study, spec_title
from study.steps import INTERVAL_LEVEL
from study.summary import RunSummary, last_rows, listed
from train.command import UserError

WHOLE: Any = {"markersize": 6.5, "zorder": 4}
BLOCK: Any = {"markersize": 4, "markerfacecolor": "white", "markeredgewidth": 0.8, "zorder": 3}
BARS: Any = {"elinewidth": 0.7, "capsize": 0, "linestyle": "none"}
NEUTRAL: Any = {"color": "#555555", "marker": "o", "linestyle": "none"}
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


def draw_prediction(study: Study, directory: Path, path: Path) -> None:
    """Above, predicted against measured increase, on the line where they agree; below, what is left between them."""
    specs, looks = study.quantization.by_block, looks_of(study)
    figure, axes = panels_of(len(specs), height=7.6, rows=2, height_ratios=(3, 2))
    for place, spec in enumerate(specs):
        above, below = axes[place], axes[len(specs) + place]
        results = {}
        for run in study.runs:
            result = directory / step_result(run, spec)
            if result.exists():
                results[run.name] = read_step_result(result)
        drawn = [(look, results.get(run)) for run, look in looks.items()]
        _draw_pairs(above, drawn)
        above.set_title(spec_title(spec))
        _draw_remainders(below, drawn)
    whole = Line2D([], [], label="whole step", **(NEUTRAL | WHOLE))
    block = Line2D([], [], label="step of one block alone", **(NEUTRAL | BLOCK))
    equal = Line2D([], [], color="#555555", linestyle="--", linewidth=1, label="predicted = measured")
    legend_above(figure, "peak learning rate", looks.values(), [whole, block, equal])
    save(figure, path)


def _parts(measured: Measured | None) -> list[tuple[Part, dict[str, Any]]]:
    """Every part with its style: blocks, then the whole."""
    if measured is None:
        return []
    return [*((part, BLOCK) for part in measured.blocks.values()), (measured.whole, WHOLE)]


def _bars(known: Known) -> list[list[float]]:
    return [[known.mean - known.interval[0]], [known.interval[1] - known.mean]]


def _draw_pairs(axis: Axes, drawn: Sequence[tuple[Look, Measured | None]]) -> None:
    ends: list[float] = []
    for look, measured in drawn:
        for part, style in _parts(measured):
            one, other = part.measured, part.predicted
            bars: Any = {"xerr": _bars(one), "yerr": _bars(other), "ecolor": f"{look.colour}55"}
            axis.errorbar([one.mean], [other.mean], fmt=look.marker, color=look.colour, **bars, **BARS, **style)
            ends += [*one.interval, *other.interval]
    axis.set_xlabel("measured loss increase (nats per token)")
    axis.set_ylabel(r"$g\cdot\delta + \frac{1}{2}\,\delta^T H\,\delta$ (nats per token)")
    if not ends:
        return
    if min(ends) > 0:
        low, high = min(ends) / 1.2, max(ends) * 1.2
        logarithmic(axis, "x")
        logarithmic(axis, "y")
    else:
        margin = MARGIN * (max(ends) - min(ends))
        low, high = min(ends) - margin, max(ends) + margin
        axis.locator_params(nbins=6)
    axis.axline((low, low), (high, high), color="#555555", linestyle="--", linewidth=1, zorder=1)
    axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for line in (axis.axhline, axis.axvline):
        line(0, color="#999999", linewidth=0.8, zorder=0)


def _draw_remainders(axis: Axes, drawn: Sequence[tuple[Look, Measured | None]]) -> None:
    ends: list[float] = []
    for place, (look, measured) in enumerate(drawn):
        parts = _parts(measured)
        for index, (part, style) in enumerate(parts):
            offset = SPREAD * (2 * index / max(len(parts) - 1, 1) - 1)
            bars: Any = {"yerr": _bars(part.remainder), "color": look.colour}
            axis.errorbar([place + offset], [part.remainder.mean], fmt=look.marker, **bars, **BARS, **style)
            ends += part.remainder.interval
    axis.axhline(0, color="#999999", linewidth=0.8, zorder=0)
    shown = [f"{look.label}\n{relative_text(measured.whole) if measured else ''}" for look, measured in drawn]
    axis.set_xticks(range(len(drawn)), shown)
    axis.set_xlim(-0.6, len(drawn) - 0.4)
    axis.grid(visible=False, axis="x")
    axis.set_xlabel("peak learning rate; below it predicted / measured - 1")
    axis.set_ylabel("measured - predicted (nats per token)")
    axis.ticklabel_format(axis="y", scilimits=(-3, 3))
    if ends:
        margin = MARGIN * (max(ends) - min(ends)) or 1.0
        axis.set_ylim(min(ends) - margin, max(ends) + margin)


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
    degrees = study.curvature.step_microbatches - 1
    p_values = [2 * float(stdtr(degrees, -_standardized(ratio - 1, error))) for ratio, error in found.values()]
    groups: dict[str, list[str]] = {"flatter than": [], "sharper than": [], "not told apart from": []}
    for (label, (ratio, error)), p in zip(found.items(), holm(p_values), strict=True):
        words = "not told apart from" if p > 1 - INTERVAL_LEVEL else "sharper than" if ratio > 1 else "flatter than"
        groups[words].append(f"{label} ({with_error(ratio, error)})")
    clauses = [
        f"{words} a random step at peak learning rate{'s' if len(labels) > 1 else ''} {listed(labels)}"
        for words, labels in groups.items()
        if labels
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
