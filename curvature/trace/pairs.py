"""Traces of a model from pairs of a probe and a microbatch: the Hessian's, and its two companions.

The Gauss-Newton and Fisher traces take a gradient of a microbatch in the place of a product.
"""

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

from base.progress import Progress
from curvature.opened import Opened
from curvature.products.exact import streamed
from curvature.products.interface import Quadratic
from curvature.products.model import Criterion
from curvature.products.parameters import Probe, block_of, dot, is_norm
from curvature.settings import HutchinsonSettings
from curvature.trace.gauss_newton import fisher_loss, ggn_loss
from curvature.trace.hutchinson import Operator, TraceEstimate, estimate_trace


class ProbedHessian(NamedTuple):
    """v'Hv of pair i: probe i on microbatch i, the probe restricted to some tensors if asked to."""

    opened: Opened
    names: Collection[str]
    only: list[str] | None = None

    def quadratic(self, index: int) -> Quadratic:
        """Return one product's."""
        probe = Probe(self.opened.settings.seed, index, self.only)
        return self.opened.hessian.probed(self.opened.microbatch(index), probe)


class GradientSquares(NamedTuple):
    """N |g_t|^2 by tensor t, with g the gradient of a criterion's mean over the N tokens."""

    opened: Opened
    names: Collection[str]
    criterion: Any

    def quadratic(self, index: int) -> Quadratic:
        """Return one gradient's."""
        opened, tokens_BS1 = self.opened, self.opened.microbatch(index)
        criterion: Criterion = functools.partial(
            self.criterion, seed=opened.settings.seed, microbatch=index
        )
        objective = opened.model.loss(tokens_BS1, criterion)
        squares = streamed(
            opened.hessian.parameters, objective.share, lambda _, gradient: dot(gradient, gradient)
        )
        num_tokens = tokens_BS1[:, 1:].numel()
        scaled = {name: num_tokens * square for name, square in squares.items()}
        return Quadratic(objective.value, 0.0, scaled)


def measure_traces(opened: Opened, settings: HutchinsonSettings) -> dict[str, Any]:
    """Return the loss and all traces, ready for JSON."""
    names = opened.hessian.parameters.weights.keys()
    norms = [name for name in names if is_norm(name)]

    def estimate(label: str, operator: Operator, pairs: int) -> TraceEstimate:
        with Progress(label, total=pairs) as progress:
            return estimate_trace(
                operator,
                pairs=pairs,
                sharing=opened.sharing,
                block_of=block_of,
                level=settings.level,
                on_pair=progress.advance,
            )

    trace = estimate("trace", ProbedHessian(opened, names), settings.pairs)
    measured = _described(trace, opened, settings.pairs)
    if norms:
        # Norms are few entries with large curvature, which the other entries' noise would drown.
        of_norms = ProbedHessian(opened, names, norms)
        own = estimate("norm traces", of_norms, settings.norm_pairs)
        measured["norm_traces"] = {
            "total": own.total._asdict(),
            "tensors": {name: own.tensors[name]._asdict() for name in norms},
            "probes": settings.norm_pairs,
        }
    for name, criterion in (("gauss_newton_trace", ggn_loss), ("fisher_trace", fisher_loss)):
        squares = GradientSquares(opened, names, criterion)
        companion = estimate(name.replace("_", " "), squares, settings.companion_pairs)
        measured[name] = companion.total._asdict() | {
            "blocks": {block: each._asdict() for block, each in companion.blocks.items()},
            "microbatches": settings.companion_pairs,
        }
    return measured


def _described(trace: TraceEstimate, opened: Opened, pairs: int) -> dict[str, Any]:
    sizes = opened.hessian.parameters.block_sizes()
    return {
        "loss": trace.loss.mean,
        "loss_standard_error": trace.loss.standard_error,
        "trace": trace.total._asdict()
        | {"probes": pairs, "microbatches": pairs, "per_microbatch": trace.per_microbatch},
        "block_traces": {
            name: block._asdict()
            | {"parameters": sizes[name], "per_microbatch": trace.blocks_per_microbatch[name]}
            for name, block in trace.blocks.items()
        },
        "tensor_traces": {name: tensor._asdict() for name, tensor in trace.tensors.items()},
    }
