"""Traces of the Hessian, whole, by block and by tensor, from random probes (Hutchinson 1990).

For v with independent entries of mean 0 and variance 1, E[v'Hv] = tr H, and E[v_t'(Hv)_t] = tr H_tt
for every tensor t: the traces of all tensors come with the same products. With signs (Rademacher)
the variance is least among such v, 2 (|H|_F^2 - sum h_ii^2) for a fixed H (Avron and Toledo 2011).

Microbatches and probes are drawn together, so the spread of the values holds the noise of both.
The two companions, Gauss-Newton and Fisher, take a gradient of a microbatch in the place of a
product.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from base.errors import UserError
from base.progress import Progress
from curvature.products.exact import Quadratic, streamed
from curvature.products.parameters import Parameters, Probe, block_of, dot, is_norm
from curvature.products.sharing import Sharing
from curvature.settings import HutchinsonSettings
from curvature.subject import CurvatureSubject
from curvature.trace.estimates import MeanEstimate, estimate_mean
from curvature.trace.gauss_newton import fisher_loss, ggn_loss

# An independent sample of a quadratic form, such as v'Hv of a fresh pair of v and microbatch. An
# index gives the same sample on every rank.
Sample = Callable[[int], Quadratic]


class TraceEstimate(NamedTuple):
    """Traces of the Hessian of the mean loss, and the loss of the same microbatches.

    In nats per token per squared parameter unit. Two checkpoints measured on the same microbatches
    with the same probes are compared value by value, by what is per microbatch.
    """

    total: MeanEstimate
    blocks: dict[str, MeanEstimate]
    tensors: dict[str, MeanEstimate]
    loss: MeanEstimate
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


def measure_traces(subject: CurvatureSubject, settings: HutchinsonSettings) -> dict[str, Any]:
    """Return the loss and all traces, ready for JSON."""
    parameters = subject.hessian.parameters
    names = list(parameters.weights)
    norms = [name for name in names if is_norm(name)]

    def estimate(label: str, sample: Sample, pairs: int) -> TraceEstimate:
        with Progress(label, total=pairs) as progress:
            return estimate_trace(
                sample,
                names,
                pairs=pairs,
                sharing=subject.sharing,
                level=settings.level,
                on_pair=progress.advance,
            )

    def of_hessian(index: int, only: list[str] | None = None) -> Quadratic:
        """Return v'Hv of pair i: probe i, restricted to the tensors `only`, on microbatch i."""
        return subject.hessian.probed(subject.microbatch(index), Probe(settings.seed, index, only))

    def of_gradient(criterion: Any, index: int) -> Quadratic:
        """Return N |g_t|^2 by tensor, with g the gradient of a criterion's mean over N tokens."""
        tokens_BS1 = subject.microbatch(index)
        drawn = functools.partial(criterion, seed=settings.seed, microbatch=index)
        objective = subject.model.loss(tokens_BS1, drawn)
        squares = streamed(parameters, objective.share, lambda _, gradient: dot(gradient, gradient))
        # g is of the mean over N tokens, so |N g|^2 / N = N |g|^2 is the sample.
        num_tokens = tokens_BS1[:, 1:].numel()
        scaled = {name: num_tokens * square for name, square in squares.items()}
        return Quadratic(objective.value, 0.0, scaled)

    # the Hessian, whole and by block and tensor
    trace = estimate("trace", of_hessian, settings.pairs)
    sizes = parameters.block_sizes()
    measured: dict[str, Any] = {
        "loss": trace.loss.mean,
        "loss_standard_error": trace.loss.standard_error,
        "trace": trace.total._asdict()
        | {"probes": settings.pairs, "microbatches": settings.pairs}
        | {"per_microbatch": trace.per_microbatch},
        "block_traces": {
            name: block._asdict()
            | {"parameters": sizes[name], "per_microbatch": trace.blocks_per_microbatch[name]}
            for name, block in trace.blocks.items()
        },
        "tensor_traces": {name: tensor._asdict() for name, tensor in trace.tensors.items()},
        "relative_trace": _relative(trace, parameters, settings.level),
    }

    if norms:
        # Norms are few entries with large curvature, which the other entries' noise would drown.
        of_norms = functools.partial(of_hessian, only=norms)
        norm_figures = estimate("norm traces", of_norms, settings.norm_pairs)
        measured["norm_traces"] = {
            "total": norm_figures.total._asdict(),
            "tensors": {name: norm_figures.tensors[name]._asdict() for name in norms},
            "probes": settings.norm_pairs,
        }

    # the companions, from gradients instead of products
    for name, criterion in (("gauss_newton_trace", ggn_loss), ("fisher_trace", fisher_loss)):
        of_squares = functools.partial(of_gradient, criterion)
        companion = estimate(name.replace("_", " "), of_squares, settings.companion_pairs)
        measured[name] = companion.total._asdict() | {
            "blocks": {block: each._asdict() for block, each in companion.blocks.items()},
            "microbatches": settings.companion_pairs,
        }
    return measured


def _relative(trace: TraceEstimate, parameters: Parameters, level: float) -> dict[str, Any]:
    """Return sum_t m_t tr H_tt over the decoder blocks' matrices, m_t the mean square of t.

    Twice the second-order increase of the loss, in nats per token, where independent noise as large
    as the root mean square of its matrix moves every weight. Rounding is such noise, times a factor
    that the bits decide. Unlike the trace it does not depend on the scale of weights that a norm
    undoes: the unit of the parameters is gone.
    """
    squares, values = parameters.mean_squares(), trace.tensors_per_microbatch
    names = parameters.matrices()
    sums = [
        math.fsum(squares[name] * values[name][microbatch] for name in names)
        for microbatch in range(len(trace.per_microbatch))
    ]
    return estimate_mean(sums, level=level)._asdict() | {"per_microbatch": sums}
