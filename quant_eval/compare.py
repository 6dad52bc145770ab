"""Differences between results of the same documents, with intervals, tests and Holm's correction.

Every difference of two or more models, here and in a study, is one weighted sum of ratios whose
error `quant_eval.estimate` takes apart by document, calibration draw and seed.

Shapes: S seeds, D documents, K calibration draws.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from base.errors import UserError
from base.statistics import INTERVAL_LEVEL, LEAST_DOCUMENTS, Verdict, holm, verdict_of
from ckpt_tools.hf.measured import PerDocument, Quantization
from ckpt_tools.hf.results import Result, labels
from quant_eval.estimate import DRAWS, Crossed, Floats, contrast_of, estimate_of
from quant_eval.measuring.statistics import fractions
from quant_eval.specs import parse_spec

FIGURES = tuple(fractions(*np.ones(5)))
SUMS = ("tokens", "nll", "nll_quantized", "kl", "agreements")
METHOD = (
    "difference of two figures of the same documents: interval and two-sided p-value by Student's t"
    " of jackknife pseudo-values over documents and calibration draws, which are crossed; p-values"
    " adjusted over all pairs by Holm (1979), intervals not adjusted"
)

Term = tuple[float, Result[Quantization]]  # a weight, and the result whose figure it multiplies


class FigureDifference(NamedTuple):
    """Second minus first, in the unit of the figure."""

    value: float
    low: float
    high: float
    p_value: float  # of no difference; two-sided


class ModelComparison(NamedTuple):
    """One pair of a call.

    Attributes:
        first, second: indices of the results in the call.
        sources: of error that the interval covers.
        p_adjusted: by Holm's correction over the pairs of the call.
        verdict: on the second, by the adjusted p-value.
    """

    first: int
    second: int
    first_value: float
    second_value: float
    difference: FigureDifference
    sources: Literal["documents", "documents and calibration draws"]
    p_adjusted: float
    verdict: Verdict


def compare(
    results: Sequence[Result[Quantization]], pairs: Sequence[tuple[int, int]], figure: str
) -> list[ModelComparison]:
    """Compare every pair, with p-values adjusted over all pairs.

    `pairs` are indices of two results, `figure` is one of `FIGURES`. Calibration draw k of both is
    paired: right where it was the same text for both, and not wrong where it was not.

    Raises:
        UserError: two results are not comparable.
    """
    estimates = [
        estimate_of(crossed([[(-1.0, results[first]), (1.0, results[second])]], figure))
        for first, second in pairs
    ]

    # verdicts need the p-values of all pairs
    adjusted = holm([estimate.p_value() for estimate in estimates])
    return [
        ModelComparison(
            first,
            second,
            first_value=_value(results[first], figure),
            second_value=_value(results[second], figure),
            difference=FigureDifference(estimate.value, *estimate.interval(), estimate.p_value()),
            sources=(
                "documents and calibration draws" if DRAWS in estimate.sources else "documents"
            ),
            p_adjusted=p,
            verdict=verdict_of(estimate.value, p, INTERVAL_LEVEL),
        )
        for (first, second), estimate, p in zip(pairs, estimates, adjusted, strict=True)
    ]


def crossed(replicates: Sequence[Sequence[Term]], figure: str) -> Crossed:
    """Return a weighted sum of a figure of several models by seed, document and draw.

    Each replicate holds the models of one seed, with their weights. The sum of ratios C_sk = sum_r
    w_r sum(a_r) / sum(b_r), over documents, of seed s and calibration draw k is taken apart into
    documents by jackknife pseudo-values (Tukey 1958): D C_sk - (D - 1) C_sk without the document,
    which are the documents' own values where all models share the numbers of tokens and those are
    equal.

    Raises:
        UserError: the results are of few documents, or were measured on other documents, with other
            settings or with other numbers of calibration draws.
    """
    results = [result for terms in replicates for _, result in terms]
    _check_comparable(results)
    contrasts = [
        contrast_of(
            [(weight, *_drawn_fraction(result.measured, figure)) for weight, result in terms]
        )
        for terms in replicates
    ]
    return Crossed(
        np.stack([pseudo_DK for _, pseudo_DK in contrasts]),
        value=float(np.mean([contrast_K.mean() for contrast_K, _ in contrasts])),
        tokens_D=np.asarray(results[0].measured.per_document.tokens, dtype=np.float64),
    )


def _check_comparable(results: Sequence[Result[Quantization]]) -> None:
    """Raise UserError for few documents, other settings or other numbers of calibration draws."""
    first = results[0]
    documents = len(first.measured.per_document.document)
    if documents < LEAST_DOCUMENTS:
        raise UserError(
            f"{first.model.path} was evaluated on {documents} documents, which decide nothing;"
            f" measure on more tokens (eval_tokens) until there are {LEAST_DOCUMENTS}"
        )
    shared, drawn = _shared_settings(first), first
    for result in results[1:]:
        for key, value in _shared_settings(result).items():
            _check_equal(key, (first, shared.get(key)), (result, value))
        if _num_draws(drawn) is None:
            # A method without calibration fits any number of draws; the first with it sets one.
            drawn = result
        elif _num_draws(result) is not None:
            key = "the number of calibration draws"
            _check_equal(key, (drawn, _num_draws(drawn)), (result, _num_draws(result)))


def _check_equal(
    key: str, one: tuple[Result[Quantization], Any], other: tuple[Result[Quantization], Any]
) -> None:
    """Raise UserError where a setting differs between two results."""
    (first, expected), (second, value) = one, other
    if value == expected:
        return
    names = labels([first, second])
    values = (
        "" if isinstance(value, list) and len(value) > 1 else f" ({expected!r:.20}, {value!r:.20})"
    )
    raise UserError(
        f"{names[0]} and {names[1]} differ in {key}{values}; move one of the results away and"
        " measure it again"
    )


def _shared_settings(result: Result[Quantization]) -> dict[str, Any]:
    """Return the settings that evaluations share if they can be compared, by name."""
    evaluation = {"sha256": None} | dict(result.spec.evaluation or ())
    per_document = result.measured.per_document
    return {
        "the text": evaluation.pop("sha256"),
        "dtype": result.spec.dtype,
        **evaluation,
        "the documents": per_document.document,
        "the documents' numbers of tokens": per_document.tokens,
    }


def _num_draws(result: Result[Quantization]) -> int | None:
    """Return the number of calibration draws; None of a method that reads no calibration text."""
    calibration = result.measured.calibration
    if calibration is None:
        return 1 if parse_spec(result.spec.name).needs_calibration else None
    return len(calibration.per_document.kl)


def _fraction(per_document: PerDocument, figure: str) -> tuple[Floats, Floats]:
    """Return numerator and denominator of the figure, each [D]."""
    sums = [np.asarray(getattr(per_document, key), dtype=np.float64) for key in SUMS]
    for key, values_D in zip(SUMS, sums, strict=True):
        if len(values_D) != len(per_document.document) or not np.isfinite(values_D).all():
            raise UserError(f"'{key}' is not finite, or missing, of a document; measure again")
    numerator_D, denominator_D = fractions(*sums)[figure]
    if denominator_D.sum() <= 0:
        raise UserError("there is nothing to divide by, the loss is 0; measure on other text")
    return numerator_D, denominator_D


def _drawn_fraction(measured: Quantization, figure: str) -> tuple[Floats, Floats]:
    """Return numerator [D, K] and denominator [D] of the figure, by calibration draw."""
    numerator_D, denominator_D = _fraction(measured.per_document, figure)
    if measured.calibration is None:
        # One column, which broadcasts over the draws of other results.
        return numerator_D[:, None], denominator_D
    drawn = measured.calibration.per_document
    draws = zip(drawn.nll_quantized, drawn.kl, drawn.agreements, strict=True)
    numerators = [
        _fraction(
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


def _value(result: Result[Quantization], figure: str) -> float:
    numerator_D, denominator_D = _fraction(result.measured.per_document, figure)
    return float(numerator_D.sum() / denominator_D.sum())
