"""Correlations, claims on flatness, and the formula, on observations with a known law."""

import math

import numpy as np
import pytest
from scipy.stats import norm, rankdata, spearmanr

from dynamics.mechanism.checkpoints import at_equal_loss, averaged, training_of
from dynamics.mechanism.correlation import mean_ratio, partial_correlation
from dynamics.mechanism.formula import (
    BITS,
    FORMULA,
    LOSS,
    MODELS,
    RATE,
    Observations,
    errors,
    fit,
    observe,
    predict,
    score,
)
from study.design import with_controls
from study.measurements.curvature import RELATIVE, TRACE
from study.results.table import Row
from study.soups import SoupSettings
from tests.present import present
from tests.study.claimed import SPEC, rows_of, run_of, study_of, table
from train.run.optimization import Lawa


def test_runs_that_share_their_first_part_are_one_training():
    """One branches from the other, or both were trained from the start."""
    annealed, other = run_of("annealed"), run_of("other", peak=2e-3)
    constant = annealed.schedule.model_copy(update={"anneal": None})
    stable = run_of("stable", schedule=constant, save_steps=(40, 80, 160, 320, 400))
    study = study_of(stable, annealed, other)
    found = {run.name: training_of(study, run) for run in study.trained}
    assert found == {
        "stable": "stable",
        "annealed": "stable",
        "other": "other",
        "other-control": "other",
    }


def planted(generator, *, effect: float, trainings: int = 8, checkpoints: int = 6):
    """Tokens drive both quantities; `effect` is that of the first on the second besides."""
    tokens = np.tile(np.linspace(0, 3, checkpoints), trainings)
    of_training = np.repeat(generator.normal(size=trainings), checkpoints)  # of a training, in all
    first = tokens + of_training + 0.3 * generator.normal(size=len(tokens))
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


YES, NO, OPEN, NONE = {"supported"}, {"contradicted"}, {"not decided"}, {"not tested"}


def jitter(*words) -> float:
    """A factor around 1 of its own for everything."""
    seed = sum(ord(letter) * 31**index for index, letter in enumerate(str(words))) % 2**32
    return math.exp(0.1 * np.random.default_rng(seed).normal())


def judged(directory, study, rows) -> dict[str, set[str]]:
    """Claim -> its verdicts by all measures."""
    for row in rows:
        if "curvature/trace" in row:
            row |= {"curvature/relative_trace": row["curvature/trace"] / 1000, "peak_lr": 1e-3}
    lines = table(directory, study, rows)
    return {name: {detail.outcome for detail in line.details} for name, line in lines.items()}


@pytest.mark.parametrize(
    ("runs", "power", "expected"),
    [(6, 1, YES), (6, -1, NO), (6, 0, OPEN), (2, 1, NONE)],
    ids=["sharper", "flatter", "neither", "too few"],
)
def test_sharpness_is_what_loss_and_tokens_do_not_explain(tmp_path, runs, power, expected):
    peaks = [run_of(f"run{index}", peak=1e-3 * 2**index) for index in range(runs)]
    study = study_of(*peaks, curvature=True, controls=False)

    def sharpness(run, model) -> float:
        return jitter(run.name) ** 4 * jitter(run.name, model.step)

    rows = rows_of(
        tmp_path,
        study,
        lambda run, model: (  # tokens drive both
            1e-4 * model.step * sharpness(run, model) ** power * jitter(run.name, model.step, "own")
        ),
        trace=lambda run, model: 900 * (model.step / 400) * sharpness(run, model),
    )
    assert judged(tmp_path, study, rows)["sharpness"] == expected
    for row in rows:
        row["curvature/lambda_max_converged"] = False
    assert judged(tmp_path, study, rows)["sharpness"] == expected | NONE


TRAININGS = with_controls([run_of(f"seed{seed}", seed=seed) for seed in range(4)])


@pytest.mark.parametrize(
    ("sharper", "worse", "expected"),
    [(1.4, 1.5, YES), (0.7, 1.5, NO), (1.0, 1.5, OPEN), (1.4, 1.0, OPEN)],
)
def test_sharpening_is_against_the_control(tmp_path, sharper, worse, expected):
    study = study_of(*TRAININGS, curvature=True)
    assert len(study.controls) == 4

    def after(run, model) -> bool:
        return model.step > 320 and bool(run.schedule.anneal)

    rows = rows_of(
        tmp_path,
        study,
        # what grows with tokens grows in the control too
        lambda run, model: (
            1e-4 * model.step * jitter(run.name) * (worse if after(run, model) else 1)
        ),
        trace=lambda run, model: (
            model.step * jitter(run.name, "trace") * (sharper if after(run, model) else 1)
        ),
    )
    assert judged(tmp_path, study, rows)["sharpening"] == expected


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_an_average_is_compared_at_its_loss(tmp_path, factor):
    lawa = Lawa(interval_steps=16, window=5)
    runs = [run_of(f"seed{seed}", seed=seed, averages=(lawa,)) for seed in range(4)]
    soup = SoupSettings(name="soup", steps=(160, 320))
    study = study_of(
        *runs, curvature=True, controls=False, averaged_steps=(320, 400), soups=(soup,)
    )

    def loss(run, model) -> float:
        return 4.0 - model.step / 400 - (0.15 if model.average else 0)

    rows = rows_of(
        tmp_path,
        study,
        # log error is linear in the loss
        lambda run, model: (
            math.exp(-loss(run, model))
            * (factor * jitter(run.name) ** 0.2 if model.average else 1)
            / loss(run, model)
        ),
        loss=loss,
        trace=lambda run, model: 900.0,
        noise=0.0,
    )
    for row in rows:
        if row["average"]:  # curvature half as large, at every step
            values = {"trace": 450.0 * jitter(row["run"]), "lambda_max": 10.0 * jitter(row["run"])}
            row |= {f"curvature/{name}": value for name, value in values.items()}
    averages = averaged(study, rows)
    assert {(average.kind, average.row["step"]) for average in averages} == {
        ("LAWA", 320),
        ("soup", 320),
    }
    for average in averages:
        expected = math.log(factor * jitter(average.training) ** 0.2)
        assert at_equal_loss(study, average) == pytest.approx(expected)
    verdicts = judged(tmp_path, study, rows)["flat-averages"]
    assert verdicts == {0.6: YES, 1.0: YES | OPEN, 1.5: YES | NO}[factor]
    assert f"quant/{SPEC}/cross_entropy" in rows[0]


