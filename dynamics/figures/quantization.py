"""Quantization against tokens (arXiv 2510.06213, figures 1 and 8)."""

from study.figures.canvas import Canvas
from study.figures.charts import NATS, Quantity, columns_of
from study.figures.figure import Drawn, drawn, figure
from study.measurements.titles import spec_title

ERROR = Quantity("relative error of the loss", is_percent=True, holds_zero=True)
DIVERGENCE = Quantity("KL(full || quantized)", NATS, holds_zero=True)
MEASURES = {"kl_divergence": DIVERGENCE, "relative_error": ERROR}


def _along(canvas: Canvas, name: str, specs: tuple[str, ...]) -> Drawn | None:
    """Draw a panel per spec."""
    quantity = MEASURES[name]
    columns = columns_of(len(specs))
    panels = [
        (rows, canvas.curves(rows, quantity, columns))
        for spec in specs
        if (rows := canvas.along(quantity, f"quant/{spec}/{name}", spec_title(spec)))
    ]
    return drawn(panels, columns, canvas.rates)


@figure(
    "kl_divergence",
    10,
    "KL divergence of the quantized from the full-precision model against training tokens. Bars"
    " are intervals. It cannot change sign, and varies less between documents than a difference"
    " of losses. Dotted, on the second axis: the learning rate as a share of its peak.",
)
def kl_divergence(canvas: Canvas) -> Drawn | None:
    """Draw the divergence of every checkpoint."""
    return _along(canvas, "kl_divergence", canvas.study.quantization.specs)


@figure(
    "quantization_error",
    20,
    "Relative error of the loss against training tokens: quantized loss / full-precision loss - 1"
    " on held-out text. Bars are intervals.",
)
def quantization_error(canvas: Canvas) -> Drawn | None:
    """Draw the paper's measure of every checkpoint."""
    return _along(canvas, "relative_error", canvas.study.quantization.specs)


@figure(
    "methods_along_training",
    95,
    "KL divergence against training tokens by further methods: whether the learning rate and its"
    " decay do to them what they do to the first. Bars are intervals.",
    lambda study: bool(study.quantization.along),
)
def methods_along_training(canvas: Canvas) -> Drawn | None:
    """Draw the divergence of every checkpoint by each further method."""
    return _along(canvas, "kl_divergence", canvas.study.quantization.along)
