r"""A formula for what quantization costs, by curvature, bits and learning rate.

Rounding to the nearest of b bits moves weight i, which shares its scale with K - 1 others, by
delta_i: uniform over a step s of the grid, so of mean 0 and variance s^2 / 12, and nearly
independent of every other weight's. The step is the range of the group over 2^b - 1, and the range
of K numbers of root mean square m is c_K m. So over the rounding, with the Hessian's blocks H_tt of
the matrices t,

    E[delta' H delta] / 2 = sum_t s_t^2 tr H_tt / 24 = c_K^2 / 24 (2^b - 1)^-2 sum_t m_t^2 tr H_tt

whose sum is the relative trace R (`curvature.trace.hutchinson`). The first order has mean 0. To
second order the KL divergence is delta' F delta / 2 with the Fisher matrix F, which is H where the
model's labels are those of the text (Martens 2020, "New insights on the natural gradient", sections
6 and 9.2). So

    log KL = a + b log R + c log (2^bits - 1)^-2 + d log peak learning rate

where theory has b = c = 1 and d = 0: the learning rate acts through R alone. Groups, and what GPTQ
gains over rounding to the nearest by correlated steps, are in a. The sum over matrices is
HAWQ-V2's (arXiv 1911.03852, equation 3), with the rounding of all checkpoints in place of one.

Shapes: N checkpoints times specs, C terms, U trainings.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamics.mechanism.checkpoints import (
    CheckpointRow,
    Floats,
    checkpoints,
    logarithms,
    loss_of,
    related_specs,
)
from quant_eval.specs import parse_spec
from study.definition import Study
from study.measurements.curvature import RELATIVE, TRACE
from study.measurements.quantization import DIVERGENCE
from study.results.table import Row

BITS, RATE, LOSS = "bits", "learning rate", "loss"
LEAST = 4  # trainings: two to fit by, two to score


class LogLinear(NamedTuple):
    """A model of log KL: terms whose coefficients are fitted, and terms whose coefficient is 1."""

    terms: tuple[str, ...]
    fixed: tuple[str, ...] = ()


FORMULA = LogLinear((RELATIVE.name, BITS, RATE))
SLOPES = {RELATIVE.name: "relative trace", BITS: "(2^bits - 1)^-2", RATE: "learning rate"}
# Fixed beforehand. All others know the bits: they lack the curvature, or the scale of the weights.
MODELS = {
    "formula": FORMULA,
    "theory": LogLinear((), (RELATIVE.name, BITS)),
    "trace": LogLinear((BITS, TRACE.name)),
    "loss": LogLinear((BITS, LOSS)),
    "tokens": LogLinear((BITS, "tokens")),
    "bits alone": LogLinear((BITS,)),
}
BASELINES = ("loss", "tokens", "bits alone")  # that a formula has to beat


class LogLinearFit(NamedTuple):
    """Coefficients by name with their standard errors, from a jackknife over trainings."""

    coefficients: dict[str, float]
    standard_errors: dict[str, float]


class FormulaScore(NamedTuple):
    """The agreement of held-out predictions with what was measured.

    Attributes:
        median_factor: exp of the median of |log(predicted / measured)|.
        r_squared: 1 - sum of squared errors / that around the mean, of logarithms.
    """

    median_factor: float
    r_squared: float


class Observations(NamedTuple):
    """Checkpoints by spec, with the logarithms of what is measured.

    Attributes:
        rows, specs: the checkpoint and the spec of each, [N].
        trainings: whose each is, [N].
        halves: 0 or 1: the half of each, [N].
        target_N: log KL divergence, in nats per token.
        terms: logarithms by name, [N] each.
    """

    rows: list[Row]
    specs: list[str]
    trainings: list[str]
    halves: Floats
    target_N: Floats
    terms: dict[str, Floats]


def observe(study: Study, rows: Sequence[Row]) -> Observations | None:
    """Return all checkpoints at all related specs; None with too few trainings or settings.

    Halves take turns along the order of the settings, so both span them; seeds of one setting are
    in one half. What has no logarithm is left out: a trace that noise takes below 0.
    """
    specs = related_specs(study)
    figures = [DIVERGENCE.of(spec) for spec in specs]
    points = _with_logarithms(study, rows, figures)
    halves = _halves(study, points)
    if len({point.training for point in points}) < LEAST or len(set(halves.values())) < 2:
        return None

    # checkpoints of the first spec, then the same ones of the next
    rows_N = [point.row for _ in specs for point in points]
    specs_N = [spec for spec in specs for _ in points]
    targets = [logarithms([point.row for point in points], figure) for figure in figures]
    return Observations(
        rows_N,
        specs_N,
        [point.training for point in points] * len(specs),
        np.array([halves[point.training] for point in points] * len(specs), dtype=np.float64),
        np.concatenate(targets),
        _terms(study, rows_N, specs_N),
    )


def _with_logarithms(
    study: Study, rows: Sequence[Row], figures: Sequence[str]
) -> list[CheckpointRow]:
    """Return the checkpoints at which every figure and both traces are above 0."""
    # The plain trace too: the models that are compared with the formula take its logarithm.
    positive = (*figures, RELATIVE.name, TRACE.name)
    points = checkpoints(study, rows, *positive, loss_of(study))
    return [point for point in points if all(point.row[name] > 0 for name in positive)]


def _terms(study: Study, rows_N: Sequence[Row], specs_N: Sequence[str]) -> dict[str, Floats]:
    """Return the logarithms of all that a model may have as a term, by name, [N] each."""
    terms = {name: logarithms(rows_N, name) for name in (RELATIVE.name, TRACE.name, "tokens")}
    terms[LOSS] = logarithms(rows_N, loss_of(study))
    terms[RATE] = np.array([math.log(row["peak_lr"] or 1.0) for row in rows_N])
    # The logarithm of (2^bits - 1)^-2, the square of the step at a range of 1.
    terms[BITS] = np.array([-2 * math.log(2 ** parse_spec(spec).bits - 1) for spec in specs_N])
    return terms


def _halves(study: Study, points: Sequence[CheckpointRow]) -> dict[str, int]:
    """Return the half of every training: the place of its setting in the study, even or odd."""
    trainings = {point.training for point in points}
    # Groups are in the order of the study, which a sweep makes that of its values.
    settings = [[run.name for run in group.runs if run.name in trainings] for group in study.groups]
    places = enumerate(names for names in settings if names)
    return {name: number % 2 for number, names in places for name in names}


def fit(data: Observations, model: LogLinear = FORMULA) -> LogLinearFit:
    """Return the least-squares coefficients of a model, with errors over trainings.

    Example: log KL = 1 + 2 x bits, in two trainings.
        >>> bits_N, halves_N = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 1])
        >>> data = Observations([], [], list("aabb"), halves_N, 1 + 2 * bits_N, {BITS: bits_N})
        >>> coefficients = fit(data, LogLinear((BITS,))).coefficients
        >>> round(coefficients["constant"], 4), round(coefficients[BITS], 4)
        (1.0, 2.0)
    """
    trainings = np.array(data.trainings)
    without = [trainings != name for name in dict.fromkeys(data.trainings)]
    parts_UC = np.array([_coefficients(data, model, kept) for kept in without])
    # Jackknife over trainings: (U - 1) / U times the sum of squares around the mean.
    spread_C = ((parts_UC - parts_UC.mean(0)) ** 2).sum(0)
    errors_C = np.sqrt(spread_C * (len(without) - 1) / len(without))
    whole_C = _coefficients(data, model, trainings == trainings)
    labels = ("constant", *model.terms)
    return LogLinearFit(
        *(dict(zip(labels, part_C.tolist(), strict=True)) for part_C in (whole_C, errors_C))
    )


def slopes_text(data: Observations) -> str:
    """Return the slopes of the formula by all trainings, with their standard errors."""
    fitted = fit(data)
    parts = (
        f"{title} {fitted.coefficients[name]:+.2f} ({fitted.standard_errors[name]:.2f})"
        for name, title in SLOPES.items()
    )
    return f"slopes of {', '.join(parts)}"


def predict(data: Observations, model: LogLinear) -> Floats:
    """Return log KL of every observation by the fit to the other half, [N]."""
    predicted_N = np.empty(len(data.target_N))
    for half in (0, 1):
        in_half = data.halves == half
        # Fitted to one half, and predicted for the other.
        coefficients_C = _coefficients(data, model, ~in_half)
        values_N = coefficients_C[0] + _columns(data, model.terms) @ coefficients_C[1:]
        # Only the half that was not fitted is kept.
        predicted_N[in_half] = (values_N + _columns(data, model.fixed).sum(1))[in_half]
    return predicted_N


def errors(data: Observations, model: LogLinear) -> dict[str, float]:
    """Return the mean |log(predicted / measured)| of held-out predictions, by training."""
    sizes_N = np.abs(predict(data, model) - data.target_N)
    names = np.array(data.trainings)
    return {name: float(sizes_N[names == name].mean()) for name in dict.fromkeys(data.trainings)}


def score(data: Observations, model: LogLinear) -> FormulaScore:
    """Return the score of held-out predictions.

    Example: a mean of 1 is predicted for 3, and 3 for 1, so every factor is e^2.
        >>> halves_N = np.array([0, 0, 1, 1])
        >>> data = Observations([], [], list("aabb"), halves_N, 1.0 + 2 * halves_N, {})
        >>> by_mean = score(data, LogLinear(()))
        >>> round(math.log(by_mean.median_factor), 4), round(by_mean.r_squared, 4)
        (2.0, -3.0)
    """
    error_N = predict(data, model) - data.target_N
    around_N = data.target_N - data.target_N.mean()
    return FormulaScore(
        math.exp(float(np.median(np.abs(error_N)))),
        1 - float(error_N @ error_N) / float(around_N @ around_N),
    )


def _columns(data: Observations, names: Sequence[str]) -> Floats:
    columns = [data.terms[name] for name in names]
    return np.stack(columns, axis=1) if columns else np.zeros((len(data.target_N), 0))


def _coefficients(data: Observations, model: LogLinear, own_N: NDArray[np.bool_]) -> Floats:
    """Return the constant and the slopes by some observations.

    The slope of a term that does not vary, as bits do not in a study of one spec, is 0.
    """
    terms_NC = _columns(data, model.terms)[own_N]
    # Fixed terms have the coefficient 1: they are taken off the target before the fit.
    target_N = (data.target_N - _columns(data, model.fixed).sum(1))[own_N]
    means_C = terms_NC.mean(0)
    centred_N = target_N - target_N.mean()
    # Centred, a term that does not vary is 0: lstsq gives it the slope of least norm, 0.
    slopes_C = np.linalg.lstsq(terms_NC - means_C, centred_N, rcond=None)[0]
    # The constant of terms that are not centred.
    return np.concatenate([[target_N.mean() - means_C @ slopes_C], slopes_C])
