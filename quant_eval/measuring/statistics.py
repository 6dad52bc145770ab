"""Figures of paired losses, with intervals over documents and calibration draws.

Shapes: D documents, K calibration draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quant_eval.measuring.bootstrap import CalibrationDraws, Floats, Statistic, resample

if TYPE_CHECKING:  # it brings torch, which comparing results does without
    from quant_eval.measuring.losses import PairedLosses

UNITS = {
    "cross_entropy": "nats per token",
    "cross_entropy_quantized": "nats per token",
    "absolute_error": "nats per token",
    "relative_error": "1 (cross_entropy_quantized / cross_entropy - 1)",
    "kl_divergence": "nats per token",
    "top1_agreement": "1 (share of tokens)",
    "tokens": "predicted tokens",
    "documents": "documents",
    "documents_without_target": "documents",
    "layers": "1 (relative_output_error)",
    "per_document": "nats, sums over the document's tokens; mean over the calibration draws",
    "standard_errors": "those of the figures",
    "calibration": "those of the figures and per_document, for each calibration draw",
}
SAMPLES = 1000  # resamplings of the documents for the intervals
POSITIVE = ("cross_entropy", "cross_entropy_quantized", "kl_divergence")
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
    `bootstrap.Resampled` makes an interval of the two parts. With K = 1 the contribution of the
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
    by_draw = [_fractions_of(draw) for draw in losses]
    statistics, draws, values_of = [], [], {}
    for name, (_, b_D) in by_draw[0].items():
        a_KD = np.stack([figures[name][0] for figures in by_draw])
        statistics.append(Statistic(name, a_KD.mean(0), b_D, logarithmic=name in POSITIVE))
        values_of[name] = a_KD.sum(1) / b_D.sum()
        draws.append(_calibration_draws(a_KD, b_D) if seeds > 1 else None)

    estimates = resample(statistics, draws, samples=samples, seed=seed)
    intervals = {estimate.name: estimate.interval(level) for estimate in estimates}
    low, high = intervals["top1_agreement"]
    intervals["top1_agreement"] = [max(low, 0.0), min(high, 1.0)]  # a share

    return {
        **{estimate.name: estimate.value for estimate in estimates},
        "intervals": intervals,
        "standard_errors": {
            statistic.name: {
                "documents": statistic.standard_error
                * (statistic.value if statistic.logarithmic else 1.0),
                "draws": draw and draw.standard_error,
            }
            for statistic, draw in zip(statistics, draws, strict=True)
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


def _calibration_draws(a_KD: Floats, b_D: Floats) -> CalibrationDraws:
    """Return what the draw adds to the standard error beyond what documents show of it."""
    seeds, num_documents = a_KD.shape
    ratio_K = a_KD.sum(1) / b_D.sum()
    contribution_KD = (a_KD - ratio_K[:, None] * b_D) / b_D.sum()
    departure_KD = contribution_KD - contribution_KD.mean(0)
    interaction = (
        num_documents / (num_documents - 1) * (departure_KD**2).sum() / (seeds * (seeds - 1))
    )
    variance = max(0.0, float(ratio_K.var(ddof=1) / seeds - interaction))
    return CalibrationDraws(variance**0.5, seeds)


def _spread(values_K: Floats) -> dict[str, Any]:
    deviation = float(values_K.std(ddof=1))
    return {
        "values": values_K.tolist(),
        "standard_deviation": deviation,
        "standard_error": deviation / len(values_K) ** 0.5,
    }
