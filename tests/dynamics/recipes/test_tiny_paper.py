"""tiny-paper: the recipes of the paper at another size, put together without training one twice."""

import subprocess
from itertools import chain

import pytest

from dynamics.recipes import pythia
from dynamics.recipes.pythia import FULL, Size
from dynamics.recipes.tiny_paper import TINY
from study.content import loaded
from study.design import control_among
from study.recipes.resolve import resolve, whole_recipes
from tests.interpreter import interpreter
from tests.runs import PROJECT, environment
from train.run.config import RunConfig
from train.run.schedules import learning_rate

SCALE = 250  # the paper's steps over these
OF_PAPER = {  # experiments, and the recipes that have them at full size
    "budgets": "pythia-160m-budgets",
    "schedules": "pythia-160m-schedules",
    "learning-rates": "pythia-160m-lr",
    "averages": "pythia-160m-lawa",
    "data": "pythia-70m-kumar",
    "curvature": "pythia-160m-lr",
    "weight-decay": "pythia-160m-weight-decay",
    "adamc": "pythia-160m-decay",
}


def lengths(run: RunConfig) -> tuple[int, int | None, int | None]:
    """Steps of a run, and where it branches off and cools down."""
    branch, anneal = run.branch_from, run.schedule.anneal
    left = branch.step if branch else None
    return run.total_steps, left, anneal.start_step if anneal else None


def test_every_controlled_experiment_on_pythia_is_there_in_order():
    of_paper = {name for name in whole_recipes() if name.startswith("pythia-")}
    assert of_paper == set(OF_PAPER.values())
    for profile in ("full", "smoke"):
        study = resolve("tiny-paper", profile)
        assert [experiment.name for experiment in study.experiments] == list(OF_PAPER)


@pytest.mark.parametrize("experiment", OF_PAPER)
def test_an_experiment_has_the_runs_axes_and_controls_of_its_recipe(experiment):
    """In the proportions of the paper: every length is a 250th."""
    tiny, paper = resolve("tiny-paper"), resolve(OF_PAPER[experiment])
    part = tiny.part(next(each for each in tiny.experiments if each.name == experiment))
    first = [run for run in part.trained if run.seed == part.trained[0].seed]
    assert len(first) * 2 == len(part.trained), "two seeds"

    # The stable run of the budgets controls the run of the sweep with its peak, too.
    expected = {lengths(run) for run in paper.trained if run.name not in paper.controls}
    compared = [run for run in first if run.name not in part.controls]
    if experiment != "weight-decay":  # whose values are fewer
        of_paper = [run for run in paper.trained if run.name not in paper.controls]
        assert len(compared) == len(of_paper)
    scaled = {
        tuple(None if steps is None else SCALE * steps for steps in lengths(run))
        for run in compared
    }
    assert scaled == expected
    assert [axis.key for axis in part.axes] == [axis.key for axis in paper.axes]
    # every anneal has its control
    for run in first:
        if run.schedule.anneal:
            assert control_among(first, run) is not None
    assert {run.schedule.warmup_tokens for run in first} == {8 * 1024}


def test_what_is_one_training_is_trained_once():
    study = resolve("tiny-paper")
    trained = [run for run in study.trained if run.seed == 1]
    rates = {}
    for run in trained:
        start = run.branch_from.step if run.branch_from else 0
        rates[run.name] = (
            run.model.hidden_size,
            run.optimizer.model_dump_json(),
            start,
            tuple(round(learning_rate(run, step), 9) for step in range(start + 1, run.total_steps)),
        )
    assert len(set(rates.values())) == len(rates)
    # the run at the common peak, rate and rule is in four experiments
    common = next(run.name for run in trained if len(run.factors) == 3)
    within = [each.name for each in study.experiments if common in each.runs]
    assert within == ["schedules", "learning-rates", "curvature", "weight-decay", "adamc"]
    # that of the budgets keeps the averages and the checkpoints of LAWA's figure
    stable = next(run for run in trained if run.name == "stable-seed1")
    assert {*TINY.budgets, *TINY.lawa_ends} <= set(stable.save_steps)
    assert [average.name for average in stable.averages] == ["lawa5x2"]
    assert {model.step for model in study.models_of(stable) if model.average} >= {*TINY.lawa_ends}


def test_sizes_are_the_papers_over_250():
    def steps(size: Size) -> list[int]:
        return [size.end, size.cooldown, size.lawa_cooldown, size.lawa_every, size.averaged_from]

    def ends(size: Size) -> list[int]:
        return [*size.budgets, *size.doublings, *size.lawa_ends]

    assert [SCALE * each for each in chain(steps(TINY), ends(TINY))] == list(
        chain(steps(FULL), ends(FULL))
    )
    assert TINY.tokens_of(1) * 512 == FULL.tokens_of(1)
    # as many peaks on either side of the common one, which is among them
    places = [size.peaks.index(size.peak) for size in (TINY, FULL)]
    assert places == [2, 2]
    assert TINY.weight_decay in TINY.decays


def test_figures_and_claims_that_it_names_are_there():
    study = resolve("tiny-paper")
    figures = {figure.name for figure in loaded("figures")}
    claims = {claim.name for claim in loaded("claims")}
    for experiment in study.experiments:
        assert set(experiment.figures) <= figures
        assert set(experiment.claims) <= claims
        assert experiment.figures
        assert experiment.claims


@pytest.mark.stress
def test_the_smoke_profile_runs_to_its_report(tmp_path):
    command = ("study", "run", "tiny-paper", "--profile", "smoke")
    done = subprocess.run(
        [interpreter(), "-m", *command, "--root", str(tmp_path)],
        cwd=PROJECT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "tiny-paper-smoke/report.html").read_text()
    places = [page.index(f'<section id="{experiment}">') for experiment in OF_PAPER]
    assert places == sorted(places)


def test_sizes_name_models_of_their_own():
    models = [run.model for run in pythia.data_volumes(TINY)]
    assert set(models) == {TINY.smaller_model}
    assert TINY.smaller_model.hidden_size < TINY.model.hidden_size
