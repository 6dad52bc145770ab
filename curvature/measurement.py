"""From an HF directory and a spec to the content of result.json.

Shapes: p parameters of this rank.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_tools.ranks import Ranks
from curvature.exact import streamed
from curvature.memory import check_room, guard_bytes
from curvature.model import Criterion
from curvature.opened import Opened, open_model
from curvature.parameters import Probe, block_of, dot, is_norm
from curvature.settings import (
    CurvatureSettings,
    FixedTraceSettings,
    HutchinsonSettings,
    LanczosSettings,
    PowerSettings,
)
from curvature.spectrum.density import SpectralDensity, density
from curvature.spectrum.lanczos import Product, lanczos
from curvature.spectrum.power import power_iteration
from curvature.spectrum.top_vector import save_top_vector, warm_start
from curvature.trace.gauss_newton import fisher_loss, ggn_loss
from curvature.trace.hutch_plus_plus import hutch_plus_plus
from curvature.trace.hutchinson import Quadratic, TraceEstimate, estimate_mean, estimate_trace
from curvature.trace.xtrace import xtrace
from train.command import Progress

START_PROBE = -1  # Lanczos and power iteration start from a probe that no pair uses
TRACE_UNIT = "nats per token per squared parameter unit"
UNITS = {
    "loss": "nats per token",
    "trace, block_traces, tensor_traces, norm_traces, gauss_newton_trace, fisher_trace": TRACE_UNIT,
    "lambda_max.value, eigenvalues, density.nodes": TRACE_UNIT,
    "residual": "relative to the eigenvalue",
    "density.squared_norm": f"({TRACE_UNIT}) squared",
    "guard": "relative differences",
}


class TopVector(NamedTuple):
    """The handling of top eigenvectors beside measuring them.

    Attributes:
        start: directory of a result whose vector the iteration starts from; None: a probe.
        keep: directory that takes the vector found.
    """

    start: Path | None = None
    keep: Path | None = None


FROM_A_PROBE = TopVector()


class Clock:
    """Seconds of the parts of a measurement, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds what happens meanwhile."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def needed_sequences(settings: CurvatureSettings) -> int:
    """Sequences of the text that a measurement reads."""
    if isinstance(settings, HutchinsonSettings):
        microbatches = max(
            settings.pairs // settings.probes_per_microbatch, settings.norm_pairs, settings.companion_pairs
        )
        fixed = settings.fixed_sequences if settings.lambda_max else 0
        return max(microbatches * settings.microbatch_sequences, fixed)
    return max(settings.fixed_sequences, settings.microbatch_sequences)


def measure(
    hf_dir: Path, settings: CurvatureSettings, data_prefix: Path, ranks: Ranks, top_vector: TopVector = FROM_A_PROBE
) -> dict[str, Any]:
    """The content of result.json. Reads the model and the text, writes nothing but the top vector where it is kept.

    Raises:
        UserError: model, text, settings and ranks do not fit, a loss is not finite, or the guard refuses.
    """
    clock = Clock()
    with clock.time("guard"):
        opened = open_model(hf_dir, settings, data_prefix, ranks, needed=needed_sequences(settings))
    entries = opened.hessian.parameters.size // (ranks.size if settings.sharding == "fsdp" else 1)
    place = torch.device("cpu") if settings.vectors == "host" else ranks.device
    check_room(settings, entries, place, guard_bytes(place))
    if isinstance(settings, HutchinsonSettings):
        measured = _from_pairs(opened, settings, top_vector, clock)
    else:
        measured = _on_fixed_batch(opened, settings, top_vector, clock)
    return opened.result(measured | {"units": UNITS}, {"name": settings.name}, clock.seconds)


