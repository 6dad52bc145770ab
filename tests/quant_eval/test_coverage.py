"""Coverage: how often 95% intervals contain the truth, on documents whose truth is known.

Documents are drawn anew for every repetition, so the truth of a figure is a ratio of expectations,
worked out below.
"""

from dataclasses import fields as fields_of

import numpy as np
import pytest
from scipy.stats import binom

from quant_eval.estimate import Crossed, estimate_of
from quant_eval.measuring.losses import PairedLosses
from quant_eval.measuring.statistics import figures_of

FIRST_TOKENS = 20.0  # nats by which a document's first tokens cost more, in the setting "short"
MEAN_SHORT = 26.0  # tokens, of lengths uniform on 2 .. 50


def lengths(generator, count, setting):
    if setting == "short":
        return generator.integers(2, 51, count).astype(float)
    spread = {"lognormal": 1.0, "heavy": 1.5}[setting]
    return 2 + np.floor(generator.lognormal(5, spread, count))


def documents(generator, count, setting, skew=0.5):
    """Tokens are gamma variables around a rate that each document draws; all rates are
    independent of the length.

    Losses differ by document and by token. What quantization adds differs by both too, on top of
    the shared loss. The divergence has a lognormal rate (`skew` is the standard deviation of its
    logarithm), the agreement a beta one.
    """
    tokens = lengths(generator, count, setting)
    rate = 3 * generator.gamma(30, 1 / 30, count)
    nll = rate * generator.gamma(1.2 * tokens) / 1.2 + (FIRST_TOKENS if setting == "short" else 0)
    added = tokens * (0.03 + 0.02 * generator.normal(size=count))
    added += np.sqrt(tokens) * 0.15 * generator.normal(size=count)
    rate = 0.01 * generator.lognormal(-(skew**2) / 2, skew, count)
    kl = rate * generator.gamma(0.5 * tokens) / 0.5
    agreements = generator.binomial(tokens.astype(int), generator.beta(18, 2, count))
    return PairedLosses(tokens, nll, nll + added, kl, agreements.astype(float), kl)


def truth(setting):
    loss = 3 + (FIRST_TOKENS / MEAN_SHORT if setting == "short" else 0)
    return {
        "cross_entropy": loss,
        "cross_entropy_quantized": loss + 0.03,
        "absolute_error": 0.03,
        "relative_error": 0.03 / loss,
        "kl_divergence": 0.01,
        "top1_agreement": 0.9,
    }


def coverage(setting, count, repetitions, samples=1000, seed=0, skew=0.5):
    """By figure, the share of repetitions whose 95% interval contains the truth."""
    generator = np.random.default_rng(seed)
    expected = truth(setting)
    hits = dict.fromkeys(expected, 0)
    for repetition in range(repetitions):
        losses = documents(generator, count, setting, skew)
        intervals = figures_of([losses], samples=samples, level=0.95, seed=repetition)["intervals"]
        for name, value in expected.items():
            hits[name] += intervals[name][0] <= value <= intervals[name][1]
    return {name: hit / repetitions for name, hit in hits.items()}


def is_within(share, repetitions, limits=(0.93, 0.97)):
    """Return whether a coverage within the limits gives such a share, with 99% on either side."""
    low, high = (
        binom.ppf(quantile, repetitions, limit)
        for quantile, limit in zip((0.01, 0.99), limits, strict=True)
    )
    return low <= share * repetitions <= high


def test_fifty_documents_are_enough():
    """Not so for percentile intervals: they contain the divergence in 89.9%, BCa intervals in
    86.5%.
    """
    reached = coverage("lognormal", 50, repetitions=1500, samples=400)
    assert all(is_within(share, 1500) for share in reached.values()), reached


@pytest.mark.stress
@pytest.mark.parametrize("setting", ["short", "lognormal", "heavy"])
@pytest.mark.parametrize(
    ("count", "repetitions", "least"),
    [(20, 2000, 0.91), (50, 2000, 0.93), (200, 2000, 0.93), (1000, 1000, 0.93)],
)
def test_intervals_cover_the_truth(setting, count, repetitions, least):
    reached = coverage(setting, count, repetitions, seed=6 if count == 1000 else 5)
    print(setting, count, reached)
    assert all(least <= share <= 0.97 for share in reached.values()), reached


