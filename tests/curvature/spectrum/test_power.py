"""Power iteration against a case worked out by hand and against dense solvers."""

import pytest
import torch

from curvature.spectrum.lanczos import RitzPair
from curvature.spectrum.power import power_iteration
from tests.curvature.spectrum.operators import designed, inner, signs

DIAGONAL = torch.tensor([2.0, 1.0], dtype=torch.float64)


def test_the_rule_on_two_by_two():
    """From (1, 1) the vectors are (2^i, 1) and the values (2 4^i + 1) / (4^i + 1) = 3/2, 9/5, 33/17, 129/65.

    Their relative changes are 0.2, 0.078, 0.0224: at 0.03 the fourth product ends it, and 33/17 is returned, whose
    vector (4, 1) has |Hx - 33/17 x| / (33/17) = 4/33. The rule's 0.03 stands for an error of 3% and a residual of 12%.
    """
    found = power_iteration(lambda v: DIAGONAL * v, DIAGONAL * 0 + 1, inner, tolerance=0.03, max_iterations=100)
    assert found.pair.value == pytest.approx(33 / 17, rel=1e-12)
    assert found.pair.residual == pytest.approx(4 / 33, rel=1e-12)
    assert (found.rule_met, found.pair.converged, found.iterations) == (True, False, 4)


def test_the_last_value_where_the_rule_is_not_met():
    found = power_iteration(lambda v: DIAGONAL * v, DIAGONAL * 0 + 1, inner, tolerance=0.03, max_iterations=3)
    assert found.pair.value == pytest.approx(33 / 17, rel=1e-12)
    assert (found.rule_met, found.iterations) == (False, 3)


@pytest.mark.parametrize("top", [-50.0, 50.0])
def test_largest_in_magnitude(top):
    known = designed([top, *[i / 100 for i in range(100)], 30.0])
    found = power_iteration(known.product, signs(102), inner, tolerance=1e-9, max_iterations=100)
    by_magnitude = known.values_P[known.values_P.abs().argmax()]
    assert found.rule_met
    assert found.pair.value == pytest.approx(float(by_magnitude), rel=1e-6)


def test_a_trained_model(trained):
    start_P = signs(len(trained.values_P))
    found = power_iteration(trained.product, start_P, inner, tolerance=1e-6, max_iterations=100)
    assert found.pair.value == pytest.approx(float(trained.values_P[-1]), rel=1e-6)


def test_the_rule_is_met_far_from_the_eigenvalue():
    """Values creep where eigenvalues lie dense: PyHessian's tolerance is met at an error an order above it."""
    known = designed([1 - i / 1000 for i in range(200)])
    found = power_iteration(known.product, signs(200), inner, tolerance=1e-3, max_iterations=100)
    assert found.rule_met
    assert abs(found.pair.value - 1) > 1e-2
    assert found.pair.residual is not None
    assert found.pair.residual > 1e-2
    assert not found.pair.converged


def test_an_eigenvector_of_zero():
    found = power_iteration(torch.zeros_like, signs(4), inner, tolerance=1e-3, max_iterations=10)
    assert found.pair == RitzPair(0.0, 0.0, converged=True)
    assert (found.rule_met, found.iterations) == (True, 1)


def test_settings_are_refused():
    with pytest.raises(ValueError, match="no two values to compare"):
        power_iteration(lambda v: v, signs(4), inner, tolerance=1e-3, max_iterations=1)
    with pytest.raises(ValueError, match="start vector is zero"):
        power_iteration(lambda v: v, torch.zeros(3), inner, tolerance=1e-3, max_iterations=10)
