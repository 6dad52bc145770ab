"""The formula on observations that are made by it."""

import math

import numpy as np
import pytest

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
from study.measurements.curvature import RELATIVE, TRACE
from study.results.table import Row
from tests.present import present
from tests.study.claimed import rows_of, run_of, study_of

EMPTY = Row.of({"study": "s", "run": "r", "phase": "stable", "step": 1})
SLOPES = {RELATIVE: 0.8, BITS: 1.1, RATE: -0.3}


def planted(generator, trainings=12, checkpoints=5, spread=0.1) -> Observations:
    """Two specs; every training has a constant of its own, and every checkpoint a little noise."""
    size = 2 * trainings * checkpoints
    names = [f"run{index % trainings}" for index in range(size)]
    of_training = np.arange(size) % trainings
    rates = generator.normal(size=trainings)[of_training]
    terms = {RELATIVE: generator.normal(size=size) - 0.5 * rates, RATE: rates}
    terms[BITS] = np.where(np.arange(size) < size // 2, -2 * math.log(7), -2 * math.log(15))
    terms |= {name: generator.normal(size=size) for name in (TRACE, LOSS, "tokens")}
    own = spread * generator.normal(size=trainings)[of_training]
    target = -1 + sum(SLOPES[name] * terms[name] for name in SLOPES) + own
    target = target + 0.05 * generator.normal(size=size)
    return Observations([EMPTY] * size, [""] * size, names, of_training % 2, target, terms)


def test_slopes_are_recovered_within_two_standard_errors():
    generator = np.random.default_rng(0)
    inside = []
    for _ in range(100):
        fitted = fit(planted(generator))
        inside += [
            abs(fitted.coefficients[name] - slope) < 2 * fitted.standard_errors[name]
            for name, slope in SLOPES.items()
        ]
    # 2 standard errors are 93% of Student's distribution at 11 degrees
    assert 0.88 < np.mean(inside) < 0.99


def test_predictions_are_of_the_half_that_was_not_fitted():
    data = planted(np.random.default_rng(1))
    first = data.halves == 0
    design = np.column_stack([np.ones(len(first)), *(data.terms[name] for name in FORMULA.terms)])
    normal = design[~first].T @ design[~first]
    solved = np.linalg.solve(normal, design[~first].T @ data.target_N[~first])
    assert predict(data, FORMULA)[first] == pytest.approx(design[first] @ solved)
    theory = data.terms[RELATIVE] + data.terms[BITS]
    constant = (data.target_N - theory)[~first].mean()
    assert predict(data, MODELS["theory"])[first] == pytest.approx(theory[first] + constant)


def test_the_score_tells_what_explains_from_what_does_not():
    data = planted(np.random.default_rng(2))
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
