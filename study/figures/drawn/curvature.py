"""Curvature against tokens (arXiv 2510.06213, figure 6): trace and largest eigenvalue."""

from study.figures.canvas import Canvas, interval_of, residual_of
from study.figures.charts import NATS, Chart, Quantity, Rows, grid
from study.figures.figure import Drawn, figure

TRACE, TOP = "curvature/trace", "curvature/lambda_max"
UNIT = f"{NATS} / (unit of the parameters)"
SOLVER = "solver"  # whether it converged


@figure(
    "curvature",
    70,
    "Trace of the Hessian of the held-out loss and, where it is measured, its largest eigenvalue"
    " on a fixed batch. Bars of the trace are 95% intervals over pairs of a microbatch and a"
    " probe. All checkpoints share the pairs, so differences between them are known far better."
    " Bars of the eigenvalue are the residual of the solver: the value is that of the batch, and"
    " has no sampling error; open marks did not converge. Both are per squared unit of the"
    " parameters, whose scale differs between the runs: neither alone says what a step of the"
    " quantizer costs.",
    lambda study: study.curvature is not None,
)
def curvature(canvas: Canvas) -> Drawn | None:
    """Draw the trace, and the eigenvalue if the study measures it."""
    shown = [("Trace of the Hessian", TRACE, interval_of(TRACE))]
    if canvas.study.curvature and canvas.study.curvature.lambda_max:
        shown.append(("Largest eigenvalue of the Hessian", TOP, residual_of(TOP)))
    rows: Rows = []
    panels: list[Chart] = []
    for title, column, bounds in shown:
        quantity = Quantity(title, f"{UNIT}^2", written=f"{UNIT}\N{SUPERSCRIPT TWO}")
        own = canvas.along(quantity, column, bounds, title)
        if not own:
            continue
        point: dict[str, str] = {}
        if column == TOP:
            own = [row | {SOLVER: _solver(canvas, row)} for row in own]
            point = {"open_where": f"datum.{SOLVER} !== 'converged'"}
        y = quantity.logarithmic_for(own)
        panels.append(canvas.curves(own, y, column, len(shown), **point))
        rows += own
    return Drawn([*rows, *canvas.rates], grid(panels, 2)) if rows else None


def _solver(canvas: Canvas, row: dict[str, object]) -> str:
    runs = {look.label: run for run, look in canvas.runs.looks.items()}
    at = (runs[str(row["run"])], row["step"], None)
    found = next(one for one in canvas.table if (one["run"], one["step"], one["average"]) == at)
    return "converged" if found[f"{TOP}_converged"] else "not converged"
