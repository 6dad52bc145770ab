"""Figures and intervals against loops, leaving documents out, closed forms and the normal
approximation.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from base.errors import UserError
from quant_eval.measuring import statistics
from quant_eval.measuring.losses import PairedLosses
from quant_eval.measuring.statistics import UNITS, figures_of


def documents(seed=0, count=40, noise=0.02):
    """Documents of very different lengths and difficulty; quantization adds about 1%."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(5, 500, count).astype(float)
    nll = tokens * generator.normal(3, 0.4, count)
    nll_quantized = nll * (1.01 + noise * generator.normal(size=count))
    agreements = generator.binomial(tokens.astype(int), 0.9).astype(float)
    kl = nll * generator.uniform(0, 0.02, count)
    return PairedLosses(tokens, nll, nll_quantized, kl, agreements, changes=2 * kl)


def intervals_of(losses, samples=200, level=0.95, seed=0):
    return figures_of([losses], samples=samples, level=level, seed=seed)["intervals"]


def half_width_by_loops(a, b, logarithmic, samples, level, seed):
    """A symmetric bootstrap-t, document by document, of a ratio of sums over documents."""
    count = len(a)
    everything = range(count)

    def value(members):
        return sum(a[i] for i in members) / sum(b[i] for i in members)

    def variance(members):
        total, ratio = sum(b[i] for i in members), value(members)
        contributions = [(a[i] - ratio * b[i]) / (1 - b[i] / sum(b)) / total for i in members]
        return sum(part**2 for part in contributions) / (ratio**2 if logarithmic else 1)

    estimate, spread = value(everything), variance(everything)
    generator = np.random.default_rng(seed)
    studentized = []
    for _ in range(samples):
        members = generator.integers(count, size=count)
        change = math.log(value(members) / estimate) if logarithmic else value(members) - estimate
        studentized.append(
            abs(change) / math.sqrt((count * variance(members) + spread) / (count + 1))
        )
    return sorted(studentized)[math.ceil(level * (samples + 1)) - 1] * math.sqrt(spread)


def test_intervals_equal_explicit_loops():
    losses = documents(count=12)
    intervals = intervals_of(losses, samples=60, level=0.9, seed=7)
    half = half_width_by_loops(losses.nll_quantized, losses.nll, False, 60, 0.9, 7)
    ratio = losses.nll_quantized.sum() / losses.nll.sum() - 1
    assert intervals["relative_error"] == pytest.approx([ratio - half, ratio + half], rel=1e-9)
    half = half_width_by_loops(losses.kl, losses.tokens, True, 60, 0.9, 7)
    divergence = losses.kl.sum() / losses.tokens.sum()
    expected = [divergence * math.exp(-half), divergence * math.exp(half)]
    assert intervals["kl_divergence"] == pytest.approx(expected, rel=1e-9)


def test_equal_documents_leave_no_uncertainty():
    ones = np.ones(12)
    losses = PairedLosses(100 * ones, 300 * ones, 306 * ones, 4 * ones, 90 * ones, ones)
    figures = figures_of([losses], samples=50, level=0.95, seed=0)
    expected = {"cross_entropy": 3.0, "cross_entropy_quantized": 3.06, "absolute_error": 0.06}
    expected |= {"relative_error": 0.02, "kl_divergence": 0.04, "top1_agreement": 0.9, "r_l": 0.01}
    assert figures["intervals"].keys() == expected.keys() <= UNITS.keys()
    for name, value in expected.items():
        assert figures["intervals"][name] == pytest.approx([value, value], rel=1e-12), name
        assert figures[name] == pytest.approx(value, rel=1e-12)


def test_many_documents_give_the_normal_interval_of_a_ratio():
    """Half width 1.96 sqrt(sum (q - R p)^2) / sum p, the linearised error of a ratio estimator
    (Cochran 1977, 6.3).
    """
    losses = documents(seed=3, count=500)
    low, high = intervals_of(losses, samples=20_000)["relative_error"]
    ratio = losses.nll_quantized.sum() / losses.nll.sum()
    residual_D = losses.nll_quantized - ratio * losses.nll
    half_width = 1.96 * np.sqrt((residual_D**2).sum()) / losses.nll.sum()
    # 20000 samples place this quantile within about 1% of itself, and 500 documents are not quite
    # normal.
    assert (high - low) / 2 == pytest.approx(half_width, rel=0.03)
    assert (high + low) / 2 == pytest.approx(ratio - 1, rel=1e-9)


