"""Estimates against Student's and Welch's tests of scipy, and against the truth of simulations."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_ind, ttest_rel

from base.errors import UserError
from quant_eval.estimate import DOCUMENTS, DRAWS, SEEDS, Crossed, Estimate, contrast_of, estimate_of
from tests.quant_eval.test_coverage import is_within

REPETITIONS = 1000  # of each small simulation


def test_one_seed_is_the_paired_t_test_over_documents():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=30), generator.normal(0.3, size=30)
    ones = np.ones(30)
    whole, pseudo = contrast_of([(1, second[:, None], ones), (-1, first[:, None], ones)])
    estimate = estimate_of(Crossed(pseudo[None], float(whole[0]), ones))
    test = ttest_rel(second, first)
    assert estimate.p_value() == pytest.approx(test.pvalue)
    assert estimate.interval(0.9) == pytest.approx(tuple(test.confidence_interval(0.9)))
    assert estimate.sources.keys() == {DOCUMENTS}
    assert not estimate.holds_seeds


def test_where_documents_agree_the_unit_is_the_run():
    """Their number does not matter: the test is that of the runs' means."""
    runs = np.array([0.3, 0.1, 0.4])
    for documents in (20, 2000):
        estimate = estimate_of(Crossed(np.tile(runs[:, None, None], (1, documents, 1))))
        test = ttest_1samp(runs, 0)
        assert estimate.p_value() == pytest.approx(test.pvalue)
        assert estimate.interval() == pytest.approx(tuple(test.confidence_interval(0.95)))
        assert estimate.holds_seeds


@pytest.mark.parametrize("axis", [0, 2])
def test_two_sources_that_add_up_are_welchs_test(axis):
    """The mean of x_s + z_d has the error of the difference of two samples, x and -z."""
    generator = np.random.default_rng(1)
    few, documents = generator.normal(0.5, size=4), generator.normal(size=25)
    shape = (4, 1, 1) if axis == 0 else (1, 1, 4)
    estimate = estimate_of(Crossed(few.reshape(shape) + documents[None, :, None]))
    test = ttest_ind(few, -documents, equal_var=False)
    assert estimate.degrees_of_freedom == pytest.approx(test.df)
    assert estimate.p_value() == pytest.approx(test.pvalue)
    assert estimate.interval() == pytest.approx(tuple(test.confidence_interval(0.95)))
    other = SEEDS if axis == 0 else DRAWS
    assert estimate.sources[other].standard_error == pytest.approx(few.std(ddof=1) / 2)
    assert estimate.sources[DOCUMENTS].standard_error == pytest.approx(documents.std(ddof=1) / 5)


def test_pseudo_values_of_ratios_are_what_leaving_a_document_out_shows():
    generator = np.random.default_rng(2)
    losses = generator.uniform(1, 9, (2, 24))
    added = losses[..., None] * generator.uniform(0, 0.1, (2, 24, 3))

    def contrast(kept, draw):
        first, second = (added[m][kept, draw].sum() / losses[m][kept].sum() for m in range(2))
        return second - 0.5 * first

    whole, pseudo = contrast_of([(1, added[1], losses[1]), (-0.5, added[0], losses[0])])
    everything = np.arange(24)
    for draw in range(3):
        full = contrast(everything, draw)
        assert whole[draw] == pytest.approx(full)
        for document in (0, 7):
            without = contrast(np.delete(everything, document), draw)
            assert pseudo[document, draw] == pytest.approx(24 * full - 23 * without)


def test_parts_that_nearly_cancel_leave_the_mean_square_of_the_factor():
    """Three documents have a mean square of 1.1 / 9, of 2 degrees, and with seeds 1 / 9, of 4.

    By the formula of Satterthwaite what is left has 0.1^2 / (1.1^2 / 2 + 1 / 4) = 0.012 degrees,
    whose 95% interval is wider than any number.
    """
    documents_D, crossed_D = np.array([1.0, 0.0, -1.0]), np.array([1.0, -2.0, 1.0]) / math.sqrt(3)
    values_SD = math.sqrt(1.1 / 3) * documents_D + np.outer([1.0, 0.0, -1.0], crossed_D)
    estimate = estimate_of(Crossed(values_SD[..., None]))
    assert estimate.sources[DOCUMENTS].standard_error == pytest.approx(math.sqrt(1.1 / 9))
    assert estimate.degrees_of_freedom == pytest.approx(2)
    assert estimate.interval()[1] == pytest.approx(4.302653 * math.sqrt(1.1 / 9), rel=1e-5)


def test_documents_of_unequal_length_count_as_fewer():
    """One long document among 24 short ones: (24 + 24)^2 / (24 + 576) = 3.84 of equal length."""
    values = np.random.default_rng(3).normal(size=(1, 25, 1))
    tokens = np.array([1.0] * 24 + [24.0])
    estimate = estimate_of(Crossed(values, tokens_D=tokens))
    assert estimate.sources[DOCUMENTS].degrees_of_freedom == pytest.approx(2.84)