def drawn(generator, count, seeds, between_draws, between_both):
    """Losses of several calibration draws: what they add differs by document, by draw, and by
    both at once.
    """
    tokens = lengths(generator, count, "lognormal")
    nll = tokens * 3 * generator.gamma(30, 1 / 30, count)
    of_document = generator.normal(size=count)
    losses = []
    for _ in range(seeds):
        rate = 0.03 + 0.02 * of_document + between_draws * generator.normal()
        rate = rate + between_both * generator.normal(size=count)
        variance = 0.02**2 + between_draws**2 + between_both**2
        kl = tokens * 0.01 * np.exp(25 * (rate - 0.03) - 0.5 * 25**2 * variance)
        losses.append(
            PairedLosses(tokens, nll, nll + tokens * rate, kl, np.floor(0.9 * tokens), kl)
        )
    return losses


def coverage_over_draws(count, seeds, between_draws, between_both, repetitions, samples=1000):
    """By figure, coverage of intervals over documents and draws, and of intervals that leave the
    draws out.
    """
    generator = np.random.default_rng(7)
    expected = {"absolute_error": 0.03, "relative_error": 0.01, "kl_divergence": 0.01}
    hits = np.zeros((2, len(expected)))
    for repetition in range(repetitions):
        losses = drawn(generator, count, seeds, between_draws, between_both)
        fields = [
            np.mean([getattr(draw, field.name) for draw in losses], axis=0)
            for field in fields_of(PairedLosses)
        ]
        for row, given in enumerate((losses, [PairedLosses(*fields)])):
            intervals = figures_of(given, samples=samples, level=0.95, seed=repetition)["intervals"]
            hits[row] += [
                intervals[name][0] <= value <= intervals[name][1]
                for name, value in expected.items()
            ]
    both, documents_only = hits / repetitions
    return dict(zip(expected, both, strict=True)), dict(zip(expected, documents_only, strict=True))


def test_intervals_cover_the_draw_of_the_calibration_text():
    both, documents_only = coverage_over_draws(
        50, 3, between_draws=0.01, between_both=0.01, repetitions=400, samples=400
    )
    # Two degrees of freedom make it wide: a coverage of up to 98.5% is accepted.
    assert all(is_within(share, 400, (0.93, 0.985)) for share in both.values()), both
    assert max(documents_only.values()) < 0.9


@pytest.mark.stress
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(
    ("between_draws", "between_both"), [(0.0, 0.0), (0.0, 0.02), (0.003, 0.01), (0.02, 0.02)]
)
def test_intervals_over_draws_cover_the_truth(seeds, between_draws, between_both):
    both, documents_only = coverage_over_draws(
        100, seeds, between_draws, between_both, repetitions=1000
    )
    print(seeds, between_draws, between_both, both, documents_only)
    # A variance between draws that is known from three of them makes intervals wide.
    assert all(0.93 <= share <= (0.99 if seeds == 3 else 0.975) for share in both.values()), both


@pytest.mark.stress
def test_a_single_result_needs_the_bootstrap_where_divergences_are_skewed():
    """Student's t of pseudo-values of the logarithm, the estimator of differences, is short."""
    generator, hits, repetitions = np.random.default_rng(5), np.zeros(2), 2000
    expected = truth("lognormal")["kl_divergence"]
    for repetition in range(repetitions):
        losses = documents(generator, 200, "lognormal", skew=1.0)
        sums, tokens = losses.kl.sum(), losses.tokens.sum()
        logarithm = np.log(sums / tokens)
        without_D = np.log((sums - losses.kl) / (tokens - losses.tokens))
        pseudo_D = 200 * logarithm - 199 * without_D
        by_t = estimate_of(Crossed(pseudo_D[None, :, None], logarithm, losses.tokens)).interval()
        by_bootstrap = figures_of([losses], samples=400, level=0.95, seed=repetition)["intervals"]
        low, high = by_bootstrap["kl_divergence"]
        hits += [by_t[0] <= np.log(expected) <= by_t[1], low <= expected <= high]
    t, bootstrap = hits / repetitions
    print(t, bootstrap)
    assert bootstrap > 0.92
    assert t + 0.01 < bootstrap
