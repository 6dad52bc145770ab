"""Rules, moments and densities against exact algebra, standard errors against the spread."""

import statistics

import pytest
import scipy.linalg
import torch
from torch import Tensor

from curvature.spectrum.density import SpectralDensity, density
from tests.curvature.spectrum.operators import Known, designed, inner, signs


def density_of(known: Known, starts: list[Tensor], steps: int) -> SpectralDensity:
    return density(known.product, starts, inner, num_parameters=len(known.values_P), steps=steps)


def measure_of(known: Known, start_P: Tensor) -> Tensor:
    """The weight of every eigenvalue, ascending, in the spectral measure of one vector."""
    return (torch.linalg.eigh(known.matrix_PP).eigenvectors.T @ start_P).square() / len(start_P)


def test_rules_of_single_starts_are_gaussian_quadratures(trained):
    """v'H^j v by repeated products, for powers to 2k - 1; two moments are Hutchinson's."""
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
    """Rows of a Hadamard matrix: the mean of v'Av is tr A, for every A, without sampling."""
    size = len(trained.values_P)
    starts = list(torch.from_numpy(scipy.linalg.hadamard(1024)[:, :size]).double())
    spectrum = density_of(trained, starts, steps=2)
    assert spectrum.trace.mean == pytest.approx(float(trained.values_P.sum()), rel=1e-9)
    assert spectrum.squared_norm.mean == pytest.approx(
        float(trained.values_P.square().sum()), rel=1e-9
    )


@pytest.fixture(scope="module")
def repetitions() -> tuple[Known, list[SpectralDensity]]:
    """100 densities of 20 starts; six distinct eigenvalues: six steps give exact measures."""
    known = designed(
        [*[4.0] * 5, *[3.0] * 9, *[0.5] * 20, *[0.01] * 10, *[-0.02] * 15, *[-1.0] * 5]
    )
    groups = [
        [signs(64, 20 * repetition + index) for index in range(20)] for repetition in range(100)
    ]
    return known, [density_of(known, starts, steps=6) for starts in groups]


def test_standard_errors_are_the_spread_of_the_errors(repetitions):
    """Student's t of 19 degrees has s.d. sqrt(19/17) = 1.06, of 100 repetitions +-8%."""
    known, spectra = repetitions
    exact = {
        "trace": float(known.values_P.sum()),
        "squared_norm": float(known.values_P.square().sum()),
        "negative": 20 / 64,
    }
    for name, right in exact.items():
        pairs = [getattr(spectrum, name) for spectrum in spectra]
        scores = [(mean - right) / error for mean, error, *_ in pairs]
        assert 0.85 < statistics.stdev(scores) < 1.3, name
        assert abs(statistics.fmean(scores)) < 0.35, name


def test_bounds_hold_where_the_weights_do_not(trained):
    """40% are negative, nearly all close to 0: few steps cannot tell, and the bounds say so."""
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
