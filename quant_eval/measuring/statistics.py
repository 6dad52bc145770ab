"""The figures of a result with their intervals: a symmetric bootstrap-t over documents.

Shapes: D documents, K calibration draws, S bootstrap samples, R samples drawn at once, P columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from base.errors import UserError

if TYPE_CHECKING:  # it brings torch, which comparing results does without
    from quant_eval.measuring.losses import PairedLosses

UNITS = {
    "cross_entropy": "nats per token",
    "cross_entropy_quantized": "nats per token",
    "absolute_error": "nats per token",
    "relative_error": "1 (cross_entropy_quantized / cross_entropy - 1)",
    "kl_divergence": "nats per token",
    "top1_agreement": "1 (share of tokens)",
    "r_l": "1 (|q - h|^2 / |h|^2 after the last block, mean over tokens)",
    "tokens": "predicted tokens",
    "documents": "documents",
    "documents_without_target": "documents",
    "layers": "1 (relative_output_error)",
    "per_document": "nats, sums over the document's tokens; mean over the calibration draws",
    "standard_errors": "those of the figures",
    "calibration": "those of the figures and per_document, for each calibration draw",
}
SAMPLES = 1000  # resamplings of the documents for the intervals
R_L = "r_l"  # see `quant_eval.measuring.losses.relative_change`
POSITIVE = ("cross_entropy", "cross_entropy_quantized", "kl_divergence", R_L)
COUNTS_AT_ONCE = 1 << 21  # of how often each document was drawn; 16 MiB
Floats = NDArray[np.float64]
METHOD = "symmetric bootstrap-t paired over documents, losses and divergence on the log scale"


def fractions(
    tokens: Any, nll: Any, nll_quantized: Any, kl: Any, agreements: Any
) -> dict[str, tuple[Any, Any]]:
    """Return numerator and denominator of every figure, sums over tokens (numbers or arrays).

    Args:
        tokens: predicted tokens.
        nll: nats of the full-precision model.
        nll_quantized: nats of the quantized model.
        kl: KL(full || quantized), nats.
        agreements: tokens on which the most likely token is the same.

    Example: a loss of 2 nats per token rises by 5%.
        >>> figures = fractions(tokens=10, nll=20.0, nll_quantized=21.0, kl=0.5, agreements=9)
        >>> figures["absolute_error"], figures["relative_error"], figures["kl_divergence"]
        ((1.0, 10), (1.0, 20.0), (0.5, 10))
    """
    return {
        "cross_entropy": (nll, tokens),
        "cross_entropy_quantized": (nll_quantized, tokens),
        "absolute_error": (nll_quantized - nll, tokens),
        "relative_error": (nll_quantized - nll, nll),
        "kl_divergence": (kl, tokens),
        "top1_agreement": (agreements, tokens),
    }


def figures_of(
    losses: list[PairedLosses], *, samples: int, level: float, seed: int
) -> dict[str, Any]:
    """Return figures with their intervals, from losses of one quantization per calibration draw.

    Each figure is the mean over the K draws, which is the figure of the mean losses: no denominator
    depends on the draw. Its documents and its draws are crossed, so its variance is

        documents + max(0, draws - interaction)

    (Searle, Casella and McCulloch 1992, chapter 4: a balanced two-way layout without replication),
    where `documents` is the linearised variance of the mean losses, `draws` the variance between
    the K figures over K, and `interaction` what of both is the same: the linearised variance of
    each draw's departure from the mean losses, summed over draws and divided by K (K - 1).
    `Resampled` makes an interval of the two parts. With K = 1 the contribution of the
    draw is unknown: "calibration" is null and the intervals are over documents only.

    Args:
        losses: of the same documents and full-precision model, one for each draw.
        samples: resamplings of the documents.
        level: coverage of the intervals.
        seed: of the resamplings.

    Returns:
        The `measured` part of a result, ready for JSON; units in `UNITS`.

    Raises:
        UserError: no interval of this level can be formed from these documents.
    """
    first, seeds = losses[0], len(losses)
    assert all(
        np.array_equal(draw.tokens, first.tokens) and np.array_equal(draw.nll, first.nll)
        for draw in losses
    )

    # every figure of the mean losses, and its error from the draws
    by_draw = [_fractions_of(draw) | {R_L: (draw.changes, draw.tokens)} for draw in losses]
    statistics, draws, values_of = [], [], {}
    for name, (_, b_D) in by_draw[0].items():
        # Denominators are those of the first draw, since no draw changes them.
        a_KD = np.stack([figures[name][0] for figures in by_draw])
        statistics.append(Statistic(name, a_KD.mean(0), b_D, logarithmic=name in POSITIVE))
        values_of[name] = a_KD.sum(1) / b_D.sum()
        draws.append(_error_of_draws(a_KD, b_D) if seeds > 1 else None)

    # R_L is alone: another column in the product with the counts may round the others otherwise.
    estimates = [
        estimate
        for some in (slice(-1), slice(-1, None))
        for estimate in resample(
            statistics[some], draws[some], num_draws=seeds, samples=samples, seed=seed
        )
    ]
    intervals = {estimate.name: estimate.interval(level) for estimate in estimates}
    low, high = intervals["top1_agreement"]
    intervals["top1_agreement"] = [max(low, 0.0), min(high, 1.0)]  # a share

    return {
        **{estimate.name: estimate.value for estimate in estimates},
        "intervals": intervals,
        "standard_errors": {
            statistic.name: {
                # From the log scale back to the unit of the figure, by its derivative.
                "documents": statistic.standard_error
                * (statistic.value if statistic.logarithmic else 1.0),
                "draws": error_of_draws,
            }
            for statistic, error_of_draws in zip(statistics, draws, strict=True)
        },
        "interval": {
            "level": level,
            "method": METHOD,
            "samples": samples,
            "seed": seed,
            "units_resampled": "documents" if seeds == 1 else "documents and calibration draws",
        },
        "calibration": (
            {
                "seeds": seeds,
                "figures": {name: _spread(values_K) for name, values_K in values_of.items()},
            }
            if seeds > 1
            else None
        ),
    }


def _fractions_of(losses: PairedLosses) -> dict[str, tuple[Floats, Floats]]:
    return fractions(losses.tokens, losses.nll, losses.nll_quantized, losses.kl, losses.agreements)


def _error_of_draws(a_KD: Floats, b_D: Floats) -> float:
    """Return what the draw adds to the standard error beyond what documents show of it."""
    seeds, num_documents = a_KD.shape
    ratio_K = a_KD.sum(1) / b_D.sum()
    # The linearised ratio: what each document adds to its error, to first order.
    contribution_KD = (a_KD - ratio_K[:, None] * b_D) / b_D.sum()
    # What is left without the part that all draws share is the interaction of document and draw.
    departure_KD = contribution_KD - contribution_KD.mean(0)
    interaction = (
        num_documents / (num_documents - 1) * (departure_KD**2).sum() / (seeds * (seeds - 1))
    )
    variance = max(0.0, float(ratio_K.var(ddof=1) / seeds - interaction))
    standard_error: float = variance**0.5
    return standard_error


def _spread(values_K: Floats) -> dict[str, Any]:
    deviation = float(values_K.std(ddof=1))
    return {
        "values": values_K.tolist(),
        "standard_deviation": deviation,
        "standard_error": deviation / len(values_K) ** 0.5,
    }


class Statistic:
    """A ratio of sums over documents.

    The standard error is that of the linearised ratio with every document's residual divided by 1 -
    its share of sum(b), which is what leaving that document out would show (the jackknife;
    MacKinnon and White 1985, HC3): variance = sum_i [(a_i - R b_i) / (1 - b_i / sum(b))]^2 /
    sum(b)^2. Without the division a long document hides its own error. In a resample the shares are
    kept, so that all its sums are products with the counts.

    Attributes:
        value: the statistic of all documents.
        standard_error: on the scale of the interval.
        columns_DP: what has to be summed over a resample for `studentize`.

    Example: the mean of 1, 2 and 3; residuals of -1, 0 and 1, over 1 - 1/3, and so sqrt(4.5) / 3.
        >>> mean = Statistic("mean", np.array([1.0, 2.0, 3.0]), np.ones(3))
        >>> mean.value, round(mean.standard_error, 4)
        (2.0, 0.7071)
    """

    def __init__(self, name: str, a_D: Floats, b_D: Floats, *, logarithmic: bool = False) -> None:
        total = b_D.sum()
        share_D = b_D / total
        # Residuals are divided by 1 - share.
        if share_D.max() >= 1:
            raise UserError(
                f"{name}: one document holds all of what it is relative to; evaluate more documents"
            )
        self.name = name
        self.value = float(a_D.sum() / total)

        # the variance of any resample follows from sums of these columns over its documents
        residual_D = a_D - self.value * b_D
        error_D, weight_D = residual_D / (1 - share_D), b_D / (1 - share_D)
        self.columns_DP = np.stack(
            [b_D, residual_D, error_D * error_D, error_D * weight_D, weight_D * weight_D], axis=1
        )

        variance = float(((1 / total * error_D) ** 2).sum())
        # Without variance the interval is the value alone, which needs no logarithm.
        self.logarithmic = logarithmic and variance > 0
        if self.logarithmic and self.value <= 0:
            raise UserError(
                f"{name} is {self.value:.3g}, lost in rounding; evaluate with --dtype fp32 or more"
                " text"
            )
        self.standard_error = math.sqrt(variance) / (self.value if self.logarithmic else 1)

    def studentize(self, sums_SP: Floats, num_documents: int) -> Floats:
        """Return (statistic of a resample - statistic) / standard error of the resample.

        One part in D + 1 of the resample's variance is the sample's: in a resample of few different
        documents, or of documents that agree, its own comes close to 0.
        """
        if self.standard_error == 0:
            return np.zeros(len(sums_SP))
        total_S, residual_S, errors_S, mixed_errors_S, weights_S = sums_SP.T
        deviation_S: Floats = residual_S / total_S
        # Errors in a resample of deviation d are (e - d w) / total. The square is expanded, so that
        # sums of the columns are enough.
        scale_S, slope_S = 1 / total_S, -deviation_S / total_S
        variance_S = scale_S * scale_S * errors_S
        variance_S += 2 * scale_S * slope_S * mixed_errors_S
        variance_S += slope_S * slope_S * weights_S
        np.maximum(variance_S, 0, out=variance_S)  # rounding
        if self.logarithmic:
            # log(R* / R); a resample whose ratio is not positive is infinitely far below.
            relative_S = np.maximum(1 + deviation_S / self.value, 0)
            is_positive_S = relative_S > 0
            safe_S = np.where(is_positive_S, relative_S, 1)
            deviation_S = np.where(is_positive_S, np.log(safe_S), -np.inf)
            # The delta method: var(log R) = var(R) / R^2.
            variance_S /= (safe_S * self.value) ** 2
        shared_S = (num_documents * variance_S + self.standard_error**2) / (num_documents + 1)
        studentized_S: Floats = deviation_S / np.sqrt(shared_S)
        return studentized_S


@dataclass(frozen=True)
class Resampled:
    """A statistic with the distribution of its error.

    The error of the documents is the standard error times a studentised deviation of a resample.
    The error of the calibration draw, where there were K of them, is its standard error times a
    Student t of K - 1 degrees of freedom. Their sum is drawn as often as documents were resampled:
    the Behrens-Fisher solution (Fisher 1935) for an error with two sources, one of which was seen
    only K times.

    Attributes:
        value: the statistic.
        error_S: its error on the scale of the interval, without sign.
        logarithmic: whether that scale is the logarithm.
    """

    name: str
    value: float
    error_S: Floats
    logarithmic: bool

    def interval(self, level: float) -> list[float]:
        """Return [low, high] around the value, by the quantile of the error without sign.

        Symmetric intervals (Hall 1988, "On symmetric bootstrap confidence intervals") miss their
        level by a term of order 1 / D^2; equal-tailed bootstrap-t, BCa and percentile intervals by
        one of order 1 / D.

        Raises:
            UserError: too few samples for the level, or an error that is not finite.

        Example: the 90th of 99 errors.
            >>> Resampled("loss", 5.0, np.arange(1.0, 100.0) / 45, logarithmic=False).interval(0.9)
            [3.0, 7.0]
        """
        samples = len(self.error_S)
        # The slack undoes what floating point adds to a whole number, as in 0.07 x 100.
        rank = math.ceil(level * (samples + 1) - 1e-9)
        if rank > samples:
            raise UserError(
                f"{samples} bootstrap samples are too few for an interval of level {level:g}; take "
                f"{math.ceil(level / (1 - level))} or more"
            )
        half_width = float(np.partition(self.error_S, rank - 1)[rank - 1])
        with np.errstate(over="ignore"):
            factor = float(np.exp(half_width)) if self.logarithmic else 1.0
        if not math.isfinite(half_width * factor):
            raise UserError(
                f"{self.name} has no interval on these documents; evaluate more of them"
            )
        if self.logarithmic:
            return [self.value / factor, self.value * factor]
        return [self.value - half_width, self.value + half_width]


def resample(
    statistics: Sequence[Statistic],
    errors_of_draws: Sequence[float | None],
    *,
    num_draws: int,
    samples: int,
    seed: int,
) -> list[Resampled]:
    """Draw documents with replacement, the same ones for every statistic, and studentise each.

    Bootstrap-t: Efron and Tibshirani 1993, section 12.5; every sample draws as many documents as
    there are.

    Args:
        statistics: of the same documents.
        errors_of_draws: for each statistic, the standard error of its mean over calibration
            draws; None: documents are all that varies.
        num_draws: K, of calibration draws.
        samples: how often documents are drawn.
        seed: of the draws.

    Example: the mean of 0 to 39, -+ about twice its standard error of 1.87.
        >>> mean = Statistic("mean", np.arange(40.0), np.ones(40))
        >>> (resampled,) = resample([mean], [None], num_draws=1, samples=999, seed=0)
        >>> [round(end, 1) for end in resampled.interval(0.95)]
        [15.8, 23.2]
    """
    # all columns side by side, so that one product sums those of every statistic
    columns_DP = np.concatenate([statistic.columns_DP for statistic in statistics], axis=1)
    ends = np.cumsum([statistic.columns_DP.shape[1] for statistic in statistics])
    num_documents = len(columns_DP)

    # the studentised deviations, in pieces that bound the memory
    generator = np.random.default_rng(seed)
    t_of = [np.empty(samples) for _ in statistics]
    rows = max(1, COUNTS_AT_ONCE // num_documents)
    for start in range(0, samples, rows):
        size = min(rows, samples - start)
        drawn_RD = generator.integers(num_documents, size=(size, num_documents))
        # An offset for each sample gives it bins of its own, so that one bincount counts for all.
        drawn_RD += np.arange(size)[:, None] * num_documents
        counts_RD = np.bincount(drawn_RD.ravel(), minlength=drawn_RD.size).reshape(drawn_RD.shape)
        sums_RP = counts_RD.astype(np.float64) @ columns_DP
        for statistic, t_S, end in zip(statistics, t_of, ends, strict=True):
            columns_RP = sums_RP[:, end - statistic.columns_DP.shape[1] : end]
            t_S[start : start + size] = statistic.studentize(columns_RP, num_documents)

    # the part of the calibration draws, independent of the documents
    resampled = []
    for statistic, error_of_draws, t_S in zip(statistics, errors_of_draws, t_of, strict=True):
        error_S = statistic.standard_error * t_S
        if error_of_draws is not None:
            scale = statistic.value if statistic.logarithmic else 1.0
            # Seeded alike for every statistic, so that all have the same draws, as they have the
            # same documents.
            draws = np.random.default_rng((seed, num_draws))
            student_S = draws.standard_t(num_draws - 1, size=samples)
            error_S = error_S + error_of_draws / scale * student_S
        resampled.append(
            Resampled(statistic.name, statistic.value, np.abs(error_S), statistic.logarithmic)
        )
    return resampled
