"""Differences between results of the same documents, with intervals, tests and Holm's correction.

Shapes: D documents, K calibration draws.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from base.errors import UserError
from base.statistics import LEAST_DOCUMENTS, Verdict, holm, verdict_of
from ckpt_tools.hf.measured import PerDocument, Quantization
from ckpt_tools.hf.results import Result, labels
from quant_eval.measuring.bootstrap import CalibrationDraws, Floats, Statistic, resample
from quant_eval.measuring.statistics import fractions
from quant_eval.specs import parse_spec

FIGURES = tuple(fractions(*np.ones(5)))
SUMS = ("tokens", "nll", "nll_quantized", "kl", "agreements")
METHOD = (
    "difference of two figures of the same documents: interval and two-sided p-value by symmetric"
    " bootstrap-t; p-values adjusted over all pairs by Holm (1979), intervals not adjusted"
)


class Difference(NamedTuple):
    """Second minus first, in the unit of the figure."""

    value: float
    low: float
    high: float
    p_value: float  # of no difference; two-sided


class Comparison(NamedTuple):
    """One pair of a call.

    Attributes:
        first, second: places of the results in the call.
        sources: of error that the interval covers.
        p_adjusted: by Holm's correction over the pairs of the call.
        verdict: on the second, by the adjusted p-value.
    """

    first: int
    second: int
    first_value: float
    second_value: float
    difference: Difference
    sources: Literal["documents", "documents and calibration draws"]
    p_adjusted: float
    verdict: Verdict


def compare(
    results: Sequence[Result[Quantization]],
    pairs: Sequence[tuple[int, int]],
    figure: str,
    *,
    samples: int,
    level: float,
    seed: int,
) -> list[Comparison]:
    """Compare every pair, with p-values adjusted over all pairs.

    Interval and test are one bootstrap-t of the difference (`bootstrap.Statistic`): both results
    are formed from the same drawn documents, and a p-value is at most 1 - level exactly where the
    interval leaves out 0. What calibration draws add to the error is the standard error of their
    mean. It counts the part that documents show of it too, which is on the wide side: a result does
    not say how the draws moved each document.

    `pairs` are places of two results each, `figure` is one of `FIGURES`. UserError if two results
    are not comparable, or `samples` cannot show any of so many pairs to differ.
    """
    least = math.ceil(len(pairs) / (1 - level) - 1e-9) - 1
    if samples < least:
        raise UserError(
            f"{samples} bootstrap samples cannot show any of {len(pairs)} pairs to differ at level"
            f" {level:g} after Holm's correction; compare fewer results at once"
        )

    # the error of every pair, on the same drawn documents
    names, statistics, draws = labels(results), [], []
    for first, second in pairs:
        try:
            statistics.append(_paired(results[first], results[second], figure))
            draws.append(_draws(results[first], results[second], figure))
        except UserError as error:
            raise UserError(f"{names[first]} and {names[second]}: {error}") from None
    estimates = resample(statistics, draws, samples=samples, seed=seed)

    # verdicts need the p-values of all pairs
    adjusted = holm([estimate.p_value() for estimate in estimates])
    comparisons = []
    for (first, second), statistic, estimate, draw, p in zip(
        pairs, statistics, estimates, draws, adjusted, strict=True
    ):
        (a_D, b_D), (c_D, d_D) = statistic.ratios
        low, high = estimate.interval(level)
        comparisons.append(
            Comparison(
                first,
                second,
                first_value=float(c_D.sum() / d_D.sum()),
                second_value=float(a_D.sum() / b_D.sum()),
                difference=Difference(estimate.value, low, high, estimate.p_value()),
                sources="documents and calibration draws" if draw else "documents",
                p_adjusted=p,
                verdict=verdict_of(estimate.value, p, level),
            )
        )
    return comparisons


def _paired(first: Result[Quantization], second: Result[Quantization], figure: str) -> Statistic:
    """Return the figure of `second` minus that of `first`.

    UserError if the two were measured with different settings.
    """
    evaluations = [result.spec.evaluation for result in (first, second)]
    settings = [
        (evaluation.model_dump() if evaluation else {}) | {"dtype": result.spec.dtype}
        for evaluation, result in zip(evaluations, (first, second), strict=True)
    ]
    for key, value in settings[0].items():
        if value != settings[1].get(key):
            raise UserError(
                f"they were measured with different settings: {key} of the evaluation is"
                f" {value!r:.20} and {settings[1].get(key)!r:.20}; measure one of them again"
            )
    ours, theirs = first.measured.per_document, second.measured.per_document
    if (ours.document, ours.tokens) != (theirs.document, theirs.tokens):
        raise UserError(
            "they hold other documents; measure both with the same --eval and --eval-tokens"
        )
    if len(ours.document) < LEAST_DOCUMENTS:
        raise UserError(
            f"a comparison of {len(ours.document)} documents decides nothing, it needs at least"
            f" {LEAST_DOCUMENTS}; measure both with more --eval-tokens"
        )
    return Statistic(figure, fraction(theirs, figure), fraction(ours, figure))


def fraction(per_document: PerDocument, figure: str) -> tuple[Floats, Floats]:
    """Return numerator and denominator of the figure, each [D]."""
    sums = [np.asarray(getattr(per_document, key), dtype=np.float64) for key in SUMS]
    for key, values_D in zip(SUMS, sums, strict=True):
        if len(values_D) != len(per_document.document) or not np.isfinite(values_D).all():
            raise UserError(f"'{key}' is not finite, or missing, of a document; measure again")
    numerator_D, denominator_D = fractions(*sums)[figure]
    if denominator_D.sum() <= 0:
        raise UserError("there is nothing to divide by, the loss is 0; measure on other text")
    return numerator_D, denominator_D


def drawn_fraction(measured: Quantization, figure: str) -> tuple[Floats, Floats]:
    """Return numerator [D, K] and denominator [D] of the figure, by calibration draw."""
    numerator_D, denominator_D = fraction(measured.per_document, figure)
    if measured.calibration is None:
        return numerator_D[:, None], denominator_D
    drawn = measured.calibration.per_document
    draws = zip(drawn.nll_quantized, drawn.kl, drawn.agreements, strict=True)
    numerators = [
        fraction(
            measured.per_document.model_copy(
                update={"nll_quantized": quantized, "kl": kl, "agreements": agreements}
            ),
            figure,
        )[0]
        for quantized, kl, agreements in draws
    ]
    if not numerators:
        raise UserError("it holds no losses of each calibration draw; measure it again")
    return np.stack(numerators, axis=1), denominator_D


def _draws(
    first: Result[Quantization], second: Result[Quantization], figure: str
) -> CalibrationDraws | None:
    """Return the error that calibration draws add, None for results of a single draw.

    Draw k of both is paired: right where it was the same text for both, and not wrong where it was
    not.
    """
    figures = [_values(result, figure) for result in (first, second)]
    counts = {len(values) for values in figures if values}
    if not counts:
        return None
    if len(counts) > 1 or any(
        not values and parse_spec(result.spec.name).needs_calibration
        for result, values in zip((first, second), figures, strict=True)
    ):
        raise UserError(
            f"they have {len(figures[0]) or 1} and {len(figures[1]) or 1} calibration draws;"
            " measure both with the same --calibration-seeds"
        )
    of_first, of_second = (np.array(values or [0.0]) for values in figures)  # 0: no draw moves it
    moved = of_second - of_first
    return CalibrationDraws(float(np.std(moved, ddof=1)) / math.sqrt(len(moved)), len(moved))


def _values(result: Result[Quantization], figure: str) -> list[float]:
    """Return the figure of every calibration draw, [] for a single draw."""
    calibration = result.measured.calibration
    if calibration is None:
        return []
    of_draws = calibration.figures.get(figure)
    if of_draws is None or not np.isfinite(of_draws.values).all():
        raise UserError(f"one has no {figure} for every calibration draw; measure it again")
    return of_draws.values
