"""The models of forecasts where the truth is known, cooldowns of a table, and the command."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dynamics.forecast.models import (
    LEVEL,
    MODELS,
    Cooldown,
    Forecast,
    ForecastScore,
    Scored,
    back_test,
    verdict,
)
from dynamics.forecast.page import MeasuredStudy
from tests.present import present
from tests.study.ablation import tiny
from tests.study.claimed import SPEC, rows_of, run_of, study_of
from tests.study.commands import printed, refused
from tests.study.synthetic import change_losses, write_study

PERSISTENCE, RATIO, OURS = MODELS
ONE, TWO = run_of("one"), run_of("two", peak=3e-3)
STUDY = study_of(ONE, TWO, curvature=True, controls=False, labels={"one": "one", "two": "two"})


def cooldown(label: str = "one", *, tokens_end: int = 1000, log_rate: float = 0.5) -> Cooldown:
    """A cooldown to be forecast."""
    return Cooldown(label, label, label, 8, 800, 0.02, log_rate, tokens_end, None)


def drawn(generator, groups: int, seeds: int, *, a: float, b: float, noise: float):
    """Cooldowns with log end - log start = a log growth + b log rate + noise."""
    cooldowns = []
    for group in range(groups):
        for seed in range(seeds):
            tokens_end, log_rate = int(generator.integers(900, 1600)), generator.normal(0.3, 0.2)
            name = f"{group}, seed {seed}"
            sample = cooldown(name, tokens_end=tokens_end, log_rate=log_rate)
            sample = replace(sample, group=str(group), stem=str(group))
            change = a * sample.growth + b * log_rate + generator.normal(0, noise)
            cooldowns.append(replace(sample, error_end=sample.error * math.exp(change)))
    return cooldowns


def rng(seed: int = 0) -> np.random.Generator:
    """A generator of its own."""
    return np.random.default_rng(seed)


def test_persistence_alone_needs_no_other_run():
    """Nothing says how far off it is."""
    assert PERSISTENCE.forecast(cooldown(), []) == Forecast(0.02, None)
    assert [model.forecast(cooldown(), []) for model in MODELS[1:]] == [None, None]
    assert (
        OURS.forecast(replace(cooldown(), log_rate=None), drawn(rng(), 9, 1, a=1, b=1, noise=0))
        is None
    )


def test_mean_ratio_has_the_interval_of_a_new_normal_value():
    """The textbook's mean +- t s sqrt(1 + 1/n), of the logs."""
    ratios = (1.3, 1.5, 1.9, 2.4)
    others = [replace(cooldown(f"of {ratio}"), error_end=ratio * 0.02) for ratio in ratios]
    forecast = present(RATIO.forecast(cooldown(), others))
    logs = np.log(ratios)
    half = stats.t.ppf(0.95, 3) * logs.std(ddof=1) * math.sqrt(1 + 1 / 4)
    assert forecast.error == pytest.approx(0.02 * math.exp(logs.mean()))
    low, high = (0.02 * math.exp(logs.mean() + sign * half) for sign in (-1, 1))
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
    assert ForecastScore(PERSISTENCE, [scored]).covered == (0, 0)


def test_the_verdict_needs_ten_cooldowns_and_groups_that_agree():
    """With the truth known to one model it is nearer in nearly all groups; three groups of four
    seeds are twelve cooldowns, whose smallest p is 0.25.
    """
    few = back_test(drawn(rng(), 9, 1, a=0.8, b=1.2, noise=0.01))
    assert verdict(few) == "Not decided: 9 cooldowns rank the models, 10 would decide."
    many = back_test(drawn(rng(), 20, 1, a=0.8, b=1.2, noise=0.01))
    assert verdict(many).startswith("Best: tokens and learning rate is nearer than")
    p_value = float(verdict(many).partition(", p ")[2].partition(")")[0])
    nearer = int(verdict(many).partition(" for ")[2].partition(" of ")[0])
    assert p_value == pytest.approx(stats.binomtest(nearer, 20).pvalue, rel=0.05)
    seeds = back_test(drawn(rng(), 3, 4, a=0.8, b=1.2, noise=0.01))
    assert verdict(seeds).startswith("Not decided: ")


def test_terms_that_are_one_are_not_fitted():
    """Equal growth and equal rates, but for rounding, are one term."""
    others = [
        replace(cooldown(str(number), log_rate=0.1 + number * 1e-17), error_end=0.02 + number)
        for number in range(5)
    ]
    assert OURS.fit(others) is None


