"""Error against curvature over all checkpoints (arXiv 2510.06213, appendix G, in one figure)."""

from typing import Any

from dynamics.figures.full_against_quantized import BEFORE_ANNEAL
from dynamics.figures.quantization import DIVERGENCE
from dynamics.mechanism.checkpoints import Checkpoint, checkpoints, divergence_of, loss_of
from dynamics.mechanism.given import given_loss_and_tokens
from study.figures.canvas import WEIGHTS, Canvas, described
from study.figures.charts import NATS, Chart, Quantity, Rows, columns_of, marks, panel
from study.figures.figure import Drawn, drawn, figure
from study.measurements.curvature import RELATIVE, TOP, TRACE
from study.measurements.titles import spec_title
from study.results.averages import lowest_spec

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
    75,
    "KL divergence of quantization at the fewest bits against curvature: a point per checkpoint"
    " after the warm-up, large points in the anneal; eigenvalues that did not converge are left"
    " out. The relative trace is that of the decoder blocks' matrices, each times the mean square"
    " of its entries: it does not depend on the unit of the parameters. Above each panel:"
    " Spearman's partial correlation given loss and tokens, with its 95% interval. Its unit is the"
    " training, for checkpoints of one, branches among them, are not independent (jackknife).",
    lambda study: study.curvature is not None,
)
def error_against_curvature(canvas: Canvas) -> Drawn | None:
    """Draw a panel per measure of curvature."""
    needed = divergence_of(canvas.study), loss_of(canvas.study)
    by_column = {
        column: checkpoints(canvas.study, canvas.table, *needed, column) for column in SHOWN
    }
    panels = {column: points for column, points in by_column.items() if points}
    columns = columns_of(len(panels))
    return drawn([_panel(canvas, column, panels[column], columns) for column in panels], columns)


def _panel(
    canvas: Canvas, column: str, points: list[Checkpoint], columns: int
) -> tuple[Rows, Chart]:
    correlation = given_loss_and_tokens(canvas.study, points, column)
    spec = spec_title(lowest_spec(canvas.study))
    title = f"{spec}\npartial correlation\n{correlation or 'not known: too few trainings'}"
    rows = [
        described(row, title, canvas.runs.looks[row["run"]], series=WEIGHTS)
        | SHOWN[column].values(row[column])
        | DIVERGENCE.values(row[divergence_of(canvas.study)])
        for row in (point.row for point in points)
    ]
    x, y = SHOWN[column].logarithmic_for(rows), DIVERGENCE.logarithmic_for(rows)
    early = {"field": "phase", "oneOf": BEFORE_ANNEAL}
    sizes: dict[str, Any] = {"size": {"condition": {"test": early, "value": 18}, "value": 60}}
    by_step = {"order": {"field": "step", "type": "quantitative"}}
    return rows, panel(
        [marks(rows, canvas.runs, x, y, points=sizes, lines=by_step)], title, columns
    )