def _from_pairs(opened: Opened, settings: HutchinsonSettings, top_vector: TopVector, clock: Clock) -> dict[str, Any]:
    """Traces from fresh pairs, and lambda_max on the fixed batch if it is asked for."""
    names = opened.hessian.parameters.weights.keys()
    norms = [name for name in names if is_norm(name)]

    def probed(index: int, share: int, only: list[str] | None) -> Quadratic:
        return opened.hessian.probed(opened.microbatch(index // share), Probe(settings.seed, index, only))

    def companion(index: int, criterion: Any) -> Quadratic:
        return _gradient_squares(opened, index, functools.partial(criterion, seed=settings.seed, microbatch=index))

    def estimate(label: str, evaluate: Callable[[int], Quadratic], pairs: int) -> TraceEstimate:
        with clock.time(label), Progress(label, total=pairs) as progress:
            return estimate_trace(
                lambda indices: opened.sharing.quadratics(evaluate, indices, names, progress.advance),
                pairs=pairs,
                probes_per_microbatch=settings.probes_per_microbatch if label == "trace" else 1,
                relative_error=settings.relative_error if label == "trace" else None,
                block_of=block_of,
                level=settings.level,
            )

    trace = estimate("trace", lambda index: probed(index, settings.probes_per_microbatch, None), settings.pairs)
    measured = _trace(trace, opened)
    if norms:
        own = estimate("norm traces", lambda index: probed(index, 1, norms), settings.norm_pairs)
        measured["norm_traces"] = {
            "total": own.total._asdict(),
            "tensors": {name: own.tensors[name]._asdict() for name in norms},
            "probes": own.probes,
        }
    for name, criterion in (("gauss_newton_trace", ggn_loss), ("fisher_trace", fisher_loss)):
        found = estimate(
            name.replace("_", " "), functools.partial(companion, criterion=criterion), settings.companion_pairs
        )
        measured[name] = found.total._asdict() | {
            "blocks": {block: one._asdict() for block, one in found.blocks.items()},
            "microbatches": found.microbatches,
        }
    if not settings.lambda_max:
        return measured
    return measured | _spectrum(opened, settings, top_vector, clock, largest=1, smallest=0)


def _gradient_squares(opened: Opened, index: int, criterion: Criterion) -> Quadratic:
    """N |g_t|^2 of every tensor t, where g is the gradient of the criterion's mean over the N tokens."""
    tokens_BS1 = opened.microbatch(index)
    num_tokens = tokens_BS1[:, 1:].numel()
    objective = opened.model.loss(tokens_BS1, criterion)
    squares = streamed(opened.hessian.parameters, objective.share, lambda _, gradient: dot(gradient, gradient))
    return Quadratic(objective.value, 0.0, {name: num_tokens * square for name, square in squares.items()})


def _trace(trace: TraceEstimate, opened: Opened) -> dict[str, Any]:
    sizes = opened.hessian.parameters.block_sizes()
    return {
        "loss": trace.loss.mean,
        "loss_standard_error": trace.loss.standard_error,
        "trace": trace.total._asdict()
        | {"probes": trace.probes, "microbatches": trace.microbatches, "reached": trace.reached}
        | {"per_microbatch": trace.per_microbatch},
        "block_traces": {
            name: block._asdict() | {"parameters": sizes[name], "per_microbatch": trace.blocks_per_microbatch[name]}
            for name, block in trace.blocks.items()
        },
        "tensor_traces": {name: tensor._asdict() for name, tensor in trace.tensors.items()},
    }


class _Fixed(NamedTuple):
    """The fixed batch as an operator."""

    product: Product
    start_p: Tensor


def _fixed(opened: Opened, sequences: int, progress: Progress) -> _Fixed:
    parameters = opened.hessian.parameters
    product = opened.sharing.mean_product(opened.hessian, opened.fixed(sequences), progress.advance)
    return _Fixed(product, parameters.probe(Probe(opened.settings.seed, START_PROBE)))


def _spectrum(
    opened: Opened,
    settings: HutchinsonSettings | FixedTraceSettings | LanczosSettings,
    top_vector: TopVector,
    clock: Clock,
    *,
    largest: int,
    smallest: int,
) -> dict[str, Any]:
    """lambda_max and, of lanczos, the eigenvalues of both ends."""
    parameters, ranks, told = opened.hessian.parameters, opened.sharing.ranks, dict[str, Any]()
    total = settings.max_iterations + largest + smallest
    with clock.time("lambda_max"), Progress("eigenvalues, at most", total=total) as progress:
        product, start_p = _fixed(opened, settings.fixed_sequences, progress)
        if top_vector.start:
            start_p, told["warm_start"] = warm_start(top_vector.start, parameters, start_p)
        spectrum = lanczos(
            product,
            start_p,
            parameters.inner,
            largest=largest,
            smallest=smallest,
            tolerance=settings.tolerance,
            max_iterations=settings.max_iterations,
        )
    if top_vector.keep:
        told["top_vector_sha256"] = save_top_vector(top_vector.keep, parameters, ranks, spectrum.top_vector_p)
    found = {"lambda_max": spectrum.largest[0]._asdict() | {"iterations": spectrum.iterations} | told}
    if isinstance(settings, LanczosSettings):
        ends = {"largest": spectrum.largest, "smallest": spectrum.smallest}
        found["eigenvalues"] = {end: [pair._asdict() for pair in pairs] for end, pairs in ends.items()}
    return found


def _on_fixed_batch(
    opened: Opened,
    settings: FixedTraceSettings | LanczosSettings | PowerSettings,
    top_vector: TopVector,
    clock: Clock,
) -> dict[str, Any]:
    """What is measured on the fixed batch alone; of other text its errors say nothing."""
    parameters, level = opened.hessian.parameters, settings.level
    loss = opened.sharing.mean_loss(opened.model, opened.fixed(settings.fixed_sequences))

    def probe(index: int) -> Tensor:
        return parameters.probe(Probe(settings.seed, index))

    measured: dict[str, Any] = {"loss": loss}
    if isinstance(settings, PowerSettings):
        with clock.time("trace"), Progress("trace", total=settings.probes) as progress:
            product = _fixed(opened, settings.fixed_sequences, progress).product
            values = []
            for index in range(settings.probes):
                v_p = probe(index)
                values.append(float(parameters.inner(v_p[None], product(v_p))))
        measured["trace"] = estimate_mean(values, level=level)._asdict() | {"probes": settings.probes}
        with clock.time("lambda_max"), Progress("lambda_max, at most", total=settings.max_iterations) as progress:
            fixed = _fixed(opened, settings.fixed_sequences, progress)
            found = power_iteration(
                fixed.product,
                fixed.start_p,
                parameters.inner,
                tolerance=settings.tolerance,
                max_iterations=settings.max_iterations,
            )
        top = found.pair._asdict() | {"iterations": found.iterations, "rule_met": found.rule_met}
        return measured | {"lambda_max": top}
    if isinstance(settings, FixedTraceSettings):
        with clock.time("trace"), Progress("trace", total=settings.products) as progress:
            estimator = hutch_plus_plus if settings.name == "hutch++" else xtrace
            fixed = _fixed(opened, settings.fixed_sequences, progress)
            trace = estimator(fixed.product, probe, parameters.inner, matvecs=settings.products)
        measured["trace"] = trace._asdict() | {"probes": trace.matvecs}
        if not settings.lambda_max:
            return measured
        ends = {"largest": 1, "smallest": 0}
    else:
        with clock.time("density"), Progress("density", total=settings.starts * settings.steps) as progress:
            fixed = _fixed(opened, settings.fixed_sequences, progress)
            found_density = density(
                fixed.product,
                (probe(index) for index in range(settings.starts)),
                parameters.inner,
                num_parameters=parameters.size,
                steps=settings.steps,
            )
        measured |= _density(found_density)
        ends = {"largest": settings.largest, "smallest": settings.smallest}
    return measured | _spectrum(opened, settings, top_vector, clock, **ends)


def _density(found: SpectralDensity) -> dict[str, Any]:
    return {
        "trace": found.trace._asdict() | {"probes": len(found.nodes)},
        "density": {
            "nodes": found.nodes,
            "weights": found.weights,
            "squared_norm": found.squared_norm._asdict(),
            "negative": found.negative._asdict(),
            "products": found.products,
        },
    }
