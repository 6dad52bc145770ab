"""Figures of paired losses and their intervals by a bootstrap over documents.

Shapes: D documents, S bootstrap samples.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant_eval.losses import PairedLosses

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
    "per_document": "nats, sums over the document's tokens",
}
METHOD = "percentile bootstrap paired over documents"


def ratios(tokens: Any, nll: Any, nll_quantized: Any, kl: Any) -> dict[str, Any]:
    """Every figure that has an interval, from sums over documents (numbers, or one per bootstrap sample)."""
    return {
        "cross_entropy": nll / tokens,
        "cross_entropy_quantized": nll_quantized / tokens,
        "absolute_error": (nll_quantized - nll) / tokens,
        "relative_error": nll_quantized / nll - 1,
        "kl_divergence": kl / tokens,
    }


def bootstrap_intervals(losses: PairedLosses, samples: int, level: float, seed: int) -> dict[str, list[float]]:
    """Percentile intervals [low, high] (Efron and Tibshirani 1993, section 13.3) of the figures of `ratios`.

    Each sample draws D documents with replacement, the same ones for both models, and forms the ratio of the sums:
    documents differ in length, so a mean of ratios would estimate something else.
    """
    stacked_4D = np.stack([losses.tokens, losses.nll, losses.nll_quantized, losses.kl])
    num_documents = stacked_4D.shape[1]
    generator = np.random.default_rng(seed)
    sums_4S: NDArray[np.float64] = np.empty((4, samples))
    for sample in range(samples):
        drawn_D = generator.integers(num_documents, size=num_documents)
        sums_4S[:, sample] = stacked_4D[:, drawn_D].sum(1)
    tails = [(1 - level) / 2, (1 + level) / 2]
    return {name: np.quantile(values_S, tails).tolist() for name, values_S in ratios(*sums_4S).items()}
