"""Filter-normalised directions: norms by numpy, and what they may and may not depend on."""

import numpy as np
import pytest
import torch
from scipy import stats

from curvature.slices.random_directions import filter_normalised
from tests.curvature.conftest import tiny_model


def test_every_row_has_the_norm_of_the_weights_row_and_vectors_stay():
    weights = dict(tiny_model(torch.float32).named_parameters())
    with torch.no_grad():
        weights["model.embed_tokens.weight"][3] = 0
    direction = filter_normalised(weights, 1, 0)
    assert set(direction) == {name for name in weights if "norm" not in name}
    for name, moved in direction.items():
        expected = np.sqrt((weights[name].detach().double().numpy() ** 2).sum(axis=1))
        assert np.sqrt((moved.double().numpy() ** 2).sum(axis=1)) == pytest.approx(expected, rel=1e-6)
    assert not direction["model.embed_tokens.weight"][3].any()


def test_entries_are_gaussian_and_directions_independent():
    weights = {"a.weight": torch.ones(64, 1024), "b.weight": torch.ones(64, 1024)}
    draws = [filter_normalised(weights, seed, index) for seed, index in ((0, 0), (0, 1), (1, 0))]
    columns = [draw[name].numpy().ravel() for draw in draws for name in weights]
    for column in columns:  # each row has norm sqrt(1024): entries of unit variance
        assert stats.kstest(column, "norm").pvalue > 1e-3
    correlations = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlations).max() < 5 / np.sqrt(64 * 1024)


def test_only_seed_index_and_name_enter():
    torch.manual_seed(0)
    weights = {name: torch.randn(6, 5) for name in ("a", "b", "c")}
    whole = filter_normalised(weights, 7, 1)
    torch.manual_seed(1)
    alone = filter_normalised({name: weights[name] for name in ("c", "a")}, 7, 1)
    for name, moved in alone.items():
        assert torch.equal(moved, whole[name])