def test_cooldowns_hold_what_was_measured_by_their_start(tmp_path):
    """Errors that grow as the root of the step, and by half in the anneal; no noise."""
    error = lambda _, model: 0.01 * (1.5 if model.step == 400 else 1.0) * math.sqrt(model.step)  # noqa: E731
    rows = rows_of(tmp_path, STUDY, error, noise=0.0, trace=lambda *_: 3.0)
    for row in rows:
        row["peak_lr"] = {"two": 3e-3}.get(row["run"], 1e-3)
    source = MeasuredStudy(STUDY, rows, tmp_path)
    first, second = source.cooldowns(SPEC)
    assert [first.label, second.label] == ["tiny: one", "tiny: two"]
    assert first.tokens == 320 * ONE.tokens_per_step
    assert first.growth == pytest.approx(math.log(400 / 320))
    assert present(first.error_end) / first.error == pytest.approx(1.5 * 1.25**0.5)
    assert [first.log_rate, second.log_rate] == pytest.approx([0.0, math.log(3)])

    # a start knows nothing of later steps, the end included
    start = next(row for row in rows if (row["run"], row["step"]) == ("one", 160))
    before = source.at(ONE, start, SPEC)
    for row in rows:
        if row["step"] > 160:
            row[f"quant/{SPEC}/kl_divergence"] *= 9
    assert source.at(ONE, start, SPEC) == before


@pytest.fixture
def root(tmp_path):
    """Studies of two peaks and of one, each with results of every checkpoint."""
    whole = tiny()
    quantization = whole.quantization.model_copy(update={"methods": (), "by_block": ()})
    for name, runs in (("both", whole.runs[:2]), ("single", whole.runs[2:3])):
        update = {"name": name, "runs": runs, "quantization": quantization, "soups": ()}
        write_study(tmp_path / name, whole.model_copy(update=update))
    return tmp_path


def test_the_command_says_what_each_model_forecasts(root):
    """Two runs learn from each other: one cooldown fits no interval of a ratio."""
    command = ("forecast", "both", "--run", "lr1e-3", "--root", root)
    brief, whole = printed(*command).splitlines(), printed(*command, "--all").splitlines()
    assert len(brief) <= 24
    assert max(map(len, brief)) <= 100
    assert brief[0].startswith(
        "0.001, if annealed now: KL divergence (GPTQ, 3 bits, groups of 32) of "
    )
    assert "Which model forecasts best is not decided: 2 cooldowns rank the models" in " ".join(
        brief
    )
    row = next(line.split() for line in brief if line.startswith("0.001  "))
    assert row[1:4] == ["448", "1.31M", "tokens"]
    (silent,) = (line for line in brief if line.startswith("no forecast of "))
    assert silent.startswith("no forecast of 0.001 by mean ratio; tokens and learning rate: ")

    three, four = (number for number, line in enumerate(whole) if "(lr1e-3)" in line)
    words = " ".join(" ".join(whole[three : three + 2]).split())
    assert "at step 448 (917,504 tokens); if annealed from there to" in words
    assert "by cooldowns of other runs: 1, in groups of seeds: 1" in words
    (interval,) = (line for line in whole[three:four] if "90% interval [" in line)
    assert interval.split()[0] == "persistence"
    (average,) = (line for line in whole[three:four] if "LAWA" in line)
    assert "measured at step 448, no forecast" in average


def test_other_studies_teach_and_a_lone_run_has_persistence_alone(root):
    alone = " ".join(printed("forecast", "single", "--root", root, "--all").split())
    assert "how uncertain is not known: no other cooldown to learn from" in alone
    assert "by no cooldown of another run (--from names studies that have some)" in alone
    assert "90% interval [" not in alone.replace("no forecast (95% interval)", "")
    taught = printed("forecast", "single", "--from", "both", "--root", root)
    assert " by mean ratio (10^-3 nats/token)" in " ".join(taught.split())
    assert re.search("^run .* now +persistence +mean ratio$", taught, re.MULTILINE)


def test_the_end_of_the_forecast_run_changes_nothing(root):
    words = ("forecast", "both", "--run", "lr1e-3", "--root", root)
    before = printed(*words)
    for spec in ("gptq-b3-g32", "gptq-b4-g32"):
        change_losses(root / "both", "lr1e-3", spec, kl=[0.5 * n for n in range(1, 29)])
    assert printed(*words) == before


def test_a_run_that_is_not_there_is_refused(root):
    line = refused("forecast", "both", "--run", "lr9", "--root", root)
    assert line == "both has no run lr9; take one of lr1e-3, lr3e-3"
