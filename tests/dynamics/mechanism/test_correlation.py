"""Partial correlations whose truth is planted, and the unit of their intervals."""

import math

import numpy as np
import pytest
from scipy.stats import norm, rankdata, spearmanr

from dynamics.mechanism.correlation import partial_correlation
from dynamics.mechanism.ratios import mean_ratio
from tests.present import present


def planted(generator, *, effect: float, trainings: int = 8, checkpoints: int = 6):
    """Tokens drive both quantities; `effect` is that of the first on the second besides."""
    tokens = np.tile(np.linspace(0, 3, checkpoints), trainings)
    own = np.repeat(generator.normal(size=trainings), checkpoints)  # of a training, in all
    first = tokens + own + 0.3 * generator.normal(size=len(tokens))
    other = np.repeat(generator.normal(size=trainings), checkpoints)
    noise = other + 0.3 * generator.normal(size=len(tokens))
    second = 2 * tokens + effect * (first - tokens) + noise
    names = [f"run{index}" for index in range(trainings) for _ in range(checkpoints)]
    return first, second, tokens[:, None], names


def test_a_confounder_is_seen():
    generator = np.random.default_rng(1)
    raw, freed = [], []
    for _ in range(50):
        first, second, given, names = planted(generator, effect=0.0)
        raw.append(spearmanr(first, second).statistic)
        freed.append(present(partial_correlation(first, second, given, names)).value)
    assert np.mean(raw) > 0.5
    assert abs(np.mean(freed)) < 3 * np.std(freed) / math.sqrt(len(freed))
    real = planted(generator, effect=2.0, trainings=40)
    assert present(partial_correlation(*real)).low > 0.5


def test_the_value_is_that_of_the_textbook_formula():
    first, second, given, names = planted(np.random.default_rng(2), effect=1.0)
    ranks = [rankdata(values) for values in (first, second, given[:, 0])]
    matrix = np.corrcoef(ranks)
    xy, xz, yz = matrix[0, 1], matrix[0, 2], matrix[1, 2]
    expected = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    correlation = present(partial_correlation(first, second, given, names))
    assert correlation.value == pytest.approx(expected)


def test_intervals_are_over_trainings_not_checkpoints():
    """Over draws of trainings a true 0 is rejected at its level; by checkpoint it is far too
    often.
    """
    generator = np.random.default_rng(3)
    wrong = naive = 0
    for _ in range(300):
        first, second, given, names = planted(generator, effect=0.0)
        correlation = present(partial_correlation(first, second, given, names))
        wrong += correlation.p_value < 0.05
        error = 1 / math.sqrt(len(names) - 4)
        naive += 2 * norm.sf(abs(math.atanh(correlation.value)) / error) < 0.05
    assert wrong / 300 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    assert naive / 300 > 0.3


def test_too_few_trainings_or_nothing_that_varies_is_unknown():
    first, second, given, names = planted(np.random.default_rng(4), effect=1.0)
    assert partial_correlation(first[:12], second[:12], given[:12], names[:12]) is None
    assert partial_correlation(given[:, 0], second, given, names) is None


def test_ratios_are_averaged_within_a_training_first():
    logs = {"a": [0.1, 0.3], "b": [0.2], "c": [0.4, 0.4, 0.4, 0.4]}
    means = np.array([0.2, 0.2, 0.4])
    ratio = present(mean_ratio(logs))
    assert ratio.value == pytest.approx(math.exp(means.mean()))
    half = 4.302653 * means.std(ddof=1) / math.sqrt(3)  # Student's 97.5% quantile at 2 degrees
    assert ratio.high == pytest.approx(math.exp(means.mean() + half), rel=1e-6)
    assert mean_ratio({"a": [0.1], "b": [0.2], "c": []}) is None
