"""The figures of every kind of measurement, as result.json holds them below `measured`.

A column that was not measured, or that an older version did not know, is None or empty; a key that
this version does not know is ignored. So results of any version can be read.
"""

from pydantic import BaseModel, ConfigDict

Interval = tuple[float, float]


class Read(BaseModel):
    """A part of a result.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class MeasuredMean(Read):
    """A mean, its standard error and its interval."""

    mean: float
    standard_error: float | None = None
    interval: Interval | None = None


# quantization: python -m quant_eval run


class IntervalMethod(Read):
    """The method of the intervals of a result."""

    level: float | None = None
    method: str | None = None
    samples: int | None = None
    seed: int | None = None


class Increase(Read):
    """The cost of quantizing some blocks, in nats per token."""

    absolute_error: float | None = None
    kl_divergence: float | None = None
    intervals: dict[str, Interval] = {}


class MeasuredBlock(Read):
    """A decoder block quantized alone, and all blocks but it."""

    block: int
    alone: Increase
    all_but_it: Increase | None = None


class Linear(Read):
    """The errors of a linear; None where the method moved scales between linears.

    The error of its outputs is on the calibration text: None too of methods that take none. A dead
    linear reads zeros alone on that text, so no method can choose between its roundings: own ones
    round it to nearest.
    """

    name: str
    dead: bool = False
    relative_output_error: float | None = None
    relative_weight_error: float | None = None
    folded: bool = False


class PerDocument(Read):
    """Sums over the targets of each document."""

    document: list[int] = []
    tokens: list[float] = []
    nll: list[float] = []
    nll_quantized: list[float] = []
    kl: list[float] = []
    agreements: list[float] = []


class FigureByDraw(Read):
    """A figure, for each draw of the calibration text."""

    values: list[float]
    standard_error: float | None = None


class DrawnDocuments(Read):
    """Sums over the targets of each document, for each draw of the calibration text."""

    nll_quantized: list[list[float]] = []
    kl: list[list[float]] = []
    agreements: list[list[float]] = []


class MeasuredDraws(Read):
    """All figures by name, and the sums by document, for each draw of the calibration text."""

    figures: dict[str, FigureByDraw] = {}
    per_document: DrawnDocuments = DrawnDocuments()


class StandardErrors(Read):
    """The standard error of a figure by source; None for draws of which there was one."""

    documents: float | None = None
    draws: float | None = None


class Quantization(Read):
    """The cost of quantization, in nats per token where a figure has a unit.

    R_L is the relative change of the last block's output.
    """

    cross_entropy: float | None = None
    cross_entropy_quantized: float | None = None
    absolute_error: float | None = None
    relative_error: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    r_l: float | None = None
    intervals: dict[str, Interval] = {}
    standard_errors: dict[str, StandardErrors] = {}
    interval: IntervalMethod | None = None
    tokens: int | None = None
    documents: int | None = None
    calibration: MeasuredDraws | None = None
    per_document: PerDocument = PerDocument()
    layers: list[Linear] = []
    blocks: list[MeasuredBlock] = []
    dense: str | None = None


# downstream tasks: python -m quant_eval tasks


class Accuracy(Read):
    """Both models' accuracy on one task, or the mean over tasks."""

    accuracy: float | None = None
    accuracy_quantized: float | None = None
    difference: float | None = None
    degradation: float | None = None
    standard_error: float | None = None
    standard_error_quantized: float | None = None
    p_value: float | None = None
    items: int | None = None
    intervals: dict[str, Interval | None] = {}


class Tasks(Read):
    """The accuracy of the full and the quantized model on downstream tasks."""

    tasks: dict[str, Accuracy] = {}
    dead_linears: list[str] = []  # see Linear
    mean: Accuracy | None = None
    interval: IntervalMethod | None = None


# outlier statistics: python -m quant_eval outliers


class OutlierFigure(Read):
    """A statistic: its mean over the linears of all blocks, and the largest.

    Standard error and interval are for other documents; weights have none. A figure is None where
    it is not defined, as a ratio to a median of 0.
    """

    mean: float | None = None
    standard_error: float | None = None
    interval: Interval | None = None
    max: float | None = None
    linear: str | None = None


class LinearOutliers(Read):
    """The outlier statistics of a linear. Linears that read the same have the same of inputs.

    Kurtosis is of all entries. A maximum is over the mean or the median of a row's |x|, mean over
    rows: tokens, or output features. Top channels are the 1% of inputs with most of the squared
    norm, of which it is the share.
    """

    name: str
    input_kurtosis: float | None = None
    input_max_to_mean: float | None = None
    input_max_to_median: float | None = None
    input_top_channels: float | None = None
    weight_kurtosis: float | None = None
    weight_max_to_mean: float | None = None
    weight_max_to_median: float | None = None
    weight_top_channels: float | None = None


