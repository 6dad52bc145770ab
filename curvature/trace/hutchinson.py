"""Traces of the Hessian, whole, by block and by tensor, from random probes (Hutchinson 1990).

For v with independent entries of mean 0 and variance 1, E[v'Hv] = tr H, and E[v_t'(Hv)_t] = tr H_tt
for every tensor t: the traces of all tensors come with the same products. With signs (Rademacher)
the variance is least among such v, 2 (|H|_F^2 - sum h_ii^2) for a fixed H (Avron and Toledo 2011).

Microbatches and probes are drawn together, so the spread of the values holds the noise of both.
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from base.errors import UserError
from curvature.products.exact import Quadratic
from curvature.products.parameters import block_of
from curvature.products.sharing import Sharing
from curvature.trace.estimates import Estimate, estimate_mean

# An independent sample of a quadratic form, such as v'Hv of a fresh pair of v and microbatch. An
# index gives the same sample on every rank.
Sample = Callable[[int], Quadratic]


class TraceEstimate(NamedTuple):
    """Traces of the Hessian of the mean loss, and the loss of the same microbatches.

    In nats per token per squared parameter unit. Two checkpoints measured on the same microbatches
    with the same probes are compared value by value, by what is per microbatch.
    """

    total: Estimate
    blocks: dict[str, Estimate]
    tensors: dict[str, Estimate]
    loss: Estimate
    per_microbatch: list[float]
    blocks_per_microbatch: dict[str, list[float]]
    tensors_per_microbatch: dict[str, list[float]]


def estimate_trace(
    sample: Sample,
    names: Collection[str],
    *,
    pairs: int,
    sharing: Sharing,
    level: float = 0.95,
    on_pair: Callable[[], None] = lambda: None,
) -> TraceEstimate:
    """Return the means of samples 0..pairs-1, one of each microbatch, on every rank.

    Args:
        sample: returns a sample by its index.
        names: of the parameter tensors, in the order of `dots`.
        pairs: two or more.
        sharing: the ranks that share the samples out.
        level: coverage of the intervals.
        on_pair: called after every sample.

    Raises:
        UserError: a sample is not finite.

    Example: H = [[2, 1], [1, 3]]; v = (1, 1) and (1, -1) give 7 and 3, in the mean tr H = 5.
        >>> from base.ranks import ALONE
        >>> dots = [{"a": 3.0, "b": 4.0}, {"a": 1.0, "b": 2.0}]
        >>> sample = lambda index: Quadratic(loss=0.0, slope=0.0, dots=dots[index])
        >>> trace = estimate_trace(sample, ["a", "b"], pairs=2, sharing=Sharing(ALONE, False))
        >>> trace.total.mean, trace.total.standard_error, trace.tensors["b"].mean
        (5.0, 2.0, 3.0)
    """
    samples = sharing.quadratics(sample, pairs, names, on_pair)
    for index, (loss, slope, dots) in enumerate(samples):
        if not all(map(math.isfinite, (loss, slope, *dots.values()))):
            raise UserError(
                f"pair {index}: loss {loss} or its derivatives are not finite; give a checkpoint"
                " that is"
            )
    tensors = {name: [each.dots[name] for each in samples] for name in names}
    members: dict[str, list[list[float]]] = {}
    for name, values in tensors.items():
        members.setdefault(block_of(name), []).append(values)
    blocks = {block: _sums(columns) for block, columns in members.items()}
    total = _sums(list(tensors.values()))
    return TraceEstimate(
        total=estimate_mean(total, level=level),
        blocks={block: estimate_mean(values, level=level) for block, values in blocks.items()},
        tensors={name: estimate_mean(values, level=level) for name, values in tensors.items()},
        loss=estimate_mean([each.loss for each in samples], level=level),
        per_microbatch=total,
        blocks_per_microbatch=blocks,
        tensors_per_microbatch=tensors,
    )


def _sums(columns: list[list[float]]) -> list[float]:
    """Return the sum over the columns, microbatch by microbatch."""
    return [math.fsum(values) for values in zip(*columns, strict=True)]
