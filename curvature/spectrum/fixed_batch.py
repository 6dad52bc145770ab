"""Eigenvalues and spectral density of the Hessian of one fixed batch."""

from typing import Any

from base.progress import Progress
from curvature.products.parameters import Probe
from curvature.settings import HutchinsonSettings, LanczosSettings
from curvature.spectrum.density import density
from curvature.spectrum.lanczos import Product, Spectrum, lanczos
from curvature.subject import CurvatureSubject

START_PROBE = -1  # Lanczos starts from a probe that no pair uses


def measure_top(subject: CurvatureSubject, settings: HutchinsonSettings) -> dict[str, Any]:
    """Return lambda_max."""
    return _top(_extreme(subject, settings, largest=1, smallest=0))


def measure_spectrum(subject: CurvatureSubject, settings: LanczosSettings) -> dict[str, Any]:
    """Return loss, density, and eigenvalues of both ends."""
    parameters = subject.hessian.parameters
    loss = subject.sharing.mean_loss(subject.model, subject.fixed(settings.fixed_sequences))
    with Progress("density", total=settings.starts * settings.steps) as progress:
        spread = density(
            _product(subject, settings, progress),
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
        **_top(spectrum),
        "eigenvalues": {end: [pair._asdict() for pair in getattr(spectrum, end)] for end in ends},
    }


def _extreme(
    subject: CurvatureSubject,
    settings: HutchinsonSettings | LanczosSettings,
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


def _product(
    subject: CurvatureSubject, settings: HutchinsonSettings | LanczosSettings, progress: Progress
) -> Product:
    batches = subject.fixed(settings.fixed_sequences)
    return subject.sharing.mean_product(subject.hessian, batches, progress.advance)


def _top(spectrum: Spectrum) -> dict[str, Any]:
    top = spectrum.largest[0]._asdict() | {"iterations": spectrum.iterations}
    return {"lambda_max": top}
