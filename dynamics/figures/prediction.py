"""The quantization step of the last checkpoints: its predicted cost, and the cost by block."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

from base.quantities import MILLINATS
from ckpt_tools.hf.measured import Increase, MeasuredStep, Quantization, StepPart
from curvature.slices.figure import with_error
from study.figures.canvas import Canvas
from study.figures.charts import (
    Chart,
    Quantity,
    Rows,
    Span,
    around,
    diagonal,
    grid,
    level,
    marks,
    panel,
    percentage,
    thousandths,
)
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import Look, Runs
from study.measurements.titles import spec_title
from study.paths import blocks_result, step_result

MEASURED = thousandths("measured loss increase")
FORMULA = "g\N{MIDDLE DOT}\u03b4 + \u00bd \u03b4\u1d40H\u03b4"
PREDICTED = thousandths("second-order prediction of it", f"{FORMULA}, {MILLINATS}")
REMAINDER = thousandths("measured - predicted")
PART, WHOLE = "part", "whole"
IS_BLOCK = f"datum.{PART} !== '{WHOLE}'"
BLOCKS: Any = {  # small and open
    "open_where": IS_BLOCK,
    "points": {"size": {"condition": {"test": IS_BLOCK, "value": 22}, "value": 75}},
}
MARGIN = 0.08  # of the range of the values, around them


@figure(
    "prediction",
    "The second-order prediction of the loss increase, g.delta + delta'H delta / 2, of the"
    " quantization step of the last checkpoints; small open marks are decoder blocks alone. Above:"
    " against the measured increase of the same microbatches; bars are 95% intervals over"
    " microbatches, and another draw of text moves both together, along the dashed line of equal"
    " values. Below: what the second order leaves out, with the 95% interval of the difference"
    " taken microbatch by microbatch. Differences of some 1e-7 are rounding: fp32 resolves losses"
    " between 2 and 4 to 2.4e-7. Percentages: the relative difference of the whole step with its"
    " standard error over microbatches; a dash where the measured increase is not significantly"
    " different from 0.",
    lambda study: bool(study.quantization.by_block),
)
def prediction(canvas: Canvas) -> Drawn | None:
    """Draw predicted against measured increase, and the remainders below."""
    specs = canvas.study.quantization.by_block
    above: list[tuple[Rows, Chart]] = []
    below: list[tuple[Rows, Chart]] = []
    for spec in specs:
        results = canvas.results(partial(step_result, spec=spec), MeasuredStep)
        rows = [
            {"panel": spec_title(spec), "run": label, PART: part} | values
            for label, step in results.items()
            for part, measured in (*step.blocks.items(), (WHOLE, step.whole))
            if measured and (values := _values(measured))
        ]
        if rows:
            above.append((rows, _agreement(canvas, rows, len(specs))))
            # The rows are in the panel above already; once is enough for the CSV file.
            below.append(([], _remainders(canvas, rows, results, len(specs))))
    return drawn([*above, *below], len(above))


def _values(part: StepPart) -> dict[str, float]:
    parts = {MEASURED: part.measured, PREDICTED: part.predicted, REMAINDER: part.remainder}
    values: dict[str, float] = {}
    for quantity, estimate in parts.items():
        if estimate is None:
            return {}
        values |= quantity.values(estimate.mean, estimate.interval)
    return values


def _agreement(canvas: Canvas, rows: Rows, columns: int) -> Chart:
    reach = [*MEASURED.reach(rows), *PREDICTED.reach(rows)]
    # Both axes have one scale and one domain, so that equal values are the diagonal.
    is_log = min(reach) > 0
    ends: Span = (min(reach) / 1.2, max(reach) * 1.2) if is_log else around(reach, MARGIN)
    x, y = (replace(axis, is_log=is_log, domain=ends) for axis in (MEASURED, PREDICTED))
    zeros = [] if is_log else [level(0.0), level(0.0, "x")]
    values = marks(rows, canvas.runs, x, y, has_line=False, bar_opacity=0.25, **BLOCKS)
    chart = panel([*zeros, diagonal(x, y), values], rows[0]["panel"], columns)
    return chart | {"height": chart["width"]}


def _remainders(
    canvas: Canvas, rows: Rows, results: dict[str, MeasuredStep], columns: int
) -> Chart:
    texts = {label: relative_text(step.whole) for label, step in results.items()}
    axis: Chart = {"labelAngle": 0, "labelFontSize": 9, "labelOverlap": False}
    axis |= {"labelExpr": f"[datum.label, {json.dumps(texts)}[datum.label]]"}
    title = [canvas.runs.heading, "predicted / measured - 1"]
    labels = [look.label for look in canvas.runs.looks.values()]
    x: Chart = {"field": "run", "type": "nominal", "sort": labels, "title": title}
    parts = list(dict.fromkeys(row[PART] for row in rows))
    offset: dict[str, Any] = {"field": PART, "type": "nominal", "sort": parts}
    values = marks(
        rows, canvas.runs, x | {"axis": axis}, REMAINDER, has_line=False, xOffset=offset, **BLOCKS
    )
    return panel([level(0.0), values], "", columns, 180)


def relative_text(whole: StepPart | None) -> str:
    """Return the relative difference in percent with its standard error.

    A dash where the increase is not significantly different from 0.
    """
    interval = whole.measured.interval if whole and whole.measured else None
    difference = whole.relative_difference if whole else None
    if interval is None or interval[0] <= 0 <= interval[1] or difference is None:
        return "\N{EM DASH}"
    return percent(difference.mean, difference.standard_error or 0.0)


def percent(value: float, error: float) -> str:
    """Return a share with its standard error as a percentage.

    >>> percent(-0.0534, 0.027).replace(chr(0x2212), "-").replace(chr(0xB1), "+-")
    '-5.3 +- 2.7%'
    """
    return f"{with_error(100 * value, 100 * error, '+')}%"


INCREASE = "absolute_error"
MANY_BLOCKS = 12  # from here on the intervals are bands
EMPTY = "no clear increase"
EMPTY_OUTPUT = "not calibrated"
BLOCK = "decoder block"
ALONE = percentage("loss increase / that of the whole model", holds_zero=True)
NEEDED = percentage("1 - loss increase / that of the whole model", holds_zero=True)
OUTPUT = Quantity(
    "relative output error of the linears",
    written="output error |(W - \u0174) X|\u00b2 / |W X|\u00b2",
)
TITLES = {
    ALONE: "one block quantized",
    NEEDED: "all blocks but one quantized",
    OUTPUT: "linears of the block",
}


Share = tuple[float, float, float]  # of the loss increase, and the ends of its interval


@figure(
    "blocks",
    "Cost of quantization by decoder block at the end of training. Left: the loss increase with"
    " this block alone quantized, as a share of that of the whole model; the dashed line is equal"
    " shares. Middle: the share that goes away where it alone is left in full precision. The two"
    " differ, and do not sum to one, as far as errors of one block change what those of another"
    " cost. Bars are the intervals of the increases, with the whole model's taken as known; a model"
    " without a significant increase has no shares. Right: relative error of the outputs of the"
    " block's linears on the calibration text, for a method that takes one: mean, smallest and"
    " largest.",
    lambda study: bool(study.quantization.by_block),
)
def blocks(canvas: Canvas) -> Drawn | None:
    """Draw the last checkpoints block by block, a line per run."""
    spec = canvas.study.quantization.by_block[0]
    measured = canvas.results(partial(blocks_result, spec=spec), Quantization)
    looks = {look.label: look for look in canvas.runs.looks.values()}
    results = [(looks[label], result) for label, result in measured.items() if result.blocks]
    return blocks_of(canvas.runs, results, spec_title(spec)) if results else None


def shares(measured: Quantization) -> dict[Quantity, dict[int, Share]]:
    """Return by block the increase with it alone and 1 - that without it, over the whole model's.

    Intervals are those of the numerators, with the whole model's increase taken as known. Where the
    interval of that increase reaches 0 nothing is there to share.
    """
    total = measured.absolute_error
    if total is None or measured.intervals[INCREASE][0] <= 0:
        return {}
    alone, needed = {}, {}
    for block in measured.blocks:
        if share := _share(block.alone, total):
            alone[block.block] = share
        # 1 - x turns the interval around: its low end comes from the high one.
        if rest := _share(block.all_but_it, total):
            value, low, high = rest
            needed[block.block] = (1 - value, 1 - high, 1 - low)
    return {ALONE: alone, NEEDED: needed}


def _share(increase: Increase | None, total: float) -> Share | None:
    if increase is None or increase.absolute_error is None:
        return None
    low, high = increase.intervals[INCREASE]
    return increase.absolute_error / total, low / total, high / total


def output_errors(measured: Quantization) -> dict[int, list[float]]:
    """Return block -> the relative output errors of its linears.

    The block is the first number in a linear's name.
    """
    errors: dict[int, list[float]] = defaultdict(list)
    for layer in measured.layers:
        # Such as 3 in model.layers.3.mlp.up_proj: a number between two dots.
        number = re.search(r"(?<=\.)\d+(?=\.)", layer.name)
        if number and layer.relative_output_error is not None:
            errors[int(number[0])].append(layer.relative_output_error)
    return dict(sorted(errors.items()))


def blocks_of(runs: Runs, results: list[tuple[Look, Quantization]], title: str) -> Drawn:
    """Draw shares of the loss increase block by block, and output errors; a line per result."""
    by_quantity: dict[Quantity, Rows] = {quantity: [] for quantity in TITLES}
    for look, measured in results:
        errors = output_errors(measured)
        spans = {block: (sum(at) / len(at), min(at), max(at)) for block, at in errors.items()}
        for quantity, by_block in (shares(measured) | {OUTPUT: spans}).items():
            head = {"panel": f"{title}, {TITLES[quantity]}", "run": look.label}
            by_quantity[quantity] += [
                head | {BLOCK: block} | quantity.values(value, (low, high))
                for block, (value, low, high) in by_block.items()
            ]
    depth = max(len(measured.blocks) for _, measured in results)
    panels = [_panel(runs, rows, quantity, title, depth) for quantity, rows in by_quantity.items()]
    return Drawn([row for rows in by_quantity.values() for row in rows], grid(panels, 3))


def _panel(runs: Runs, rows: Rows, quantity: Quantity, title: str, depth: int) -> Chart:
    head = f"{title}\n{TITLES[quantity]}"
    if not rows:
        text = EMPTY_OUTPUT if quantity is OUTPUT else EMPTY
        note = {"type": "text", "text": text, "color": "#777777"}
        return panel([{"data": {"values": [{}]}, "mark": note}], head, 3)
    y = quantity.logarithmic_for(rows) if quantity is OUTPUT else quantity
    lines = [] if quantity is OUTPUT else [level(0.0), level(100 / depth, strokeDash=[5, 3])]
    many = depth >= MANY_BLOCKS
    x: Chart = {"field": BLOCK, "type": "quantitative" if many else "ordinal", "title": BLOCK}
    x["axis"] = {"labelAngle": 0, "grid": False, "format": "d"}
    offset: dict[str, Any] = {"field": "run", "type": "nominal"}
    offset["sort"] = [look.label for look in runs.looks.values()]
    if not many:
        return panel([*lines, marks(rows, runs, x, y, xOffset=offset)], head, 3)
    chart = marks(rows, runs, x, y, points={"size": {"value": 12}})
    # Layer 1 of `marks` are the interval bars, since a line and no band come before them.
    chart["layer"][1]["mark"] = {"type": "area", "opacity": 0.15}
    return panel([*lines, chart], head, 3)
