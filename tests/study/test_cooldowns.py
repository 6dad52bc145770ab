"""Cooldowns of a run that is trained: their cost before anything starts, and the recipe."""

import pytest

from base.errors import UserError
from base.frozen import fingerprint
from dynamics.choices.cooldowns import cost, with_cooldowns, write_recipe
from dynamics.recipes import resolve
from study.definition import load_study, save_study
from study.pipeline.steps import steps_of
from tests.present import present
from tests.study.claimed import branched, run_of, study_of
from train.run.schedules import learning_rate

STABLE = run_of("stable")  # checkpoints at 40, 80, 160, 320 and 400, an anneal from 320 on
STUDY = study_of(STABLE, run_of("other", seed=7), controls=False, name="mine")


def test_a_cooldown_leaves_its_parent_where_it_says():
    study = with_cooldowns(STUDY, ["stable"], [80, 160], 20)
    assert study.runs[:2] == STUDY.runs
    first, second = study.trained[2:]
    assert (first.name, second.name) == ("stable-cooldown80-100", "stable-cooldown160-180")
    assert study.parent_of(first) == STABLE
    assert present(first.branch_from).fingerprint == fingerprint(STABLE)
    peak = STABLE.optimizer.peak_lr
    rates = [learning_rate(first, step) for step in (80, 90, 100)]
    assert rates == pytest.approx([peak, peak / 2, 0])
    names = {step.name for step in steps_of(study)} - {step.name for step in steps_of(STUDY)}
    assert {"train-stable-cooldown80-100", "train-stable-cooldown160-180"} <= names


def test_a_tenth_is_its_length_unless_it_is_given():
    ends = [run.total_steps for run in with_cooldowns(STUDY, ["stable"], [80, 320]).trained[2:]]
    assert ends == [88, 352]


def test_the_cost_is_that_of_the_branches_alone():
    *lines, total = cost(STUDY, with_cooldowns(STUDY, ["stable", "other"], [80, 160], 20))
    assert lines[0] == "stable-cooldown80-100: 20 steps, 41K tokens"  # 20 of 16 x 128 tokens
    assert len(lines) == 4
    assert total.startswith("4 cooldowns: 164K tokens, ")
    assert total.endswith(" 1.15M tokens")  # 2 x (100 + 180) steps


@pytest.mark.parametrize(
    ("runs", "steps", "words"),
    [
        (["absent"], [80], "trains no run absent; .*take one of stable, other"),
        (["stable"], [100], "branches at step 100, stable saves none there"),
        (["stable"], [400], "anneals from step 320 on"),
    ],
)
def test_a_cooldown_of_nothing_is_refused(runs, steps, words):
    with pytest.raises(UserError, match=words):
        with_cooldowns(STUDY, runs, steps)


def test_a_branch_has_no_cooldowns():
    study = study_of(STABLE, branched(STABLE, 160, 40), controls=False)
    with pytest.raises(UserError, match="is a branch itself; give its parent, stable"):
        with_cooldowns(study, ["stable-cooldown160"], [160])


def test_the_recipe_is_the_study_with_its_cooldowns_as_often_as_it_is_run(tmp_path):
    save_study(tmp_path / STUDY.name, STUDY)
    path = tmp_path / "more.py"
    write_recipe(path, tmp_path, STUDY, ["stable"], [80, 160], 20)
    study = resolve(str(path))
    assert study.name == STUDY.name
    assert study.runs == with_cooldowns(STUDY, ["stable"], [80, 160], 20).runs
    save_study(tmp_path / STUDY.name, study)  # as running it does
    assert resolve(str(path)).runs == load_study(tmp_path / STUDY.name).runs
    with pytest.raises(UserError, match="exists already"):
        write_recipe(path, tmp_path, STUDY, ["stable"], [80], 20)
    named = STUDY.model_copy(update={"name": "mine-engine=deepspeed"})
    with pytest.raises(UserError, match="cannot have the name"):
        write_recipe(tmp_path / "new.py", tmp_path, named, ["stable"], [80], 20)
