"""Predictions by curvature, bits and learning rate beside what is measured."""

import math
from dataclasses import replace

from dynamics.mechanism.formula import (
    FORMULA,
    MODELS,
    Observations,
    observe,
    predict,
    score,
    slopes_text,
)
from study.figures.canvas import WEIGHTS, Canvas, described
from study.figures.charts import DASHED, NATS, Chart, Quantity, Rows, data, marks, panel
from study.figures.figure import Drawn, drawn, figure
from study.measurements.titles import spec_title

MEASURED = Quantity("measured KL divergence", NATS)
PREDICTED = Quantity("predicted KL divergence", NATS)
TITLES = {
    "formula": "relative trace, bits and learning rate",
    "theory": "relative trace and bits, slopes 1",
    "trace": "trace and bits",
    "tokens": "tokens and bits",
}


@figure(
    "formula",
    105,
    "KL divergence predicted from curvature, bits and peak learning rate, against the measured one:"
    " log KL = a + b log relative trace + c log (2^bits - 1)^-2 + d log learning rate, of which the"
    " second-order theory says b = c = 1 and d = 0. Coefficients are least squares over one half of"
    " the trainings, and the points are those of the other half; seeds of one setting are in one"
    " half. Above each panel the median factor between the two, and R squared of their logarithms."
    " Other panels: the same with other quantities in its place. Dashed: equal values; a symbol per"
    " run.",
    lambda study: study.curvature is not None,
)
def formula(canvas: Canvas) -> Drawn | None:
    """Draw the formula, and what it has to beat."""
    observations = observe(canvas.study, canvas.table)
    if observations is None:
        return None
    return drawn([_panel(canvas, observations, name) for name in TITLES], 2)


def _panel(canvas: Canvas, observations: Observations, name: str) -> tuple[Rows, Chart]:
    model = MODELS[name]
    scored = score(observations, model)
    title = (
        f"{TITLES[name]}\nmedian factor {scored.median_factor:.2f},"
        f" R squared {scored.r_squared:.2f}"
    )
    if model is FORMULA:
        title += f"\n{slopes_text(observations)}".replace(", (", ",\n(")
    rows = [
        described(row, title, canvas.runs.looks[row["run"]], series=WEIGHTS)
        | {"spec": spec_title(spec)}
        | PREDICTED.values(math.exp(predicted))
        | MEASURED.values(math.exp(measured))
        for row, spec, predicted, measured in zip(
            observations.rows,
            observations.specs,
            predict(observations, model),
            observations.target_N,
            strict=True,
        )
    ]
    reach = [*PREDICTED.reach(rows), *MEASURED.reach(rows)]
    ends = min(reach) / 1.2, max(reach) * 1.2
    x, y = (replace(axis, is_log=True, domain=ends) for axis in (PREDICTED, MEASURED))
    equal = [{x.label: end, y.label: end} for end in ends]
    diagonal = data(
        equal, mark=DASHED | {"type": "line"}, encoding={"x": x.encoding(), "y": y.encoding()}
    )
    values = marks(rows, canvas.runs, x, y, has_line=False)
    chart = panel([diagonal, values], title, 2)
    return rows, chart | {"height": chart["width"]}
