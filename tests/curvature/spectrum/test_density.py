"""Quadrature rules, moments and densities against exact algebra, and standard errors against the
spread they state.
"""

import json
import math
import statistics

import pytest
import scipy.linalg
import torch
from torch import Tensor

from curvature.spectrum.density import MomentEstimate, NegativeShare, SpectralDensity, density
from tests.curvature.spectrum.operators import Known, designed, inner, signs


def density_of(known: Known, starts: list[Tensor], steps: int) -> SpectralDensity:
    return density(known.product, starts, inner, num_parameters=len(known.values_P), steps=steps)


def measure_of(known: Known, start_P: Tensor) -> Tensor:
    """The weight of every eigenvalue, ascending, in the spectral measure of one vector."""
    return (torch.linalg.eigh(known.matrix_PP).eigenvectors.T @ start_P).square() / len(start_P)


def test_rules_of_single_starts_are_gaussian_quadratures(trained):
    """v'H^j v by repeated products, for all powers to 2k - 1; the first two moments are those of
    Hutchinson.
    """
    size = len(trained.values_P)
    starts = [signs(size, seed) for seed in range(3)]
    spectrum = density_of(trained, starts, steps=4)
    for start_P, nodes, weights in zip(starts, spectrum.nodes, spectrum.weights, strict=True):
        power_P = start_P
        for power in range(8):
            exact = float(start_P @ power_P) / size
            assert sum(w * t**power for t, w in zip(nodes, weights, strict=True)) == pytest.approx(
                exact, rel=1e-10
            )
            power_P = trained.matrix_PP @ power_P
    first = [float(v_P @ trained.matrix_PP @ v_P) for v_P in starts]
    assert spectrum.trace == pytest.approx(
        (statistics.fmean(first), statistics.stdev(first) / 3**0.5), rel=1e-10
    )
    assert sum(map(len, spectrum.nodes)) == 12


def test_moments_have_no_bias(trained):
    """The rows of a Hadamard matrix are sign vectors whose mean of v'Av is tr A, for every A: no
    sampling is left.
    """
    size = len(trained.values_P)
    starts = list(torch.from_numpy(scipy.linalg.hadamard(1024)[:, :size]).double())
    spectrum = density_of(trained, starts, steps=2)
    assert spectrum.trace.mean == pytest.approx(float(trained.values_P.sum()), rel=1e-9)
    assert spectrum.squared_norm.mean == pytest.approx(
        float(trained.values_P.square().sum()), rel=1e-9
    )


def test_moments_of_random_starts_are_within_two_percent():
    known = designed(
        [*[4 + i / 10 for i in range(20)], *[((i - 150) / 250) ** 3 for i in range(400)]]
    )
    spectrum = density_of(known, [signs(420, seed) for seed in range(1600)], steps=2)
    assert spectrum.trace.mean == pytest.approx(float(known.values_P.sum()), rel=0.02)
    assert spectrum.squared_norm.mean == pytest.approx(
        float(known.values_P.square().sum()), rel=0.02
    )
    for estimate, exact in (
        (spectrum.trace, known.values_P.sum()),
        (spectrum.squared_norm, known.values_P.square().sum()),
    ):
        assert estimate.standard_error < 0.01 * float(exact)


@pytest.fixture(scope="module")
def repetitions() -> tuple[Known, list[SpectralDensity]]:
    """100 independent densities of 20 starts; six distinct eigenvalues, so that six steps give
    exact measures.
    """
    known = designed(
        [*[4.0] * 5, *[3.0] * 9, *[0.5] * 20, *[0.01] * 10, *[-0.02] * 15, *[-1.0] * 5]
    )
    groups = [
        [signs(64, 20 * repetition + index) for index in range(20)] for repetition in range(100)
    ]
    return known, [density_of(known, starts, steps=6) for starts in groups]


def test_standard_errors_are_the_spread_of_the_errors(repetitions):
    """error / standard error has Student's t of 19 degrees: s.d. sqrt(19/17) = 1.06, of 100
    repetitions +-8%.
    """
    known, spectra = repetitions
    exact = {
        "trace": float(known.values_P.sum()),
        "squared_norm": float(known.values_P.square().sum()),
        "negative": 20 / 64,
    }
    for name, right in exact.items():
        pairs = [
            {
                "trace": spectrum.trace,
                "squared_norm": spectrum.squared_norm,
                "negative": spectrum.negative[:2],
            }[name]
            for spectrum in spectra
        ]
        scores = [(mean - right) / error for mean, error in pairs]
        assert 0.85 < statistics.stdev(scores) < 1.3, name
        assert abs(statistics.fmean(scores)) < 0.35, name


def test_bounds_hold_where_the_weights_do_not(trained):
    """40% of the eigenvalues are negative, nearly all close to 0: few steps cannot tell, and the
    bounds say so.
    """
    starts = [signs(len(trained.values_P), seed) for seed in (8, 9)]
    exact_P = torch.stack([measure_of(trained, start_P) for start_P in starts]).mean(dim=0)
    errors = []
    for steps in (5, 40, 60):
        spectrum = density_of(trained, starts, steps=steps)
        share, right = spectrum.negative, float(exact_P[trained.values_P < 0].sum())
        assert share.least - 1e-9 <= right <= share.most + 1e-9
        assert share.least - 1e-12 <= share.mean <= share.most + 1e-12
        errors.append(abs(share.mean - right))
    assert max(errors) > 0.3


def test_json_holds_a_density(trained):
    spectrum = density_of(
        trained, [signs(len(trained.values_P), seed) for seed in range(2)], steps=5
    )
    fields = json.loads(json.dumps(spectrum._asdict(), allow_nan=False))
    for name, kind in (
        ("trace", MomentEstimate),
        ("squared_norm", MomentEstimate),
        ("negative", NegativeShare),
    ):
        fields[name] = kind(*fields[name])
    again = SpectralDensity(**fields)
    assert again == spectrum
    assert all(math.fsum(weights) == pytest.approx(1, abs=1e-12) for weights in spectrum.weights)