def test_the_seed_decides_and_the_memory_does_not(monkeypatch):
    losses = documents()
    first, again, other = (intervals_of(losses, samples=100, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    monkeypatch.setattr(statistics, "COUNTS_AT_ONCE", 7 * 40)  # 7 samples at once
    for name, interval in intervals_of(losses, samples=100, seed=1).items():
        assert interval == pytest.approx(first[name], rel=1e-12)


def test_sparse_figures_have_finite_intervals():
    """In a third of the resamples no document disagrees, and the resample itself shows no error
    at all.
    """
    losses = documents(count=30)
    agreements = losses.tokens.copy()
    agreements[4] -= 1
    low, high = intervals_of(replace(losses, agreements=agreements))["top1_agreement"]
    assert 0.9 < low < agreements.sum() / losses.tokens.sum() < high <= 1
    none = 0 * losses.kl
    always = PairedLosses(losses.tokens, losses.nll, losses.nll, none, losses.tokens, none)
    intervals = intervals_of(always)
    assert intervals["top1_agreement"] == [1, 1]
    assert intervals["kl_divergence"] == intervals["relative_error"] == [0, 0]
    for name, (low, high) in intervals_of(documents(count=2), samples=100).items():
        assert -math.inf < low < high < math.inf, name


def test_what_has_no_interval_is_refused():
    losses = documents(count=20)
    negative = -1e-9 * losses.kl
    noise = PairedLosses(losses.tokens, losses.nll, losses.nll, negative, losses.tokens, losses.kl)
    with pytest.raises(UserError, match=r"kl_divergence is -.*lost in rounding"):
        intervals_of(noise)
    with pytest.raises(UserError, match=r"18 bootstrap samples are too few .* take 19 or more"):
        intervals_of(losses, samples=18)
    alone = replace(losses, nll=losses.nll * (np.arange(20) == 0), nll_quantized=losses.nll)
    with pytest.raises(UserError, match="relative_error: one document holds all"):
        intervals_of(alone)


def shifted(losses, change):
    """Another calibration draw, which adds `change` nats per token to every document."""
    return replace(losses, nll_quantized=losses.nll_quantized + change * losses.tokens)


def test_one_draw_says_nothing_of_draws_and_equal_draws_add_nothing():
    losses = documents()
    single = figures_of([losses], samples=200, level=0.95, seed=0)
    assert single["calibration"] is None
    assert single["interval"]["units_resampled"] == "documents"
    three = figures_of([losses] * 3, samples=200, level=0.95, seed=0)
    assert three["interval"]["units_resampled"] == "documents and calibration draws"
    for name, interval in single["intervals"].items():
        assert three["intervals"][name] == pytest.approx(interval, rel=1e-12)
        error = three["calibration"]["figures"][name]["standard_error"]
        assert error == pytest.approx(0, abs=1e-12)


def test_figures_are_means_over_draws():
    draws = [shifted(documents(), change) for change in (0.01, 0.02, 0.06)]
    figures = figures_of(draws, samples=100, level=0.95, seed=0)
    errors = [(draw.nll_quantized.sum() - draw.nll.sum()) / draw.tokens.sum() for draw in draws]
    spread = figures["calibration"]["figures"]["absolute_error"]
    assert figures["calibration"]["seeds"] == 3
    assert figures["absolute_error"] == pytest.approx(sum(errors) / 3)
    assert spread["values"] == pytest.approx(errors)
    # Deviations from the mean are -0.02, -0.01 and 0.03.
    assert spread["standard_deviation"] == pytest.approx(math.sqrt(0.0014 / 2))
    assert spread["standard_error"] == pytest.approx(math.sqrt(0.0014 / 6))


def test_standard_errors_are_those_of_each_source():
    """Variance of documents against leaving each out, on the figure's own scale; of draws that move all
    documents alike, their deviation over sqrt(K).
    """
    draws = [shifted(documents(), change) for change in (0.01, 0.02, 0.06)]
    errors = figures_of(draws, samples=100, level=0.95, seed=0)["standard_errors"]
    # what documents show of the draws is nothing, but for the rounding of a subtraction
    assert errors["absolute_error"]["draws"] == pytest.approx(math.sqrt(0.0014 / 6), rel=1e-6)
    assert errors["cross_entropy"]["draws"] == 0
    losses = draws[0]
    whole = losses.kl.sum() / losses.tokens.sum()
    without = (losses.kl.sum() - losses.kl) / (losses.tokens.sum() - losses.tokens)
    left_out = math.sqrt(((without - whole) ** 2).sum())
    assert errors["kl_divergence"]["documents"] == pytest.approx(left_out, rel=1e-9)


def test_draws_alone_give_the_interval_of_student():
    """If documents do not vary, K draws are K normal observations."""
    ones = np.ones(12)
    losses = PairedLosses(100 * ones, 300 * ones, 306 * ones, 4 * ones, 90 * ones, ones)
    draws = [shifted(losses, change) for change in (0.01, 0.02, 0.06)]
    low, high = figures_of(draws, samples=20_000, level=0.9, seed=0)["intervals"]["absolute_error"]
    half_width = student.ppf(0.95, df=2) * math.sqrt(0.0014 / 6)
    # 20000 samples place this quantile within about 1% of itself.
    assert (high - low) / 2 == pytest.approx(half_width, rel=0.04)
    assert (high + low) / 2 == pytest.approx(0.06 + 0.03)


def test_what_documents_show_of_the_draws_counts_once():
    """Two draws that move each of 10 documents by +-(d +- 0.03) nats per token, and their mean
    by nothing.

    Their figures differ by 2 d, so their mean has a variance of d^2, of which the documents' own
    0.03^2 / 9 is 0.0001.
    """
    tokens = np.full(10, 100.0)
    moved = np.array([0.03, -0.03] * 5)

    def half_width(change):
        quantized = [300 + 100 * (0.06 + sign * (change + moved)) for sign in (1, -1)]
        draws = [
            PairedLosses(tokens, 3 * tokens, values, tokens, tokens, tokens) for values in quantized
        ]
        intervals = figures_of(draws, samples=20_000, level=0.5, seed=0)["intervals"]
        low, high = intervals["absolute_error"]
        return (high - low) / 2

    # Half of a Student t of 1 degree of freedom is within 1 of 0; 20000 samples place that within
    # about 1%.
    assert half_width(0.02) == pytest.approx(math.sqrt(0.0004 - 0.0001), rel=0.05)
    assert half_width(0.005) == pytest.approx(0, abs=1e-9)