EMPTY = Row.of({"study": "s", "run": "r", "phase": "stable", "step": 1})
SLOPES = {RELATIVE.name: 0.8, BITS: 1.1, RATE: -0.3}


def planted_observations(generator, trainings=12, checkpoints=5, spread=0.1) -> Observations:
    """Two specs; every training has a constant of its own, and every checkpoint a little noise."""
    size = 2 * trainings * checkpoints
    names = [f"run{index % trainings}" for index in range(size)]
    of_training = np.arange(size) % trainings
    rates = generator.normal(size=trainings)[of_training]
    terms = {RELATIVE.name: generator.normal(size=size) - 0.5 * rates, RATE: rates}
    terms[BITS] = np.where(np.arange(size) < size // 2, -2 * math.log(7), -2 * math.log(15))
    terms |= {name: generator.normal(size=size) for name in (TRACE.name, LOSS, "tokens")}
    shift = spread * generator.normal(size=trainings)[of_training]
    target = -1 + sum(SLOPES[name] * terms[name] for name in SLOPES) + shift
    target = target + 0.05 * generator.normal(size=size)
    return Observations([EMPTY] * size, [""] * size, names, of_training % 2, target, terms)


def test_slopes_are_recovered_within_two_standard_errors():
    generator = np.random.default_rng(0)
    inside = []
    for _ in range(100):
        fitted = fit(planted_observations(generator))
        inside += [
            abs(fitted.coefficients[name] - slope) < 2 * fitted.standard_errors[name]
            for name, slope in SLOPES.items()
        ]
    # 2 standard errors are 93% of Student's distribution at 11 degrees
    assert 0.88 < np.mean(inside) < 0.99


def test_predictions_are_of_the_half_that_was_not_fitted():
    data = planted_observations(np.random.default_rng(1))
    first = data.halves == 0
    design = np.column_stack([np.ones(len(first)), *(data.terms[name] for name in FORMULA.terms)])
    normal = design[~first].T @ design[~first]
    solved = np.linalg.solve(normal, design[~first].T @ data.target_N[~first])
    assert predict(data, FORMULA)[first] == pytest.approx(design[first] @ solved)
    theory = data.terms[RELATIVE.name] + data.terms[BITS]
    constant = (data.target_N - theory)[~first].mean()
    assert predict(data, MODELS["theory"])[first] == pytest.approx(theory[first] + constant)


def test_the_score_tells_what_explains_from_what_does_not():
    data = planted_observations(np.random.default_rng(2))
    assert score(data, FORMULA).r_squared > 0.95
    assert score(data, MODELS["loss"]).r_squared < 0.7
    assert score(data, FORMULA).median_factor < 1.15
    assert max(errors(data, FORMULA).values()) < min(errors(data, MODELS["loss"]).values())


def test_seeds_of_a_setting_are_in_one_half(tmp_path):
    runs = [
        run_of(f"peak{peak:g}-seed{seed}", peak=peak, seed=seed)
        for peak in (1e-3, 2e-3, 4e-3)
        for seed in (1, 2)
    ]
    study = study_of(*runs, curvature=True, controls=False)
    rows = rows_of(tmp_path, study, lambda run, model: 0.02, trace=lambda run, model: 900.0)
    for row in rows:
        row |= {"curvature/relative_trace": 0.5, "peak_lr": 1e-3}
    data = present(observe(study, rows))
    halves = dict(zip(data.trainings, data.halves.tolist(), strict=True))
    assert [halves[run.name] for run in runs] == [0, 0, 1, 1, 0, 0]
    assert (
        observe(study_of(*runs[:2], curvature=True, controls=False), rows[: len(rows) // 3]) is None
    )
    rows[0]["curvature/relative_trace"] = -0.1  # noise takes it below 0: no logarithm
    assert len(present(observe(study, rows)).target_N) == len(data.target_N) - 1
