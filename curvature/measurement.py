"""Curvature of one model: from an HF directory and settings to the content of result.json.

Traces are of fresh microbatches, eigenvalues and the spectral density of one fixed batch.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base.progress import Progress
from base.ranks import Ranks
from curvature.cost.memory import check_room, work_of
from curvature.products.parameters import Probe
from curvature.settings import CurvatureSettings, HutchinsonSettings, LanczosSettings
from curvature.spectrum.density import density
from curvature.spectrum.lanczos import Product, Spectrum, lanczos
from curvature.subject import CurvatureSubject, open_model
from curvature.trace.estimates import TRACE_UNIT
from curvature.trace.hutchinson import measure_traces

START_PROBE = -1  # Lanczos starts from a probe that no pair uses
UNITS = {
    "loss": "nats per token",
    "trace, block_traces, tensor_traces, norm_traces, gauss_newton_trace, fisher_trace": TRACE_UNIT,
    "relative_trace": "nats per token",
    "lambda_max.value, eigenvalues, density.nodes": TRACE_UNIT,
    "residual": "relative to the eigenvalue",
    "density.squared_norm": f"({TRACE_UNIT}) squared",
    "guard": "relative differences",
}


def needed_sequences(settings: CurvatureSettings) -> int:
    """Return the sequences of the text that a measurement reads."""
    if not isinstance(settings, HutchinsonSettings):
        # The fixed batch, and the microbatch that the guard reads.
        return max(settings.fixed_sequences, settings.microbatch_sequences)
    # Every figure starts from microbatch 0 again, so the longest one decides.
    microbatches = max(settings.pairs, settings.norm_pairs, settings.companion_pairs)
    fixed = settings.fixed_sequences if settings.lambda_max else 0
    return max(microbatches * settings.microbatch_sequences, fixed)


def measure(
    hf_dir: Path, settings: CurvatureSettings, data_prefix: Path, ranks: Ranks
) -> dict[str, Any]:
    """Return the content of result.json, without writing it.

    Raises:
        UserError: model, text, settings and ranks do not fit, a loss is not finite, or the guard
            refuses.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "guard"):
        subject = open_model(
            hf_dir, settings, data_prefix, ranks, needed=needed_sequences(settings)
        )
    vectors = [(work_of(settings).vectors, subject.entries)]
    check_room(settings, vectors, subject.hessian.parameters.device)
    if isinstance(settings, HutchinsonSettings):
        with _timed(seconds, "traces"):
            measured = measure_traces(subject, settings)
        if settings.lambda_max:
            with _timed(seconds, "lambda_max"):
                spectrum = _extreme(subject, settings, largest=1, smallest=0)
                measured["lambda_max"] = _top(spectrum)
    else:
        with _timed(seconds, "spectrum"):
            measured = measure_spectrum(subject, settings)
    return subject.result(measured | {"units": UNITS}, {"name": settings.name}, seconds)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Record the seconds that the context lasts."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def measure_spectrum(subject: CurvatureSubject, settings: LanczosSettings) -> dict[str, Any]:
    """Return loss, density, and eigenvalues of both ends."""
    parameters = subject.hessian.parameters
    loss = subject.sharing.mean_loss(subject.model, subject.fixed(settings.fixed_sequences))
    with Progress("density", total=settings.starts * settings.steps) as progress:
        spread = density(
            _product(subject, settings, progress),
            # Each is drawn when its turn comes: a list would hold all of them in memory.
            (parameters.probe(Probe(settings.seed, index)) for index in range(settings.starts)),
            parameters.inner,
            num_parameters=parameters.size,
            steps=settings.steps,
        )

    ends = {"largest": settings.largest, "smallest": settings.smallest}
    spectrum = _extreme(subject, settings, **ends)

    return {
        "loss": loss,
        "trace": spread.trace._asdict() | {"probes": settings.starts},
        "density": {
            "nodes": spread.nodes,
            "weights": spread.weights,
            "squared_norm": spread.squared_norm._asdict(),
            "negative": spread.negative._asdict(),
            "products": sum(map(len, spread.nodes)),
        },
        "lambda_max": _top(spectrum),
        "eigenvalues": {end: [pair._asdict() for pair in getattr(spectrum, end)] for end in ends},
    }


def _extreme(
    subject: CurvatureSubject,
    settings: CurvatureSettings,
    *,
    largest: int,
    smallest: int,
) -> Spectrum:
    parameters, total = subject.hessian.parameters, settings.max_iterations + largest + smallest
    with Progress("eigenvalues, at most", total=total) as progress:
        return lanczos(
            _product(subject, settings, progress),
            parameters.probe(Probe(settings.seed, START_PROBE)),
            parameters.inner,
            largest=largest,
            smallest=smallest,
            tolerance=settings.tolerance,
            max_iterations=settings.max_iterations,
        )


def _product(subject: CurvatureSubject, settings: CurvatureSettings, progress: Progress) -> Product:
    batches = subject.fixed(settings.fixed_sequences)
    return subject.sharing.mean_product(subject.hessian, batches, progress.advance)


def _top(spectrum: Spectrum) -> dict[str, Any]:
    return spectrum.largest[0]._asdict() | {"iterations": spectrum.iterations}
