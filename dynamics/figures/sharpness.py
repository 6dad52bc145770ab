"""Sharpness by forward passes alone, beside the exact one where that is affordable."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynamics.mechanism.checkpoints import CheckpointRow, checkpoints
from dynamics.mechanism.correlation import Association, association
from study.claims.verdict import Evidence
from study.definition import Study
from study.figures.canvas import WEIGHTS, Canvas, described
from study.figures.charts import NATS, Chart, Quantity, Rows, Span, diagonal, marks, panel
from study.figures.figure import Drawn, drawn, figure
from study.measurements.critical import OF_MOVE, OF_STEP
from study.measurements.curvature import TOP
from study.measurements.kind import Column
from study.measurements.step import TERMS
from study.measurements.titles import spec_title
from study.results.table import Row

UNIT = f"{NATS} / (unit of the parameters)^2"
WRITTEN = "{} (nats / unit\N{SUPERSCRIPT TWO})"


def _curved(title: str) -> Quantity:
    return Quantity(title, UNIT, written=WRITTEN.format(title))


ALONG = _curved("curvature along the move")
LARGEST = _curved("largest eigenvalue")
SHARPNESS = Quantity("critical sharpness", "1 / move")
PASSES = _curved("curvature by forward passes")
EXACT = _curved("curvature by Hessian products")
OUTCOME = "critical multiple"
BOUND = "bound"  # whether the sharpness is one
MEASURES: dict[Quantity, Column] = {ALONG: OF_MOVE.curvature, SHARPNESS: OF_MOVE.sharpness}
COLUMNS = 3


@figure(
    "sharpness",
    "Sharpness by forward passes alone. d is the move from the checkpoint before, over many"
    " updates of the optimizer: not one update, which is what arXiv:2601.16979 has. Curvature"
    " along it, d'Hd / |d|^2, is from a symmetric pair of losses; the largest eigenvalue bounds"
    " it where both are of the same sequences. Critical sharpness is 2 over the multiple of d at"
    " which the loss is the checkpoint's again, on the side on which it falls first: of -d, back"
    " towards the checkpoint before, where a further move raises it (negative multiples). While"
    " weights move about one place at a constant rate it is near 2 whatever the curvature is. Open"
    " marks are bounds, where the search found no such multiple; long bars leave the panel. Below:"
    " both against the largest eigenvalue of the same checkpoints, where they are above 0, with"
    " Spearman's correlation and Pearson's of logarithms, over all checkpoints and within"
    " trainings; intervals are 95%, over trainings, where there are three or more. Last: the"
    " curvature along the quantization steps of the last checkpoints by both ways, with bars of"
    " 95% over sequences.",
    lambda study: study.critical is not None,
)
def sharpness(canvas: Canvas) -> Drawn | None:
    """Draw both measures along training, against the eigenvalue, and against exact products."""
    panels = [_along(canvas, "Curvature along the move", ALONG, OF_MOVE.curvature.name)]
    panels.append(_critical(canvas))
    if canvas.study.curvature and canvas.study.curvature.lambda_max:
        panels.append(_along(canvas, "Largest eigenvalue of the Hessian", LARGEST, TOP.name))
        panels += [_against(canvas, quantity) for quantity in MEASURES]
    panels.append(_steps(canvas))
    return drawn([(rows, chart) for rows, chart in panels if rows], COLUMNS, canvas.rates)


def _along(canvas: Canvas, title: str, quantity: Quantity, column: str) -> tuple[Rows, Chart]:
    rows = canvas.along(quantity, column, title)
    y = quantity.logarithmic_for(rows)
    return rows, canvas.curves(rows, y, COLUMNS) if rows else {}


def _critical(canvas: Canvas) -> tuple[Rows, Chart]:
    """Return the critical sharpness, or its bound, of every checkpoint with a move."""
    title, name, rows = "Critical sharpness along the move", OF_MOVE.sharpness.name, Rows()
    by_place = {
        (canvas.runs.looks[row["run"]].label, row["step"]): row
        for row in canvas.table
        if row["average"] is None
    }
    # Every search has this end of its bracket, whose places along training are taken.
    for placed in canvas.along(SHARPNESS, OF_MOVE.not_above.name, title):
        row = by_place[placed["run"], placed["step"]]
        value, multiple = critical_of(row)
        if value is None:
            continue
        is_bound = row[name] is None
        ends = None if is_bound else (row[f"{name}_low"], row[f"{name}_high"])
        said = {OUTCOME: multiple, BOUND: str(is_bound)}
        rows.append(placed | SHARPNESS.values(value, ends) | said)
    # By the values alone: where the slope is near 0, one bar would flatten all of them.
    y = SHARPNESS.logarithmic_for([{SHARPNESS.label: row[SHARPNESS.label]} for row in rows])
    is_open = f"datum.{BOUND} === 'True'"
    return rows, canvas.curves(rows, y, COLUMNS, open_where=is_open) if rows else {}


def critical_of(row: Row) -> tuple[float | None, str]:
    """Return the critical sharpness along the move with its multiple in words, or a bound."""
    not_above, above = row[OF_MOVE.not_above.name], row[OF_MOVE.above.name]
    value = row[OF_MOVE.sharpness.name]
    if value is not None:
        return value, f"{row[OF_MOVE.multiple.name]:.3g}"
    if above is None:
        # No higher loss up to `not_above`: the sharpness is at most 2 over it.
        return (2 / not_above if not_above else None), f"none up to {not_above:.3g}"
    words = f"between {not_above:.3g} and {above:.3g}" if not_above else f"below {above:.3g}"
    return 2 / above, words


def _pairs(study: Study, table: Sequence[Row], column: Column) -> list[CheckpointRow]:
    """Return the checkpoints of which a measure and the largest eigenvalue are known."""
    return [
        point
        for point in checkpoints(study, table, column.name, TOP.name)
        if min(point.row[column.name], point.row[TOP.name]) > 0
    ]


def associations(points: Sequence[CheckpointRow], column: Column) -> dict[str, Association | None]:
    """Return the correlations of a measure and the largest eigenvalue, in words."""
    logs = [
        np.log([point.row[name] for point in points]) if points else np.zeros(0)
        for name in (column.name, TOP.name)
    ]
    trainings = [point.training for point in points]
    return {
        f"{name} {where}": association(logs[0], logs[1], trainings, ranked=ranked, within=within)
        for where, within in (("over all", False), ("within trainings", True))
        for name, ranked in (("rank", True), ("Pearson", False))
    }


def _against(canvas: Canvas, quantity: Quantity) -> tuple[Rows, Chart]:
    """Return a measure against the largest eigenvalue, with their correlations above."""
    column = MEASURES[quantity]
    points = _pairs(canvas.study, canvas.table, column)
    if not points:
        return [], {}
    found = {name: each for name, each in associations(points, column).items() if each}
    title = "\n".join([quantity.title, *(f"{name} {each}" for name, each in found.items())])
    rows = [
        described(point.row, title, canvas.runs.looks[point.row["run"]], series=WEIGHTS)
        | LARGEST.values(point.row[TOP.name])
        | quantity.values(point.row[column.name])
        for point in points
    ]
    x, y = LARGEST.logarithmic_for(rows), quantity.logarithmic_for(rows)
    return rows, panel([marks(rows, canvas.runs, x, y, has_line=False)], title, COLUMNS)


def _steps(canvas: Canvas) -> tuple[Rows, Chart]:
    """Return the curvature along quantization steps by forward passes against exact products."""
    title, rows = "Curvature along quantization steps", Rows()
    second_order = next(term for term in TERMS if term.figure == "second_order")
    for spec in canvas.study.quantization.by_block:
        column, norm = OF_STEP.curvature.of(spec), OF_STEP.norm.of(spec)
        exact = second_order.of(spec)
        for run, row in canvas.last_rows(column).items():
            if row[exact] is None:
                continue
            scale = 2 / row[norm] ** 2  # the second order is d'Hd / 2
            known = [scale * row[name] for name in (exact, f"{exact}_low", f"{exact}_high")]
            head = described(row, title, canvas.runs.looks[run], series=spec_title(spec))
            values = EXACT.values(known[0], (known[1], known[2]))
            ends = row[f"{column}_low"], row[f"{column}_high"]
            rows.append(head | values | PASSES.values(row[column], ends))
    if not rows:
        return [], {}
    # One domain for both axes, so that equal values are the diagonal; low bars may leave it.
    lowest = min(row[axis.label] for row in rows for axis in (EXACT, PASSES))
    reach = [*EXACT.reach(rows), *PASSES.reach(rows)]
    domain: Span = (lowest / 2, max(reach) * 1.2) if lowest > 0 else (min(reach), max(reach))
    x, y = (replace(axis, is_log=lowest > 0, domain=domain) for axis in (EXACT, PASSES))
    chart = panel(
        [diagonal(x, y), marks(rows, canvas.runs, x, y, has_line=False, bar_opacity=0.3)],
        title,
        COLUMNS,
    )
    return rows, chart | {"height": chart["width"]}


def sharpness_line(evidence: Evidence) -> str:
    """Return the correlation of curvature along the moves and the largest eigenvalue in words.

    Empty for a study without both, and where the figure is not shown.
    """
    study = evidence.study
    if not evidence.shows(sharpness.name):
        return ""
    if not (study.critical and study.curvature and study.curvature.lambda_max):
        return ""
    points = _pairs(study, evidence.rows, OF_MOVE.curvature)
    found = {name: each for name, each in associations(points, OF_MOVE.curvature).items() if each}
    if not found:
        return ""
    trainings = len({point.training for point in points})
    correlations = ", ".join(f"{name} {each}" for name, each in found.items())
    # The slope says on which side the loss falls, whether or not it was seen to rise again there.
    slopes = [row[OF_MOVE.slope.name] for row in evidence.rows if _has_move(row)]
    ahead = sum(slope < 0 for slope in slopes)
    few = "" if trainings > 2 else "; intervals take three trainings"
    return (
        "Curvature along the moves between checkpoints, by forward passes alone, and the largest"
        f" eigenvalue of the Hessian: {correlations} ({len(points)} checkpoints of {trainings}"
        f" trainings{few}). At {ahead} of {len(slopes)}"
        " checkpoints the loss first falls further along the move, not back along it."
    )


def _has_move(row: Row) -> bool:
    return row.get(OF_MOVE.slope.name) is not None
