"""Differences between measured results: paired over documents, with intervals, tests and Holm's correction.

Shapes: D documents, K calibration draws.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field

from ckpt_tools.holm import holm
from quant_eval.bootstrap import CalibrationDraws, Floats, Resampled, Statistic, resample
from quant_eval.methods import METHODS, MethodName
from quant_eval.statistics import fractions
from train.command import UserError

FIGURES = tuple(fractions(*np.ones(5)))
SUMS = ("tokens", "nll", "nll_quantized", "kl", "agreements")
METHOD = (
    "difference of two figures of the same documents: interval and two-sided p-value by symmetric bootstrap-t; "
    "p-values adjusted over all pairs by Holm (1979), intervals not adjusted"
)
PerDocument = Mapping[str, Sequence[float]]


class Evaluation(BaseModel):
    """The text of a result and how it was cut."""

    sha256: str
    sequence_length: int
    documents: str


class Spec(BaseModel):
    """The settings of a result that decide what it may be compared with."""

    name: str
    method: MethodName
    dtype: str
    evaluation: Evaluation


class Values(BaseModel):
    """A figure, per calibration draw."""

    values: list[float] = Field(min_length=2)


class Calibration(BaseModel):
    """The figures by name."""

    figures: dict[str, Values]


class Measured(BaseModel):
    """What a comparison reads of the figures."""

    per_document: dict[str, list[float]]
    calibration: Calibration | None


class Model(BaseModel):
    """Which model."""

    path: str


class Result(BaseModel):
    """What a comparison reads of a result.json."""

    model: Model
    spec: Spec
    measured: Measured


class Difference(NamedTuple):
    """Second minus first, in the unit of the figure."""

    value: float
    low: float
    high: float
    p_value: float  # of no difference; two-sided


class Comparison(NamedTuple):
    """One pair of a call."""

    first: int
    second: int
    first_value: float
    second_value: float
    difference: Difference
    sources: Literal["documents", "documents and calibration draws"]  # of error that the interval covers
    p_adjusted: float  # Holm, over the pairs of the call
    verdict: Literal["higher", "lower", "not told apart"]  # the second, by the adjusted p-value


def compare_losses(
    first: PerDocument,
    second: PerDocument,
    figure: str,
    *,
    samples: int,
    level: float,
    seed: int,
    draws: Sequence[float] = (),
) -> Difference:
    """How far the figure of `second` lies above that of `first`.

    Interval and test are one bootstrap-t of the difference (`bootstrap.Statistic`): both results are formed from the
    same drawn documents, and the p-value is at most 1 - level exactly where the interval leaves out 0.

    Args:
        first: `measured["per_document"]` of a result.
        second: of another one, of the same documents.
        figure: one of `FIGURES`.
        samples: resamples of the documents.
        level: coverage of the interval.
        seed: of the bootstrap.
        draws: second minus first for each calibration draw, if there were several; what the draws add to the error is
            the standard error of their mean. It counts the part that documents show of it too, which is on the
            wide side: a result does not say how the draws moved each document.

    Raises:
        UserError: the results are not of the same documents, are damaged, or are too few for the level.
    """
    statistic = _statistic(first, second, figure)
    (resampled,) = resample([statistic], [_spread(draws)], samples=samples, seed=seed)
    return _difference(resampled, level)


def compare(
    results: Sequence[Result],
    pairs: Sequence[tuple[int, int]],
    figure: str,
    *,
    samples: int,
    level: float,
    seed: int,
) -> list[Comparison]:
    """Every pair as `compare_losses` has it, with p-values adjusted over all of them.

    Raises:
        UserError: two results are not comparable, or `samples` cannot show any of so many pairs to differ.
    """
    least = math.ceil(len(pairs) / (1 - level) - 1e-9) - 1
    if samples < least:
        raise UserError(
            f"{samples} bootstrap samples cannot tell any of {len(pairs)} pairs apart at level {level:g} after Holm's "
            f"correction; give --samples {least} or more"
        )
    statistics, draws = [], []
    for first, second in pairs:
        _check_settings(results[first], results[second])
        documents = (results[first].measured.per_document, results[second].measured.per_document)
        try:
            statistics.append(_statistic(*documents, figure))
        except UserError as error:
            raise UserError(f"{_label(results[first])} and {_label(results[second])}: {error}") from None
        draws.append(_draws(results[first], results[second], figure))
    resampled = resample(statistics, [_spread(one) for one in draws], samples=samples, seed=seed)
    differences = [_difference(one, level) for one in resampled]
    adjusted = holm([difference.p_value for difference in differences])
    compared = []
    for (first, second), statistic, difference, draw, p in zip(
        pairs, statistics, differences, draws, adjusted, strict=True
    ):
        (a_D, b_D), (c_D, d_D) = statistic.ratios
        apart = p <= 1 - level
        compared.append(
            Comparison(
                first,
                second,
                first_value=float(c_D.sum() / d_D.sum()),
                second_value=float(a_D.sum() / b_D.sum()),
                difference=difference,
                sources="documents and calibration draws" if draw else "documents",
                p_adjusted=p,
                verdict=("higher" if difference.value > 0 else "lower") if apart else "not told apart",
            )
        )
    return compared


def _label(result: Result) -> str:
    return f"{Path(result.model.path).name} {result.spec.name}"


def _difference(resampled: Resampled, level: float) -> Difference:
    low, high = resampled.interval(level)
    return Difference(resampled.value, low, high, resampled.p_value())


def _statistic(first: PerDocument, second: PerDocument, figure: str) -> Statistic:
    """The figure of `second` minus that of `first`."""
    for key in ("document", *SUMS):
        if key not in first or key not in second:
            raise UserError(f"'{key}' of per_document is missing; measure again with 'python -m quant_eval run'")
    if list(first["document"]) != list(second["document"]):
        raise UserError("they hold other documents; measure both with the same --eval and --eval-tokens")
    if list(first["tokens"]) != list(second["tokens"]):
        raise UserError("their documents have other numbers of tokens; measure both on the same --eval")
    if len(first["document"]) < 2:
        raise UserError("a paired comparison needs at least 2 documents; measure both on more text")
    return Statistic(figure, _fraction(second, figure), _fraction(first, figure))


def _fraction(per_document: PerDocument, figure: str) -> tuple[Floats, Floats]:
    """Numerator and denominator of the figure, each [D]."""
    sums = [np.asarray(per_document[key], dtype=np.float64) for key in SUMS]
    for key, values_D in zip(SUMS, sums, strict=True):
        if len(values_D) != len(per_document["document"]):
            raise UserError(f"'{key}' does not have a value for every document; measure again")
        if not np.isfinite(values_D).all():
            raise UserError(f"'{key}' of a document is not finite; measure again")
    numerator_D, denominator_D = fractions(*sums)[figure]
    if denominator_D.sum() <= 0:
        raise UserError("there is nothing to divide by, the loss is 0; measure on other text")
    return numerator_D, denominator_D


def _check_settings(first: Result, second: Result) -> None:
    """UserError naming the first setting of the evaluation in which two results differ."""
    pair = [result.spec.evaluation.model_dump() | {"dtype": result.spec.dtype} for result in (first, second)]
    for key, value in pair[0].items():
        if value != pair[1][key]:
            raise UserError(
                f"{_label(first)} and {_label(second)} were measured with different settings: {key} of the evaluation "
                f"is {value!r:.20} and {pair[1][key]!r:.20}; measure one of them again"
            )


def _draws(first: Result, second: Result, figure: str) -> list[float]:
    """Differences of the figure per calibration draw; none where each result has a single draw.

    Draw k of both is paired: right where it was the same text for both, and not wrong where it was not.
    """
    given = [_values(result, figure) for result in (first, second)]
    counts = {len(values) for values in given if values}
    if not counts:
        return []
    if len(counts) > 1 or any(
        not values and METHODS[result.spec.method].needs_calibration
        for result, values in zip((first, second), given, strict=True)
    ):
        raise UserError(
            f"{_label(first)} and {_label(second)} have {len(given[0]) or 1} and {len(given[1]) or 1} calibration "
            f"draws; measure both with the same --calibration-seeds"
        )
    of_first, of_second = (np.array(values or [0.0]) for values in given)  # 0: no draw moves it
    return list((of_second - of_first).tolist())


def _values(result: Result, figure: str) -> list[float]:
    """The figure of every calibration draw; empty for a single one."""
    calibration = result.measured.calibration
    if calibration is None:
        return []
    if figure not in calibration.figures or not np.isfinite(calibration.figures[figure].values).all():
        raise UserError(f"{_label(result)} has no {figure} for every calibration draw; measure it again")
    return calibration.figures[figure].values


def _spread(draws: Sequence[float]) -> CalibrationDraws | None:
    if not draws:
        return None
    if len(draws) == 1:
        raise UserError("one calibration draw says nothing of how draws vary; give two or more, or none")
    return CalibrationDraws(float(np.std(draws, ddof=1)) / math.sqrt(len(draws)), len(draws))
