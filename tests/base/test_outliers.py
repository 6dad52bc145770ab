"""Outlier statistics against scipy and numpy, and how they add up."""

import numpy as np
import pytest
import torch

from base.outliers import OutlierSums, kurtosis, power_sums, row_sums, statistics
from tests.plain_outliers import plain_statistics


def heavy_tails(rows: int, width: int) -> torch.Tensor:
    """Entries of a shifted Student t, with one channel ten times as large."""
    values_NI = np.random.default_rng(0).standard_t(5, (rows, width)) + 0.3
    values_NI[:, 3] *= 10
    return torch.from_numpy(values_NI).float()


@pytest.mark.parametrize("width", [7, 8, 250])
def test_statistics_are_those_of_scipy_and_numpy(width):
    x_NI = heavy_tails(40, width)
    expected = plain_statistics(x_NI.double().numpy())
    # products and ratios of fp32 entries
    assert OutlierSums.over([x_NI]).statistics() == pytest.approx(expected, rel=1e-6)


def test_kurtosis_of_known_distributions():
    """A million Gaussian entries have 3, with a standard error of sqrt(24 / n) = 0.005."""
    generator = torch.Generator().manual_seed(0)
    gaussian_NI = torch.randn(1000, 1000, generator=generator) * 0.02 + 0.01
    uniform_NI = torch.rand(1000, 1000, generator=generator)
    for x_NI, expected in ((gaussian_NI, 3.0), (uniform_NI, 9 / 5)):
        assert kurtosis(power_sums(x_NI).sum(0)).item() == pytest.approx(expected, abs=0.02)


def test_statistics_do_not_depend_on_how_the_rows_are_split_or_how_often_they_count():
    x_NI = heavy_tails(64, 20)
    whole = OutlierSums.over([x_NI]).statistics()
    assert OutlierSums.over(x_NI.split([1, 40, 23])).statistics() == pytest.approx(whole, rel=1e-12)
    twice = OutlierSums.over([x_NI, x_NI]).statistics()
    assert twice == pytest.approx(whole, rel=1e-12)


def test_leading_axes_are_independent():
    parts = heavy_tails(30, 12).split(10)
    sums = torch.stack([row_sums(part_NI).sum(0) for part_NI in parts])
    squares = torch.stack([part_NI.square().double().sum(0) for part_NI in parts])
    together = statistics(sums, squares)
    for index, part_NI in enumerate(parts):
        alone = OutlierSums.over([part_NI]).statistics()
        row = {name: values[index].item() for name, values in together.items()}
        assert row == pytest.approx(alone, rel=1e-12)


def test_a_row_of_zeros_has_no_statistics_and_half_a_row_of_zeros_no_median():
    zeros = OutlierSums.over([torch.zeros(2, 8)]).statistics()
    assert all(np.isnan(value) for value in zeros.values())
    half = OutlierSums.over([torch.tensor([[0.0, 0.0, 1.0, 2.0]])]).statistics()
    assert half["max_to_median"] == np.inf
    assert half["max_to_mean"] == pytest.approx(8 / 3)
