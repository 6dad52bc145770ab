"""Bootstrap intervals against loops, closed forms and the normal approximation."""

import numpy as np
import pytest

from quant_eval.losses import PairedLosses
from quant_eval.statistics import UNITS, bootstrap_intervals, ratios


def documents(seed=0, count=40, noise=0.02):
    """Documents of very different lengths and difficulty; quantization adds about 1%."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(5, 500, count).astype(float)
    nll = tokens * generator.normal(3, 0.4, count)
    nll_quantized = nll * (1.01 + noise * generator.normal(size=count))
    return PairedLosses(tokens, nll, nll_quantized, nll * generator.uniform(0, 0.02, count), tokens / 2)


def quantile(values, fraction):
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    below = int(fraction * (len(ordered) - 1))
    above = min(below + 1, len(ordered) - 1)
    weight = fraction * (len(ordered) - 1) - below
    return ordered[below] * (1 - weight) + ordered[above] * weight


def test_intervals_equal_an_explicit_loop():
    losses = documents()
    generator = np.random.default_rng(7)
    relative, absolute, kl = [], [], []
    for _ in range(200):
        tokens = full = quantized = divergence = 0.0
        for drawn in generator.integers(40, size=40):
            tokens += losses.tokens[drawn]
            full += losses.nll[drawn]
            quantized += losses.nll_quantized[drawn]
            divergence += losses.kl[drawn]
        relative.append(quantized / full - 1)
        absolute.append(quantized / tokens - full / tokens)
        kl.append(divergence / tokens)
    intervals = bootstrap_intervals(losses, samples=200, level=0.9, seed=7)
    for name, values in (("relative_error", relative), ("absolute_error", absolute), ("kl_divergence", kl)):
        assert intervals[name] == pytest.approx([quantile(values, 0.05), quantile(values, 0.95)], rel=1e-9), name


def test_equal_documents_leave_no_uncertainty():
    ones = np.ones(12)
    losses = PairedLosses(100 * ones, 300 * ones, 306 * ones, 4 * ones, 90 * ones)
    intervals = bootstrap_intervals(losses, samples=50, level=0.95, seed=0)
    expected = {
        "cross_entropy": 3.0,
        "cross_entropy_quantized": 3.06,
        "absolute_error": 0.06,
        "relative_error": 0.02,
        "kl_divergence": 0.04,
    }
    assert intervals.keys() == expected.keys() <= UNITS.keys()
    for name, value in expected.items():
        assert intervals[name] == pytest.approx([value, value], rel=1e-12), name


def test_pairing_removes_what_both_models_share():
    """Losses differ between documents, their ratio does not: only the losses themselves are uncertain."""
    intervals = bootstrap_intervals(documents(noise=0.0), samples=200, level=0.95, seed=0)
    assert intervals["relative_error"] == pytest.approx([0.01, 0.01], rel=1e-9)
    low, high = intervals["cross_entropy"]
    assert high - low > 0.1


def test_wide_intervals_contain_narrow_ones_and_the_estimate():
    losses = documents()
    narrow, wide = (bootstrap_intervals(losses, samples=500, level=level, seed=1) for level in (0.5, 0.99))
    sums = (losses.tokens.sum(), losses.nll.sum(), losses.nll_quantized.sum(), losses.kl.sum())
    for name, value in ratios(*sums).items():
        assert wide[name][0] < narrow[name][0] < value < narrow[name][1] < wide[name][1]


def test_many_documents_give_the_normal_interval_of_a_ratio():
    """Half width 1.96 sqrt(sum (q - R p)^2) / sum p, the linearised error of a ratio estimator (Cochran 1977, 6.3)."""
    losses = documents(seed=3, count=2000)
    low, high = bootstrap_intervals(losses, samples=2000, level=0.95, seed=0)["relative_error"]
    ratio = losses.nll_quantized.sum() / losses.nll.sum()
    half_width = 1.96 * np.sqrt(((losses.nll_quantized - ratio * losses.nll) ** 2).sum()) / losses.nll.sum()
    # 2000 samples place a 2.5% quantile within about 5% of the half width.
    assert (high - low) / 2 == pytest.approx(half_width, rel=0.1)
    assert (high + low) / 2 == pytest.approx(ratio - 1, abs=0.1 * half_width)


def test_the_seed_decides():
    losses = documents()
    first, again, other = (bootstrap_intervals(losses, samples=100, level=0.95, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
