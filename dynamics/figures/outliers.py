"""Outlier statistics along training, and what quantization changes after the last block."""

from study.figures.canvas import Canvas
from study.figures.charts import Chart, Quantity, Rows, percentage
from study.figures.figure import Drawn, drawn, figure
from study.measurements.outliers import INPUT, WEIGHT
from study.measurements.quantization import R_L
from study.measurements.titles import spec_title
from study.results.averages import lowest_spec

COLUMNS = 4
QUANTITIES = {
    "kurtosis": Quantity("kurtosis", written="kurtosis (Gaussian: 3)"),
    "max_to_mean": Quantity("max-to-mean ratio"),
    "max_to_median": Quantity("max-to-median ratio"),
    "top_channels": percentage("share in 1% of channels", "share of the squared norm, %"),
}
ERROR = percentage("R_L")


@figure(
    "outliers",
    "Outliers of what linears read (above) and of their weights (below), means over the linears of"
    " the blocks. Kurtosis is of all entries; the largest |x| is over the mean or the median of the"
    " |x| of its row, mean over rows, which are tokens and output features; last the share of the"
    " squared norm in the 1% of inputs that have most of it. At the end R_L at the fewest bits: the"
    " mean over tokens of |q - h|^2 / |h|^2, of the last block's output h and that of the quantized"
    " model q. arXiv:2509.23500 finds that it predicts the error of quantization where kurtosis and"
    " the max-to-mean ratio do not. Bars are 95% intervals over documents; all checkpoints share"
    " the documents. Weights have no sampling error.",
    lambda study: study.outliers is not None,
)
def outliers(canvas: Canvas) -> Drawn | None:
    """Draw every statistic of inputs and weights, and R_L."""
    panels = [
        _along(canvas, f"{QUANTITIES[statistic].title}, {kind}", QUANTITIES[statistic], column.name)
        for kind, columns in (("inputs", INPUT), ("weights", WEIGHT))
        for statistic, column in columns.items()
    ]
    spec = lowest_spec(canvas.study)
    panels.append(_along(canvas, f"R_L, {spec_title(spec)}", ERROR, R_L.of(spec)))
    return drawn([(rows, chart) for rows, chart in panels if rows], COLUMNS, canvas.rates)


def _along(canvas: Canvas, title: str, quantity: Quantity, column: str) -> tuple[Rows, Chart]:
    rows = canvas.along(quantity, column, title)
    y = quantity.logarithmic_for(rows)
    return rows, canvas.curves(rows, y, COLUMNS) if rows else {}
