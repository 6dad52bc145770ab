"""The statistics of paired answers, against slower ways and another library."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binomtest

from base.errors import UserError
from quant_eval.tasks.paired import compare, mcnemar_p_value, resampled_accuracies
from quant_eval.tasks.scoring import Answers


def answers(correct):
    correct_N = np.array(correct, dtype=bool)
    names = [str(index) for index in range(len(correct_N))]
    return Answers(correct_N, correct_N & False, names, names, {"piqa": len(correct_N)})


def task(name):
    return SimpleNamespace(name=name, unanswerable=0)


def compared(full, quantized):
    """Answers to one task, compared."""
    return compare({"piqa": answers(full)}, {"piqa": answers(quantized)}, [task("piqa")], 3)


@pytest.mark.parametrize("first", [0, 1, 2, 7, 40, 900])
@pytest.mark.parametrize("second", [0, 1, 3, 7, 55, 1000])
def test_mcnemar_is_the_exact_binomial_test(first, second):
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar_p_value(first, second) == pytest.approx(expected, rel=1e-9)


def test_the_bootstrap_is_that_of_items_drawn_one_by_one():
    """20000 samples: quantiles of the two ways agree within 0.02, four standard errors of a 5%
    quantile here.
    """
    generator = np.random.default_rng(0)
    full_N, quantized_N = generator.random(50) < 0.6, generator.random(50) < 0.4
    accuracy_S, quantized_S = resampled_accuracies(
        full_N, quantized_N, 20_000, np.random.default_rng(1)
    )
    drawn_SN = generator.integers(50, size=(20_000, 50))
    slow_S, slow_quantized_S = full_N[drawn_SN].mean(1), quantized_N[drawn_SN].mean(1)
    for quick, slow in (
        (accuracy_S, slow_S),
        (quantized_S, slow_quantized_S),
        (accuracy_S - quantized_S, slow_S - slow_quantized_S),
        ((accuracy_S - quantized_S) / (1 - accuracy_S), (slow_S - slow_quantized_S) / (1 - slow_S)),
    ):
        quick_tails, tails = (np.quantile(x, [0.05, 0.25, 0.5, 0.75, 0.95]) for x in (quick, slow))
        assert quick_tails == pytest.approx(tails, abs=0.06 * (tails[-1] - tails[0]) + 1e-12)
        assert quick.std() == pytest.approx(slow.std(), rel=0.03)


def test_degradation_is_the_share_of_what_is_left_to_lose():
    """Counted by hand, as arXiv 2510.06213 has it: (Acc(W) - Acc(W_q)) / (1 - Acc(W)).

    Of 120 items one model answers 90 and the other 70: 20 more errors for 30.
    """
    full, quantized = [1] * 90 + [0] * 30, [1] * 60 + [0] * 50 + [1] * 10
    of_task = compared(full, quantized)["tasks"]["piqa"]
    assert of_task["degradation"] == pytest.approx(2 / 3)
    # Over two tasks it is that of the mean accuracies: 9/12 and 3/12, then 7/12 and 3/12.
    other = [1] * 30 + [0] * 90
    both = compare(
        {"piqa": answers(full), "sciq": answers(other)},
        {"piqa": answers(quantized), "sciq": answers(other)},
        [task("piqa"), task("sciq")],
        3,
    )
    assert both["mean"]["degradation"] == pytest.approx((12 / 24 - 10 / 24) / (12 / 24))
    low, high = of_task["intervals"]["degradation"]
    assert low < 2 / 3 < high


def test_resampling_keeps_tasks_apart():
    """Two tasks answered in full by one model, not at all by the other: no sample can differ, so
    no interval opens.
    """
    full = {"piqa": answers([1] * 6), "sciq": answers([0] * 4)}
    quantized = {"piqa": answers([0] * 6), "sciq": answers([0] * 4)}
    measured = compare(full, quantized, [task("piqa"), task("sciq")], 3)
    mean = measured["mean"]
    assert mean["accuracy"] == 0.5  # of items it would be 0.6
    assert mean["intervals"]["accuracy"] == mean["intervals"]["difference"] == [0.5, 0.5]
    assert mean["degradation"] == 1.0


def test_degradation_is_null_where_nothing_can_be_lost_relative_to():
    figures = compared([1, 1, 1, 1], [1, 0, 1, 1])["tasks"]["piqa"]
    assert figures["degradation"] is figures["intervals"]["degradation"] is None
    assert figures["undefined"].keys() == {"degradation", "intervals.degradation"}
    assert figures["difference"] == 0.25


def test_a_degradation_may_be_defined_and_its_interval_not():
    """With one of three items wrong, 8 of 27 samples hold none that is wrong."""
    figures = compared([1, 1, 0], [1, 0, 0])["tasks"]["piqa"]
    assert figures["degradation"] == pytest.approx(1.0)
    assert figures["intervals"]["degradation"] is None
    assert figures["undefined"].keys() == {"intervals.degradation"}


def test_one_item_has_no_standard_error():
    measured = compared([0], [0])
    assert measured["tasks"]["piqa"]["standard_error"] is measured["mean"]["standard_error"] is None
    assert measured["tasks"]["piqa"]["p_value"] == 1.0


@pytest.mark.parametrize("what", ["prompts", "documents"])
def test_models_that_were_asked_differently_are_not_compared(what):
    full = answers([1, 0, 1])
    other = dataclasses.replace(answers([1, 1, 1]), **{what: ["0", "changed", "2"]})
    with pytest.raises(UserError, match="piqa was put differently"):
        compare({"piqa": full}, {"piqa": other}, [task("piqa")], 3)
    with pytest.raises(UserError, match="piqa was put differently"):
        compared([1, 0, 1], [1, 0])
