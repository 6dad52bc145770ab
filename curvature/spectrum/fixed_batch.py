"""Eigenvalues and spectral density of the Hessian of a fixed batch; other text has its own.

Shapes: p parameters of this rank.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from base.progress import Progress
from curvature.opened import Opened
from curvature.products.parameters import Probe
from curvature.settings import HutchinsonSettings, LanczosSettings
from curvature.spectrum.density import density
from curvature.spectrum.lanczos import Product, Spectrum, lanczos
from curvature.spectrum.top_vector import save_top_vector, warm_start

START_PROBE = -1  # Lanczos starts from a probe that no pair uses


def measure_top(
    opened: Opened, settings: HutchinsonSettings, directory: Path | None
) -> dict[str, Any]:
    """Return lambda_max; `directory` takes its vector where that is kept."""
    parameters, more = opened.hessian.parameters, dict[str, Any]()
    start_p = parameters.probe(Probe(settings.seed, START_PROBE))
    if settings.warm_start:
        start_p, more["warm_start"] = warm_start(settings.warm_start, parameters, start_p)
    spectrum = _extreme(opened, settings, start_p, largest=1, smallest=0)
    if settings.keep_top_vector and directory:
        more["top_vector_sha256"] = save_top_vector(
            directory, parameters, opened.sharing.ranks, spectrum.top_vector_p
        )
    return {"lambda_max": _top(spectrum) | more}


def measure_spectrum(opened: Opened, settings: LanczosSettings) -> dict[str, Any]:
    """Return loss, density, and eigenvalues of both ends."""
    parameters = opened.hessian.parameters
    loss = opened.sharing.mean_loss(opened.model, opened.fixed(settings.fixed_sequences))
    with Progress("density", total=settings.starts * settings.steps) as progress:
        spread = density(
            _product(opened, settings, progress),
            (parameters.probe(Probe(settings.seed, index)) for index in range(settings.starts)),
            parameters.inner,
            num_parameters=parameters.size,
            steps=settings.steps,
        )
    start_p = parameters.probe(Probe(settings.seed, START_PROBE))
    ends = {"largest": settings.largest, "smallest": settings.smallest}
    spectrum = _extreme(opened, settings, start_p, **ends)
    return {
        "loss": loss,
        "trace": spread.trace._asdict() | {"probes": settings.starts},
        "density": {
            "nodes": spread.nodes,
            "weights": spread.weights,
            "squared_norm": spread.squared_norm._asdict(),
            "negative": spread.negative._asdict(),
            "products": spread.products,
        },
        "lambda_max": _top(spectrum),
        "eigenvalues": {end: [pair._asdict() for pair in getattr(spectrum, end)] for end in ends},
    }


def _extreme(
    opened: Opened,
    settings: HutchinsonSettings | LanczosSettings,
    start_p: Tensor,
    *,
    largest: int,
    smallest: int,
) -> Spectrum:
    total = settings.max_iterations + largest + smallest
    with Progress("eigenvalues, at most", total=total) as progress:
        return lanczos(
            _product(opened, settings, progress),
            start_p,
            opened.hessian.parameters.inner,
            largest=largest,
            smallest=smallest,
            tolerance=settings.tolerance,
            max_iterations=settings.max_iterations,
        )


def _product(
    opened: Opened, settings: HutchinsonSettings | LanczosSettings, progress: Progress
) -> Product:
    batches = opened.fixed(settings.fixed_sequences)
    return opened.sharing.mean_product(opened.hessian, batches, progress.advance)


def _top(spectrum: Spectrum) -> dict[str, Any]:
    return spectrum.largest[0]._asdict() | {"iterations": spectrum.iterations}
