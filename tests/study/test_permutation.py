"""Rank correlation of a few runs, against another library and all orders in which they could
stand.
"""

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import kendalltau

from dynamics.claims.permutation import kendall


def test_kendall_is_that_of_scipy_and_of_all_orders():
    generator = np.random.default_rng(0)
    for count in (3, 5, 7):
        first, second = generator.normal(size=(2, count))
        expected = kendalltau(first, second, method="exact")
        assert kendall(first, second) == pytest.approx((expected.statistic, expected.pvalue))
    tied = [1.0, 1.0, 2.0, 3.0]
    every = [
        kendall(range(4), [tied[place] for place in order])[0] for order in permutations(range(4))
    ]
    tau, p = kendall(range(4), tied)
    assert tau == pytest.approx(5 / 6)
    assert p == pytest.approx(min(1.0, 2 * np.mean(np.array(every) >= tau - 1e-9)))


def test_the_permutation_test_keeps_its_size_exactly():
    """Over all 120 equally likely orders of five runs."""
    p_values = [kendall(range(5), order)[1] for order in permutations(range(5))]
    assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(
        2 / 120
    )  # the two perfect orders, at 2/120 each
    assert min(p_values) == pytest.approx(2 / 120)
