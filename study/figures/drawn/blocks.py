"""Cost of quantization by decoder block, from results that were measured with --per-block."""

import math
import re
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

from ckpt_tools.hf.measured import Increase, Quantization
from study.figures.canvas import Canvas
from study.figures.charts import Chart, Quantity, Rows, grid, level, marks, panel
from study.figures.figure import Drawn, figure
from study.figures.looks import Look, Runs
from study.measurements.titles import spec_title
from study.paths import blocks_result

INCREASE = "absolute_error"
MANY_BLOCKS = 12  # from here on the intervals are bands
NO_SHARE = "no clear increase"
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


class Share(NamedTuple):
    """A share of the loss increase with its interval."""

    value: float
    low: float
    high: float


@figure(
    "blocks",
    100,
    "Cost of quantization by decoder block at the end of training. Left: the loss increase with"
    " this block alone quantized, as a share of that of the whole model; the dashed line is equal"
    " shares. Middle: the share that goes away where it alone is left in full precision. The two"
    " differ, and do not sum to one, as far as errors of one block change what those of another"
    " cost. Bars are the intervals of the increases, with the whole model's taken as known; a model"
    " without a significant increase has no shares. Right: relative error of the outputs of the"
    " block's linears on the calibration text: mean, smallest and largest.",
    lambda study: bool(study.quantization.by_block),
)
def blocks(canvas: Canvas) -> Drawn | None:
    """Draw the last checkpoints block by block, a line per run."""
    spec = canvas.study.quantization.by_block[0]
    measured = canvas.results(partial(blocks_result, spec=spec), Quantization)
    looks = {look.label: look for look in canvas.runs.looks.values()}
    results = [(looks[label], one) for label, one in measured.items() if one.blocks]
    return blocks_of(canvas.runs, results, spec_title(spec)) if results else None


def shares(measured: Quantization) -> tuple[list[Share], list[Share]] | None:
    """Return increase with each block alone and 1 - increase without it, over the whole model's.

    Intervals are those of the numerators, with the whole model's increase taken as known. None
    where the interval of that increase reaches 0: then nothing is there to share.
    """
    total = measured.absolute_error
    if total is None or measured.intervals[INCREASE][0] <= 0:
        return None
    alone, needed = [], []
    for block in measured.blocks:
        alone.append(Share(*(value / total for value in _increase(block.alone))))
        value, low, high = (value / total for value in _increase(block.all_but_it))
        needed.append(Share(1 - value, 1 - high, 1 - low))
    return alone, needed


def _increase(of: Increase | None) -> Share:
    """A loss increase with its interval; not a number where it was not measured."""
    if of is None or of.absolute_error is None:
        return Share(math.nan, math.nan, math.nan)
    return Share(of.absolute_error, *of.intervals[INCREASE])


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
        found, errors = shares(measured), output_errors(measured)
        own = {block: Share(sum(at) / len(at), min(at), max(at)) for block, at in errors.items()}
        numbers = [block.block for block in measured.blocks]
        alone, needed = found or ([], [])
        values = ((ALONE, numbers, alone), (NEEDED, numbers, needed), (OUTPUT, own, own.values()))
        for quantity, places, one in values:
            head = {"panel": f"{title}, {TITLES[quantity]}", "run": look.label}
            by_quantity[quantity] += [
                head | {BLOCK: place} | quantity.values(share.value, (share.low, share.high))
                for place, share in zip(places, one, strict=False)
                if math.isfinite(share.value)
            ]
    depth = max(len(measured.blocks) for _, measured in results)
    panels = [_panel(runs, rows, quantity, title, depth) for quantity, rows in by_quantity.items()]
    return Drawn([row for rows in by_quantity.values() for row in rows], grid(panels, 3))


def _panel(runs: Runs, rows: Rows, quantity: Quantity, title: str, depth: int) -> Chart:
    head = f"{title}\n{TITLES[quantity]}"
    if not rows:
        note = {"type": "text", "text": NO_SHARE, "color": "#777777"}
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
    chart = marks(rows, runs, x, y, point={"size": 12})
    chart["layer"][1]["mark"] = {"type": "area", "opacity": 0.15}
    return panel([*lines, chart], head, 3)
