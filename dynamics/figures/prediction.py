"""The second-order prediction of the loss increase beside the measured one."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt_tools.hf.measured import Step, StepPart
from curvature.slices.figure import with_error
from study.figures.canvas import Canvas
from study.figures.charts import (
    DASHED,
    NATS,
    Chart,
    Quantity,
    Rows,
    Span,
    around,
    data,
    level,
    marks,
    panel,
)
from study.figures.figure import Drawn, drawn, figure
from study.measurements.titles import spec_title
from study.paths import step_result

MEASURED = Quantity("measured loss increase", NATS)
FORMULA = "g\N{MIDDLE DOT}\u03b4 + \u00bd \u03b4\u1d40H\u03b4"
PREDICTED = Quantity("second-order prediction of it", NATS, written=f"{FORMULA} ({NATS})")
REMAINDER = Quantity("measured - predicted", NATS)
PART, WHOLE = "part", "whole"
IS_BLOCK = f"datum.{PART} !== '{WHOLE}'"
BLOCKS: Any = {  # small and open
    "open_where": IS_BLOCK,
    "points": {"size": {"condition": {"test": IS_BLOCK, "value": 22}, "value": 75}},
}
MARGIN = 0.08  # of the range of the values, around them


@figure(
    "prediction",
    110,
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
        results = canvas.results(partial(step_result, spec=spec), Step)
        rows = [
            {"panel": spec_title(spec), "run": label, PART: part} | values
            for label, step in results.items()
            for part, of in (*step.blocks.items(), (WHOLE, step.whole))
            if of and (values := _values(of))
        ]
        if rows:
            above.append((rows, _agreement(canvas, rows, len(specs))))
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
    is_log = min(reach) > 0
    ends: Span = (min(reach) / 1.2, max(reach) * 1.2) if is_log else around(reach, MARGIN)
    x, y = (replace(axis, is_log=is_log, domain=ends) for axis in (MEASURED, PREDICTED))
    axes = {"x": x.encoding(), "y": y.encoding()}
    equal = [{x.label: end, y.label: end} for end in ends]
    diagonal = data(equal, mark=DASHED | {"type": "line"}, encoding=axes)
    zeros = [] if is_log else [level(0.0), level(0.0, "x")]
    values = marks(rows, canvas.runs, x, y, has_line=False, bar_opacity=0.25, **BLOCKS)
    chart = panel([*zeros, diagonal, values], rows[0]["panel"], columns)
    return chart | {"height": chart["width"]}


def _remainders(canvas: Canvas, rows: Rows, results: dict[str, Step], columns: int) -> Chart:
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
