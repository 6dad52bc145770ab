"""Curvature against tokens (arXiv 2510.06213, figure 6): trace and largest eigenvalue."""

from study.figures.canvas import Canvas
from study.figures.charts import NATS, Chart, Quantity, Rows
from study.figures.figure import Drawn, drawn, figure
from study.measurements.curvature import TOP, TRACE

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
    settings = canvas.study.curvature
    assert settings
    shown = {"Trace of the Hessian": TRACE}
    shown |= {"Largest eigenvalue of the Hessian": TOP} if settings.lambda_max else {}
    panels: list[tuple[Rows, Chart]] = []
    for title, column in shown.items():
        quantity = Quantity(title, f"{UNIT}^2", written=f"{UNIT}\N{SUPERSCRIPT TWO}")
        rows = canvas.along(quantity, column, title)
        if not rows:
            continue
        open_where = "false"
        if column == TOP:
            rows = [row | {SOLVER: _solver(canvas, row)} for row in rows]
            open_where = f"datum.{SOLVER} !== 'converged'"
        y = quantity.logarithmic_for(rows)
        panels.append((rows, canvas.curves(rows, y, len(shown), open_where=open_where)))
    return drawn(panels, 2, canvas.rates)


def _solver(canvas: Canvas, row: dict[str, object]) -> str:
    runs = {look.label: run for run, look in canvas.runs.looks.items()}
    at = (runs[str(row["run"])], row["step"], None)
    model = next(
        each for each in canvas.table if (each["run"], each["step"], each["average"]) == at
    )
    return "converged" if model[f"{TOP}_converged"] else "not converged"
