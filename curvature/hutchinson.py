"""The trace of the Hessian and of its diagonal blocks from random probes (Hutchinson 1990).

For v with independent entries of mean 0 and variance 1, E[v'Hv] = tr H, and E[v_b'(Hv)_b] = tr H_bb for every block b:
block traces come with the same products. With signs (Rademacher) the variance is least among such v.

Shapes: B sequences, S positions of a sequence.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from curvature.olmo2 import HessianProduct
from curvature.parameters import Parameters


class Estimate(NamedTuple):
    """A mean over pairs and its standard error, s / sqrt(number of pairs)."""

    mean: float
    standard_error: float


class TraceEstimate(NamedTuple):
    """Trace of the Hessian of the mean loss per token, whole and by block, and the loss over the same microbatches.

    Attributes:
        per_pair: v'Hv of every pair, in their order; the total is their mean.
    """

    total: Estimate
    blocks: dict[str, Estimate]
    loss: Estimate
    per_pair: list[float]


def _estimate(values: list[float]) -> Estimate:
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def estimate_trace(
    product: Callable[[Tensor, Tensor], HessianProduct],
    parameters: Parameters,
    microbatches: Iterable[Tensor],
    *,
    seed: int,
    on_pair: Callable[[float], None],
) -> TraceEstimate:
    """Pairs microbatch j (int64 [B, S + 1], all of one size) with probe j of the seed: two pairs or more.

    Probe and microbatch are drawn together and afresh, so the pairs are independent and their spread holds the noise of
    both; many probes on one batch would hide the batch's, which is the larger. `on_pair` is told each pair's v'Hv.
    """
    dots: list[dict[str, float]] = []
    losses: list[float] = []
    for index, tokens_BS1 in enumerate(microbatches):
        v_P = parameters.probe(seed, index)
        result = product(tokens_BS1, v_P)
        dots.append(parameters.block_dots(v_P, result.hv_P))
        losses.append(result.loss)
        on_pair(sum(dots[-1].values()))
    per_pair = [sum(pair.values()) for pair in dots]
    blocks = {name: _estimate([pair[name] for pair in dots]) for name in dots[0]}
    return TraceEstimate(_estimate(per_pair), blocks, _estimate(losses), per_pair)
