"""Eigenvalues and spectral density of the Hessian of a fixed batch; other text has its own."""

from typing import Any

from base.progress import Progress
from curvature.problem import Problem
from curvature.products.parameters import Probe
from curvature.settings import HutchinsonSettings, LanczosSettings
from curvature.spectrum.density import density
from curvature.spectrum.lanczos import Product, Spectrum, lanczos

START_PROBE = -1  # Lanczos starts from a probe that no pair uses


def measure_top(problem: Problem, settings: HutchinsonSettings) -> dict[str, Any]:
    """Return lambda_max."""
    return _top(_extreme(problem, settings, largest=1, smallest=0))


def measure_spectrum(problem: Problem, settings: LanczosSettings) -> dict[str, Any]:
    """Return loss, density, and eigenvalues of both ends."""
    parameters = problem.hessian.parameters
    loss = problem.sharing.mean_loss(problem.model, problem.fixed(settings.fixed_sequences))
    with Progress("density", total=settings.starts * settings.steps) as progress:
        spread = density(
            _product(problem, settings, progress),
            (parameters.probe(Probe(settings.seed, index)) for index in range(settings.starts)),
            parameters.inner,
            num_parameters=parameters.size,
            steps=settings.steps,
        )
    ends = {"largest": settings.largest, "smallest": settings.smallest}
    spectrum = _extreme(problem, settings, **ends)
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
    problem: Problem, settings: HutchinsonSettings | LanczosSettings, *, largest: int, smallest: int
) -> Spectrum:
    parameters, total = problem.hessian.parameters, settings.max_iterations + largest + smallest
    with Progress("eigenvalues, at most", total=total) as progress:
        return lanczos(
            _product(problem, settings, progress),
            parameters.probe(Probe(settings.seed, START_PROBE)),
            parameters.inner,
            largest=largest,
            smallest=smallest,
            tolerance=settings.tolerance,
            max_iterations=settings.max_iterations,
        )


def _product(
    problem: Problem, settings: HutchinsonSettings | LanczosSettings, progress: Progress
) -> Product:
    batches = problem.fixed(settings.fixed_sequences)
    return problem.sharing.mean_product(problem.hessian, batches, progress.advance)


def _top(spectrum: Spectrum) -> dict[str, Any]:
    top = spectrum.largest[0]._asdict() | {"iterations": spectrum.iterations}
    return {"lambda_max": top}