class Outliers(Read):
    """Outlier statistics of a model, by name of the figure and by linear."""

    figures: dict[str, OutlierFigure] = {}
    linears: list[LinearOutliers] = []
    tokens: int | None = None
    documents: int | None = None


# curvature: python -m curvature


class Trace(MeasuredMean):
    """A trace, in nats per token per squared parameter unit."""

    probes: int | None = None
    per_microbatch: list[float] | None = None


class Eigenvalue(Read):
    """An eigenvalue of the Hessian, and how far the iteration came."""

    value: float
    residual: float | None = None
    converged: bool | None = None
    iterations: int | None = None


class Curvature(Read):
    """Traces and the largest eigenvalue of the Hessian of the loss, which is in nats per token.

    The relative trace is that of the matrices, each times the mean square of its entries.
    """

    loss: float | None = None
    trace: Trace | None = None
    gauss_newton_trace: Trace | None = None
    fisher_trace: Trace | None = None
    relative_trace: Trace | None = None
    block_traces: dict[str, Trace] = {}
    lambda_max: Eigenvalue | None = None
    eigenvalues: dict[str, list[Eigenvalue]] = {}  # largest and smallest, of lanczos


class StepPart(Read):
    """The whole quantization step, or that of one block, in nats per token."""

    first_order: MeasuredMean | None = None
    second_order: MeasuredMean | None = None
    predicted: MeasuredMean | None = None
    measured: MeasuredMean | None = None
    remainder: MeasuredMean | None = None
    relative_difference: MeasuredMean | None = None
    ratios: dict[str, MeasuredMean | None] = {}


class MeasuredStep(Read):
    """The loss increase along a quantization step, predicted and measured."""

    loss: MeasuredMean | None = None
    whole: StepPart | None = None
    blocks: dict[str, StepPart] = {}


class CriticalMultiple(Read):
    """The multiple of a direction at which the loss begins to exceed the model's, if there is one.

    It is on the side on which the loss falls first, -1 for the opposite direction, and there
    between `not_above` and `above`. The sharpness is 2 over its size (arXiv:2601.16979). The
    outcome is crossing, rises (no lower loss was seen) or none (no higher one up to `not_above`).
    """

    outcome: str | None = None
    side: int | None = None
    not_above: float | None = None
    above: float | None = None
    is_narrow: bool | None = None
    multiple: MeasuredMean | None = None
    sharpness: MeasuredMean | None = None


class MeasuredLine(Read):
    """The loss along a direction d, by forward passes; curvature is None below the noise."""

    norm: float | None = None
    step: float | None = None
    rise: float | None = None
    slope: MeasuredMean | None = None
    second_derivative: MeasuredMean | None = None
    curvature: MeasuredMean | None = None
    directional_sharpness: float | None = None
    critical: CriticalMultiple | None = None
    forward_passes: int | None = None


class Critical(Read):
    """The loss along directions at a model: the move from the checkpoint before, and steps."""

    loss: MeasuredMean | None = None
    noise: float | None = None
    directions: dict[str, MeasuredLine] = {}
    forward_passes: int | None = None
    tokens_per_pass: int | None = None


class SlicePoint(Read):
    """A model on the plane, and its loss there."""

    name: str
    x: float
    y: float
    loss: float
    standard_error: float | None = None
    increase: float | None = None
    increase_standard_error: float | None = None
    losses: tuple[float, ...] = ()  # of each sequence


class SliceDirections(Read):
    """The vectors from the base to the other two points."""

    lengths: list[float] = []
    cosine: float | None = None


class SliceGrid(Read):
    """The losses on the plane, row by row of y."""

    x: list[float]
    y: list[float]
    loss: list[list[float]]


class Slice(Read):
    """The loss on a plane through models, or a random one."""

    points: list[SlicePoint] = []
    directions: SliceDirections | None = None
    grid: SliceGrid | None = None


class ProjectedPoint(SlicePoint):
    """A checkpoint's projection on a plane, its distance from there, and both losses.

    Components are of the fitted checkpoints alone. `loss` is that of the projection.
    """

    path: str = ""
    fitted: bool = True
    off_plane: float | None = None
    off_plane_share: float | None = None
    checkpoint_loss: float | None = None


class TrajectoryPlane(Read):
    """The loss on the plane of a trajectory's first two principal components."""

    points: list[ProjectedPoint] = []
    variance_shares: list[float] = []
    grid: SliceGrid | None = None
