"""Curvature along training, the error against it, and the error that it predicts."""

import math
from dataclasses import replace

from dynamics.figures.losses import larger_in_the_anneal
from dynamics.figures.quantization import DIVERGENCE_AXIS, ERROR_AXIS
from dynamics.mechanism.checkpoints import CheckpointRow, checkpoints, divergence_of, loss_of
from dynamics.mechanism.correlation import given_loss_and_tokens
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
from study.figures.charts import (
    NATS,
    Chart,
    Quantity,
    Rows,
    columns_of,
    diagonal,
    marks,
    panel,
    thousandths,
)
from study.figures.figure import Drawn, drawn, figure
from study.measurements.curvature import CONVERGED, RELATIVE, TOP, TRACE
from study.measurements.kind import Column
from study.measurements.quantization import RELATIVE_ERROR
from study.measurements.titles import spec_title
from study.results.averages import lowest_spec

UNIT = f"{NATS} / (unit of the parameters)"
SOLVER = "solver"  # whether it converged


@figure(
    "curvature",
    "Trace of the Hessian of the held-out loss and, where it is measured, its largest eigenvalue"
    " on a fixed batch; beside them the relative error of the loss at the fewest bits. Bars of the"
    " trace are 95% intervals over pairs of a microbatch and a probe. All checkpoints share the"
    " pairs, so differences between them are known far better. Bars of the eigenvalue are the"
    " residual of the solver: the value is that of the batch, and has no sampling error; open marks"
    " did not converge. Both are per squared unit of the"
    " parameters, whose scale differs between the runs: neither alone says what a step of the"
    " quantizer costs.",
    lambda study: study.curvature is not None,
)
def curvature(canvas: Canvas) -> Drawn | None:
    """Draw the trace, the eigenvalue if the study measures it, and the error."""
    settings = canvas.study.curvature
    assert settings
    shown = {"Trace of the Hessian": TRACE}
    shown |= {"Largest eigenvalue of the Hessian": TOP} if settings.lambda_max else {}
    columns = len(shown) + 1
    panels: list[tuple[Rows, Chart]] = []
    for title, column in shown.items():
        quantity = Quantity(title, f"{UNIT}^2", written=f"{UNIT}\N{SUPERSCRIPT TWO}")
        rows = canvas.along(quantity, column.name, title)
        if not rows:
            continue
        open_where = "false"
        if column == TOP:
            solvers = _solvers(canvas)
            rows = [row | {SOLVER: solvers[row["run"], row["step"]]} for row in rows]
            open_where = f"datum.{SOLVER} !== 'converged'"
        y = quantity.logarithmic_for(rows)
        panels.append((rows, canvas.curves(rows, y, columns, open_where=open_where)))
    if panels:
        panels += _errors(canvas, columns)
    return drawn(panels, columns, canvas.rates)


def _errors(canvas: Canvas, columns: int) -> list[tuple[Rows, Chart]]:
    spec = lowest_spec(canvas.study)
    rows = canvas.along(ERROR_AXIS, RELATIVE_ERROR.of(spec), spec_title(spec))
    return [(rows, canvas.curves(rows, ERROR_AXIS, columns))] if rows else []


def _solvers(canvas: Canvas) -> dict[tuple[str, int], str]:
    """Return how the solver of the eigenvalue ended, by the label of the run and the step."""
    return {
        (canvas.runs.looks[row["run"]].label, row["step"]): (
            "converged" if row[CONVERGED.name] else "not converged"
        )
        for row in canvas.table
        if row["average"] is None
    }


SQUARED = f"{NATS} / (unit of the parameters)^2"
WRITTEN = "{} (nats / unit\N{SUPERSCRIPT TWO})"
SHOWN = {
    TRACE: Quantity(
        "trace of the Hessian", SQUARED, written=WRITTEN.format("trace of the Hessian")
    ),
    TOP: Quantity("largest eigenvalue", SQUARED, written=WRITTEN.format("largest eigenvalue")),
    RELATIVE: Quantity("relative trace", NATS),
}


