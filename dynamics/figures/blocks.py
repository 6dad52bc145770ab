"""Cost of quantization by decoder block, from results that were measured with --per-block."""

import re
from collections import defaultdict
from functools import partial
from typing import Any

from ckpt_tools.hf.measured import Increase, Quantization
from study.figures.canvas import Canvas
from study.figures.charts import Chart, Quantity, Rows, grid, level, marks, panel
from study.figures.figure import Drawn, figure
from study.figures.looks import Look, Runs
from study.measurements.titles import spec_title
from study.paths import blocks_result

INCREASE = "absolute_error"
MANY_BLOCKS = 12  # from here on the intervals are bands
EMPTY = "no clear increase"
EMPTY_OUTPUT = "not calibrated"
BLOCK = "decoder block"
ALONE = Quantity("loss increase / that of the whole model", is_percent=True, holds_zero=True)
NEEDED = Quantity("1 - loss increase / that of the whole model", is_percent=True, holds_zero=True)
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
    100,
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
        if rest := _share(block.all_but_it, total):
            value, low, high = rest
            needed[block.block] = (1 - value, 1 - high, 1 - low)
    return {ALONE: alone, NEEDED: needed}


def _share(of: Increase | None, total: float) -> Share | None:
    if of is None or of.absolute_error is None:
        return None
    low, high = of.intervals[INCREASE]
    return of.absolute_error / total, low / total, high / total


def output_errors(measured: Quantization) -> dict[int, list[float]]:
    """Return block -> the relative output errors of its linears.

    The block is the first number in a linear's name.
    """
    errors: dict[int, list[float]] = defaultdict(list)
    for layer in measured.layers:
        number = re.search(r"(?<=\.)\d+(?=\.)", layer.name)
        if number and layer.relative_output_error is not None:
            errors[int(number[0])].append(layer.relative_output_error)
    return dict(sorted(errors.items()))


def blocks_of(runs: Runs, results: list[tuple[Look, Quantization]], title: str) -> Drawn:
    """Draw shares of the loss increase block by block, and output errors; a line per result."""
    by_quantity: dict[Quantity, Rows] = {quantity: [] for quantity in TITLES}
    for look, measured in results:
        errors = output_errors(measured)
        own = {block: (sum(at) / len(at), min(at), max(at)) for block, at in errors.items()}
        for quantity, by_block in (shares(measured) | {OUTPUT: own}).items():
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
    lines = [] if quantity is OUTPUT else [level(0.0), level(1 / depth, strokeDash=[5, 3])]
    many = depth >= MANY_BLOCKS
    x: Chart = {"field": BLOCK, "type": "quantitative" if many else "ordinal", "title": BLOCK}
    x["axis"] = {"labelAngle": 0, "grid": False, "format": "d"}
    offset: dict[str, Any] = {"field": "run", "type": "nominal"}
    offset["sort"] = [look.label for look in runs.looks.values()]
    if not many:
        return panel([*lines, marks(rows, runs, x, y, xOffset=offset)], head, 3)
    chart = marks(rows, runs, x, y, points={"size": {"value": 12}})
    chart["layer"][1]["mark"] = {"type": "area", "opacity": 0.15}
    return panel([*lines, chart], head, 3)
