"""Statements on curvature where the truth is known by construction."""

import math

import numpy as np
import pytest

from dynamics.mechanism.averages import at_equal_loss, averaged
from study.design import with_controls
from study.soups import SoupSettings
from tests.study.claimed import SPEC, rows_of, run_of, study_of, table
from train.run.optimization import Lawa

YES, NO, OPEN, NONE = {"supported"}, {"contradicted"}, {"not decided"}, {"not tested"}


def jitter(*of) -> float:
    """A factor around 1 of its own for everything."""
    seed = sum(ord(letter) * 31**place for place, letter in enumerate(str(of))) % 2**32
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