@figure(
    "error_against_curvature",
    "KL divergence of quantization at the fewest bits against curvature: a point per checkpoint"
    " after the warm-up, large points of runs trained here in the anneal; eigenvalues that did not"
    " converge are left out. The relative trace is that of the decoder blocks' matrices, each times"
    " the mean square of its entries: it does not depend on the unit of the parameters. Above each"
    " panel: Spearman's partial correlation given loss and tokens, with its 95% interval. Its unit"
    " is the training, for checkpoints of one, branches among them, are not independent"
    " (jackknife).",
    lambda study: study.curvature is not None,
)
def error_against_curvature(canvas: Canvas) -> Drawn | None:
    """Draw a panel per measure of curvature."""
    needed = divergence_of(canvas.study), loss_of(canvas.study)
    by_column = {
        column: checkpoints(canvas.study, canvas.table, *needed, column.name) for column in SHOWN
    }
    panels = {column: points for column, points in by_column.items() if points}
    columns = columns_of(len(panels))
    return drawn(
        [_correlation_panel(canvas, column, panels[column], columns) for column in panels], columns
    )


def _correlation_panel(
    canvas: Canvas, column: Column, points: list[CheckpointRow], columns: int
) -> tuple[Rows, Chart]:
    correlation = given_loss_and_tokens(canvas.study, points, column.name)
    spec = spec_title(lowest_spec(canvas.study))
    title = f"{spec}\npartial correlation\n{correlation or 'not known: too few trainings'}"
    rows = [
        described(row, title, canvas.runs.looks[row["run"]], series=WEIGHTS)
        | SHOWN[column].values(row[column.name])
        | DIVERGENCE_AXIS.values(row[divergence_of(canvas.study)])
        for row in (point.row for point in points)
    ]
    x, y = SHOWN[column].logarithmic_for(rows), DIVERGENCE_AXIS.logarithmic_for(rows)
    sizes = larger_in_the_anneal(canvas.study, 18, 60)
    by_step = {"order": {"field": "step", "type": "quantitative"}}
    return rows, panel(
        [marks(rows, canvas.runs, x, y, points=sizes, lines=by_step)], title, columns
    )


MEASURED = thousandths("measured KL divergence")
PREDICTED = thousandths("predicted KL divergence")
TITLES = {
    "formula": "relative trace, bits and learning rate",
    "theory": "relative trace and bits, slopes 1",
    "trace": "trace and bits",
    "tokens": "tokens and bits",
}


@figure(
    "formula",
    "KL divergence predicted from curvature, bits and peak learning rate, against the measured one:"
    " log KL = a + b log relative trace + c log (2^bits - 1)^-2 + d log learning rate, of which the"
    " second-order theory says b = c = 1 and d = 0. Coefficients are least squares over one half of"
    " the trainings, and the points are those of the other half; seeds of one setting are in one"
    " half. Above each panel the median factor between the two, and R squared of their logarithms."
    " Other panels: the same with other quantities in its place. Dashed: equal values.",
    lambda study: study.curvature is not None,
)
def formula(canvas: Canvas) -> Drawn | None:
    """Draw the formula, and what it has to beat."""
    observations = observe(canvas.study, canvas.table)
    if observations is None:
        return None
    return drawn([_formula_panel(canvas, observations, name) for name in TITLES], 2)


def _formula_panel(canvas: Canvas, observations: Observations, name: str) -> tuple[Rows, Chart]:
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
    # Equal domains and a square panel: equal values lie on the diagonal.
    ends = min(reach) / 1.2, max(reach) * 1.2
    x, y = (replace(axis, is_log=True, domain=ends) for axis in (PREDICTED, MEASURED))
    values = marks(rows, canvas.runs, x, y, has_line=False)
    chart = panel([diagonal(x, y), values], title, 2)
    return rows, chart | {"height": chart["width"]}
