"""The rows of table.parquet as metrics, for MLflow's own pages.

Measurements keep the names of their columns (`quant/gptq-b3-g128/kl_divergence`, of an average
`lawa5x500/quant/...`); the most telling ones of the end of a run are also `final/...`.
"""

from collections.abc import Sequence

from study.results.table import Row
from study.tracking.points import Point, Stream, check_finite

FINAL = "final"
KINDS = ("quant", "curvature", "tasks")  # the first part of the name of a measurement's column
HEADLINES = ("held_out_loss", "curvature/trace", "curvature/lambda_max")
SPEC_HEADLINES = ("kl_divergence", "relative_error")


def table_stream(rows: Sequence[Row], metrics: Stream, last_step: int) -> Stream:
    """Return one run's rows with their points, at the times when training reached their tokens.

    Their places are tokens, or steps where a row does not know its tokens. What was not measured
    has no point.
    """
    milliseconds = {row["tokens"]: int(row["time"] * 1000) for row in metrics.rows}
    axis = "step" if any(row["tokens"] is None for row in rows) else "tokens"
    points = []
    for row in rows:
        at, own = row[axis], list[Point]()
        time = milliseconds.get(at, 0)
        prefix = f"{row['average']}/" if row["average"] else ""
        is_last = row["step"] == last_step and row["average"] is None
        for column, value in row.items():
            if value is None:
                continue
            kind, _, short = column.partition("/")
            if kind in KINDS:
                own.append(Point(prefix + column, at, float(value), time))
            of_spec = kind == "quant" and column.rpartition("/")[2] in SPEC_HEADLINES
            if is_last and (of_spec or column in HEADLINES):
                own.append(Point(f"{FINAL}/{short or column}", at, float(value), time))
        points.append(check_finite(own))
    return Stream(list(map(dict, rows)), points)
