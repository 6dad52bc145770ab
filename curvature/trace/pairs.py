"""Traces of a model from pairs of a probe and a microbatch: the Hessian's, and its two companions.

The Gauss-Newton and Fisher traces take a gradient of a microbatch in the place of a product.
"""

import functools
import math
from typing import Any

from base.progress import Progress
from curvature.products.exact import Quadratic, streamed
from curvature.products.parameters import Parameters, Probe, dot, is_norm
from curvature.settings import HutchinsonSettings
from curvature.subject import Subject
from curvature.trace.estimates import estimate_mean
from curvature.trace.gauss_newton import fisher_loss, ggn_loss
from curvature.trace.hutchinson import Sample, TraceEstimate, estimate_trace


def measure_traces(subject: Subject, settings: HutchinsonSettings) -> dict[str, Any]:
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
        own = estimate("norm traces", of_norms, settings.norm_pairs)
        measured["norm_traces"] = {
            "total": own.total._asdict(),
            "tensors": {name: own.tensors[name]._asdict() for name in norms},
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