def test_what_does_not_vary_has_no_error():
    still = estimate_of(Crossed(np.full((3, 20, 3), 0.25)))
    assert (still.standard_error, still.interval(), still.p_value()) == (0, (0.25, 0.25), 0)
    assert Estimate(0.0, still.sources).p_value() == 1


def test_one_document_that_holds_everything_is_refused():
    with pytest.raises(UserError, match="one document holds all"):
        contrast_of([(1.0, np.ones((3, 1)), np.array([0.0, 0.0, 2.0]))])


# Standard deviations that every effect adds to the mean, relative to each other.
CASES: dict[str, dict[str, float]] = {
    "documents": {"d": 1},
    "seeds": {"s": 1},
    "draws": {"k": 1},
    "alike": {"s": 1, "d": 1, "k": 1},
    "seeds and documents": {"s": 1, "d": 1},
    "seeds and draws": {"s": 1, "k": 1},
    "draws and documents": {"d": 1, "k": 1},
    "mostly seeds": {"s": 1, "d": 0.5, "k": 0.3, "sd": 0.3, "sk": 0.4, "dk": 0.2, "sdk": 0.2},
    "all of all": dict.fromkeys(("s", "d", "k", "sd", "sk", "dk", "sdk"), 1),
    # what seeds, documents and draws do together, with nothing that each does by itself
    "crossed": {"sdk": 1},
}
NARROW, WIDE = (0.93, 0.97), (0.93, 0.99)
TWO_SEEDS = (0.925, 0.99)  # their spread has one degree of freedom, and is often far too small


def noise(generator, shape, tail):
    """Mean 0 and variance 1; over documents with tails or skewed."""
    if shape[1] > 1 and tail == "t3":
        return generator.standard_t(3, shape) / math.sqrt(3)
    if shape[1] > 1 and tail == "skewed":  # skewness 1.75
        drawn = generator.lognormal(0, 0.5, shape)
        return (drawn - math.exp(0.125)) / math.sqrt(math.expm1(0.25) * math.exp(0.25))
    return generator.normal(size=shape)


def covered(case, seeds, documents, draws, *, tail="normal", spread=0.0, repetitions=REPETITIONS):
    """Coverage: how often the interval of a difference between two models holds its truth, 0.1.

    Tokens of documents are lognormal with that spread. What an effect adds is drawn for the mean
    of a document; both models share the rest of their sums.
    """
    generator = np.random.default_rng(len(case) + 10 * seeds + documents + draws)
    axes, sizes = {"s": 0, "d": 1, "k": 2}, (seeds, documents, draws)
    hits = 0
    for _ in range(repetitions):
        rate = np.full(sizes, 0.1)
        for effect, deviation in CASES[case].items():
            shape = tuple(sizes[axes[axis]] if axis in effect else 1 for axis in axes)
            rate = rate + deviation * math.sqrt(math.prod(shape)) * noise(generator, shape, tail)
        tokens = generator.lognormal(6, spread, documents)
        shared = tokens * generator.normal(3, 0.5, documents)
        contrasts = [
            contrast_of(
                [
                    (1, shared[:, None] + tokens[:, None] * rate[seed], tokens),
                    (-1, np.repeat(shared[:, None], draws, axis=1), tokens),
                ]
            )
            for seed in range(seeds)
        ]
        values = np.stack([pseudo for _, pseudo in contrasts])
        mean = float(np.mean([whole.mean() for whole, _ in contrasts]))
        low, high = estimate_of(Crossed(values, mean, tokens)).interval()
        hits += low <= 0.1 <= high
    return hits / repetitions


@pytest.mark.parametrize("case", [name for name in CASES if name != "crossed"])
def test_intervals_hold_seeds_documents_and_draws_at_once(case):
    share = covered(case, 3, 30, 3)
    assert is_within(share, REPETITIONS, NARROW), share


@pytest.mark.stress
@pytest.mark.parametrize(("seeds", "draws"), [(1, 1), (1, 3), (2, 3), (3, 1), (3, 3), (5, 3)])
@pytest.mark.parametrize("documents", [20, 50, 100])
@pytest.mark.parametrize(
    ("tail", "spread"), [("normal", 0.0), ("normal", 1.0), ("t3", 0.5), ("skewed", 0.5)]
)
def test_intervals_hold_every_mixture_of_sources(seeds, documents, draws, tail, spread):
    """Within 93-97%, with two seeds 91.6-98%; skewed documents alone are covered in 91.6% or more.

    What nothing does by itself is covered in up to 99%.
    """
    several = {"s": seeds > 1, "d": True, "k": draws > 1}
    for case, effects in CASES.items():
        if not all(several[factor] for effect in effects for factor in effect):
            continue
        share = covered(case, seeds, documents, draws, tail=tail, spread=spread, repetitions=2000)
        print(seeds, documents, draws, tail, spread, case, share)
        limits = WIDE if case in ("crossed", "all of all") else NARROW
        if seeds == 2:
            limits = TWO_SEEDS
        assert is_within(share, 2000, limits), (case, share)
