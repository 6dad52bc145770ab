"""The models of forecasts where the truth is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dynamics.forecast.backtest import Score, Scored, back_test, verdict
from dynamics.forecast.models import LEVEL, MODELS, Forecast
from tests.dynamics.forecast.cooldowns import cooldown, drawn, rng
from tests.present import present

BY_NAME = {model.name: model for model in MODELS}
PERSISTENCE, POWER, RATIO = list(MODELS)[:3]
OURS = BY_NAME["tokens and miniature cooldown"]


def test_baselines_need_no_other_run():
    """The run's own power law is exact here; nothing says how far off a baseline is."""
    target = cooldown(exponent=0.5, tokens_end=3200)
    start = 0.01 * 8**0.5
    for model, expected in ((PERSISTENCE, start), (POWER, 2 * start)):
        forecast = present(model.forecast(target, []))
        assert forecast.error == pytest.approx(expected)
        assert forecast.interval is None
    silent = [model for model in MODELS if model.forecast(target, []) is None]
    assert silent == list(MODELS[2:])


def test_a_power_law_is_not_fitted_to_two_checkpoints():
    target = cooldown()
    assert POWER.forecast(replace(target, past=target.past[-2:]), []) is None


def test_mean_ratio_has_the_interval_of_a_new_normal_value():
    """The textbook's mean +- t s sqrt(1 + 1/n), of the logs."""
    ratios = (1.3, 1.5, 1.9, 2.4)
    others = [
        replace(sample, error_end=ratio * math.exp(sample.log_error))
        for ratio in ratios
        for sample in [cooldown(f"of {ratio}")]
    ]
    forecast = present(RATIO.forecast(cooldown(), others))
    logs = np.log(ratios)
    half = stats.t.ppf(0.95, 3) * logs.std(ddof=1) * math.sqrt(1 + 1 / 4)
    start = math.exp(cooldown().log_error)
    assert forecast.error == pytest.approx(start * math.exp(logs.mean()))
    low, high = (start * math.exp(logs.mean() + sign * half) for sign in (-1, 1))
    assert forecast.interval == pytest.approx((low, high))


def test_coefficients_are_recovered():
    """Within 2 standard errors in 95% of samples, by Student's t at 58 degrees of freedom; 400
    samples have a standard error of 1.1%.
    """
    generator, truth, inside = rng(), np.array([0.8, 1.2]), []
    for _ in range(400):
        fit = present(OURS.fit(drawn(generator, 60, 1, a=truth[0], b=truth[1], noise=0.1)))
        errors = np.sqrt(fit.variance * np.diag(fit.inverse_PP))
        inside.append(np.abs(fit.coefficients_P - truth) < 2 * errors)
    expected = 1 - 2 * stats.t.sf(2, 58)
    assert np.mean(inside, axis=0) == pytest.approx([expected] * 2, abs=0.035)


@pytest.mark.parametrize("groups", [4, 12])
def test_nine_of_ten_intervals_hold_the_error(groups):
    """1,000 samples have a standard error of 0.95%."""
    generator, covered = rng(1), []
    for _ in range(1000):
        *others, target = drawn(generator, groups + 1, 1, a=0.8, b=1.2, noise=0.1)
        forecast = present(OURS.forecast(replace(target, error_end=None), others))
        low, high = present(forecast.interval)
        covered.append(low <= target.error_end <= high)
    assert np.mean(covered) == pytest.approx(LEVEL, abs=0.03)


def test_seeds_of_a_group_do_not_count_as_runs():
    """Two groups of five seeds leave no degree of freedom to two coefficients."""
    assert OURS.fit(drawn(rng(), 2, 5, a=0.8, b=1.2, noise=0.1)) is None
    fit = present(OURS.fit(drawn(rng(), 3, 5, a=0.8, b=1.2, noise=0.1)))
    assert fit.degrees_of_freedom == 1


def test_no_forecast_sees_the_runs_that_are_left_out():
    """Other ends of both seeds of a group leave the group's forecasts as they are, and no others."""
    cooldowns = drawn(rng(), 5, 2, a=0.8, b=1.2, noise=0.1)
    changed = [
        replace(sample, error_end=7 * sample.error_end) if sample.group == "3" else sample
        for sample in cooldowns
    ]
    for before, after in zip(back_test(cooldowns), back_test(changed), strict=True):
        for first, second in zip(before.forecasts, after.forecasts, strict=True):
            is_fitted = before.model.terms or first.forecast.interval
            is_same = first.forecast == second.forecast
            assert is_same == (first.cooldown.group == "3" or not is_fitted)


def test_scores_are_of_the_measured_end():
    (target, *_) = drawn(rng(), 1, 1, a=0.8, b=1.2, noise=0.0)
    scored = Scored(target, Forecast(target.error_end / 2, None), target.error_end)
    assert scored.error == pytest.approx(math.log(2))
    assert scored.is_covered is None
    assert Score(PERSISTENCE, [scored]).covered == (0, 0)


def test_the_verdict_needs_ten_cooldowns_and_groups_that_agree():
    """With the truth known to one model it is nearer in nearly all groups; three groups of four
    seeds are twelve cooldowns, whose smallest p is 0.25.
    """
    few = back_test(drawn(rng(), 9, 1, a=0.8, b=1.2, noise=0.01))
    assert verdict(few) == "Not decided: 9 cooldowns rank the models, 10 would decide."
    many = back_test(drawn(rng(), 20, 1, a=0.8, b=1.2, noise=0.01))
    assert verdict(many).startswith("Best: tokens and miniature cooldown is nearer than")
    seeds = back_test(drawn(rng(), 3, 4, a=0.8, b=1.2, noise=0.01))
    assert verdict(seeds).startswith("Not decided: ")


def test_terms_that_are_one_are_not_fitted():
    """Equal growth and equal signals, but for rounding, are one term."""
    others = [
        replace(
            cooldown(str(place)), error_end=0.02 + place, signals={"error": 0.1 + place * 1e-17}
        )
        for place in range(5)
    ]
    assert OURS.fit(others) is None
