"""Averages of a constant rate, and of an anneal with QAT, as arms beside the annealed weights."""

from pathlib import Path
from typing import Any

import pytest

from dynamics.figures.averages import averages
from study.definition import Study
from study.figures.canvas import Canvas
from study.recipes.parts import annealed
from study.results.averages import against_annealed, averagings_of, compared_models
from study.soups import SoupSettings
from study.steps import steps_of
from tests.dynamics.drawing import chart_of, drawn, layers_of
from tests.study.claimed import SPEC, rows_of, run_of, study_of, table
from train.run.config import RunConfig
from train.run.optimization import Ema, Lawa
from train.run.perturbation import Qat

STEPS = (320, 360, 400)
KEPT = (Lawa(interval_steps=16, window=5), Ema(decay=0.9))
DECAY = "decay-equivalent average (sqrt) of steps 320, 360 and 400"


def arms_of(seed: int) -> list[RunConfig]:
    """A stable run, and from its step 320 an anneal and one with QAT, all to step 400."""
    template = run_of(f"stable{seed}", seed=seed)
    constant = template.schedule.model_copy(update={"anneal": None})
    stable = run_of(f"stable{seed}", seed=seed, schedule=constant, save_steps=STEPS, averages=KEPT)
    anneal = annealed(stable, f"anneal{seed}", start=320, save_steps=(400,))
    qat = annealed(stable, f"qat{seed}", start=320, save_steps=STEPS[1:])
    return [
        stable,
        anneal.model_copy(update={"averages": ()}),
        qat.model_copy(update={"perturbation": Qat(spec="rtn-b3-g32")}),
    ]


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of(
        *(run for seed in (1, 2, 3) for run in arms_of(seed)),
        averaged_steps=(400,),
        soups=(
            SoupSettings(name="decay-sqrt", steps=STEPS, decay="sqrt"),
            SoupSettings(name="soup-late", steps=STEPS[1:]),
        ),
    )


def error(run: RunConfig, model) -> float:
    """Half as large of averages."""
    return 0.04 * (0.5 if model.average else 1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, study) -> Path:
    return tmp_path_factory.mktemp("arms") / study.name


@pytest.fixture(scope="module")
def rows(directory, study) -> list[Any]:
    return rows_of(directory, study, error)


def test_arms_end_at_equal_tokens(study, rows):
    """A run has its weights, what it keeps, and the soups whose steps it saves."""
    ends: dict[str, list[Any]] = {}
    for row in rows:
        if row["tokens"] == 400 * study.trained[0].tokens_per_step:
            ends.setdefault(row["run"], []).append((row["average"], row["phase"]))
    kept = [None, "lawa5x16", "ema0.9x1"]
    assert ends["stable1"] == [(name, "stable") for name in (*kept, "decay-sqrt", "soup-late")]
    assert ends["qat1"] == [(name, "anneal") for name in (*kept, "soup-late")]
    assert ends["anneal1"] == [(None, "anneal")]
    assert all(row[f"quant/{SPEC}/relative_error"] for row in rows)

    kinds = {average.name: average.label(averagings_of(study)) for average in averagings_of(study)}
    assert kinds == {
        "lawa5x16": "LAWA",
        "ema0.9x1": "EMA",
        "decay-sqrt": "decay-equivalent average",
        "soup-late": "soup",
    }
    titles = [title for _, title, row in compared_models(study, rows) if row["run"] == "stable1"]
    assert titles[-2:] == [DECAY, "soup of steps 360 and 400"]


def test_the_step_names_the_decay(study):
    steps = {step.name: step for step in steps_of(study) if step.kind == "average"}
    decay = steps["average-stable1-decay-sqrt-step00000400"]
    assert decay.command[-3:] == ("{study}/stable1/hf/step00000400", "--decay", "sqrt")
    assert decay.after == tuple(f"export-stable1-step00000{step}" for step in STEPS)
    assert "--decay" not in steps["average-qat1-soup-late-step00000400"].command
    assert "average-qat1-decay-sqrt-step00000400" not in steps


def test_a_soup_of_the_control_is_compared_with_its_anneal(study, rows, directory):
    runs = {run.name: run for run in study.trained}
    soups = {title: made for title, made in against_annealed(study).items() if made.step}
    ends = [soups[DECAY].end_of(study, runs[name]) for name in ("anneal2", "qat2")]
    assert ends == [("stable2", 400)] * 2
    # what the run keeps itself comes first
    assert soups["soup of steps 360 and 400"].end_of(study, runs["qat2"]) == ("qat2", 400)
    details = table(directory, study, rows)["averages"].details
    judged = {detail.outcome for detail in details if detail.measure.startswith(DECAY)}
    assert judged == {"supported"}


def test_averages_of_the_control_at_its_end_are_in_place_of_the_anneal(study, rows, directory):
    """No anneal has one before it; QAT anneals are no anneals of this claim."""
    runs = {run.name: run for run in study.trained}
    compared = against_annealed(study)
    kept = [f"{average.describe()}, in place of the anneal" for average in KEPT]
    assert list(compared) == [DECAY, "soup of steps 360 and 400", *kept]
    ends = {
        compared[title].end_of(study, runs[name]) for title in kept for name in ("anneal2", "qat2")
    }
    assert ends == {("stable2", 400)}
    details = table(directory, study, rows)["averages"].details
    outcomes = {
        detail.measure.partition(": ")[0]: (detail.outcome, detail.runs) for detail in details
    }
    assert [outcomes[title] for title in kept] == [("supported", "1 of 1 lower")] * 2

    # A control that is made to be compared with is no plan of its own.
    made = study_of(run_of("plain", averages=KEPT, save_steps=STEPS), averaged_steps=(400,))
    assert len(made.controls) == 1
    assert against_annealed(made) == {}


def test_the_figure_has_a_star_for_each_soup(study, rows, directory):
    chart = chart_of(drawn(averages, Canvas(study, rows, directory)))
    encodings = [layer.get("encoding", {}) for layer in layers_of(chart["concat"][0])]
    shape = next(encoding["shape"] for encoding in encodings if "shape" in encoding)
    looks = dict(zip(shape["scale"]["domain"], shape["scale"]["range"], strict=True))
    stars = [series for series, shape in looks.items() if shape.startswith("M")]
    assert stars == ["decay-equivalent average", "soup"]
    assert looks.keys() - set(stars) == {"weights", "LAWA", "EMA"}
