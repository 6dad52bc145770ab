"""Promises of all recipes, and changes of their settings."""

import os
from pathlib import Path

import pytest

from base.errors import UserError
from base.frozen import fingerprint
from dynamics.recipes import RECIPES, recipe_names, resolve
from dynamics.recipes.shown import recipe_lines, summary
from study.definition import load_study, save_study
from study.text.kinds import PreparedText
from train.run.branching import MUST_AGREE
from train.run.schedules import learning_rate

PROFILES = [(recipe, profile) for recipe in RECIPES for profile in ("full", "smoke")]
ISSUE = (
    *(
        "tiny",
        "olmo2-7b-lr",
        "olmo2-7b-lr-cosine300b",
        "olmo2-190m-lr",
        "olmo2-1b-lr",
        "pythia-160m-budgets",
    ),
    "olmo2-30m-lr",
    *(
        "pythia-160m-lr",
        "pythia-160m-decay",
        "pythia-160m-lawa",
        "pythia-160m-schedules",
        "pythia-160m-weight-decay",
        "pythia-70m-kumar",
    ),
    "trajectory",
)


def test_every_recipe_that_was_asked_for_is_there():
    assert sorted(recipe_names()) == sorted(ISSUE)


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_every_profile_builds_and_survives_its_file(tmp_path, recipe, profile):
    study = resolve(recipe, profile)
    assert study.name == (recipe if profile == "full" else f"{recipe}-smoke")
    save_study(tmp_path, study)
    assert load_study(tmp_path) == study


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_a_branch_goes_on_as_its_parent(recipe, profile):
    """All that decides an update but the rate is the same, and the rate is continuous."""
    study = resolve(recipe, profile)
    for run in study.trained:
        if run.branch_from:
            parent = study.parent_of(run)
            assert [getattr(run, key) for key in MUST_AGREE] == [
                getattr(parent, key) for key in MUST_AGREE
            ]
            step = run.branch_from.step
            assert learning_rate(run, step) == learning_rate(parent, step) > 0
            assert run.save_steps[0] > step


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_every_run_has_a_label_of_its_own(recipe, profile):
    study = resolve(recipe, profile)
    labels = [study.label_of(run) for run in study.runs]
    assert len(set(labels)) == len(labels)
    if study.varied:
        first = {group.runs[0].name for group in study.groups}
        others = [run for run in study.varied.values if run in first - study.controls]
        places = {(study.varied.values[run], study.varied.groups.get(run)) for run in others}
        assert len(places) == len(others)


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_runs_read_the_texts_of_the_study(recipe, profile):
    """Paths of a run start at ROOT/STUDY/RUN."""
    study = resolve(recipe, profile)
    for run in study.trained:
        paths = [
            os.path.normpath(Path("ROOT/STUDY") / run.name / str(path))
            for path in (run.data.train, run.data.held_out, run.data.tokenizer)
        ]
        if isinstance(study.text, PreparedText):
            assert study.text.train is not None
            owner, name = study.text.tokenizer.split("/")
            texts = [f"ROOT/texts/{file.name}" for file in (study.text.train, study.text.held_out)]
            assert paths == [*texts, f"ROOT/texts/{owner}--{name}"]
        else:
            assert paths == [
                f"ROOT/STUDY/data/{part}" for part in ("train", "held_out", "corpus/tokenizer")
            ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_small_profile_has_the_structure_of_the_full_one(recipe):
    """The same kinds of runs, at most two peaks or budgets of each, on a model of the same
    family and engine.
    """
    full, small = (resolve(recipe, profile) for profile in ("full", "smoke"))
    assert small.ranks <= 2
    assert len(small.trained) <= 7
    for study in (full, small):
        assert {run.engine for run in study.trained} == {full.trained[0].engine}
        assert {run.model.family for run in study.trained} == {full.trained[0].model.family}

    def kinds(study):
        return {
            (
                run.schedule.phase.kind,
                run.schedule.anneal is None,
                run.branch_from is None,
                bool(run.averages),
            )
            for run in study.trained
        }

    assert kinds(small) == kinds(full)
    assert bool(small.averaged_steps) == bool(full.averaged_steps)
    assert bool(small.soups) == bool(full.soups) or recipe == "tiny"


def test_settings_reach_parents_and_branches():
    settings = ("optimizer.weight_decay=0", "parallel.tensor=4")
    study, plain = (resolve("olmo2-7b-lr", "full", chosen) for chosen in (settings, ()))
    assert study.name == "olmo2-7b-lr-weight_decay=0-tensor=4"
    assert [run.name for run in study.runs] == [run.name for run in plain.runs]
    for run, before in zip(study.trained, plain.trained, strict=True):
        assert (run.optimizer.weight_decay, run.parallel.tensor) == (0, 4)
        if run.branch_from and before.branch_from:
            assert (
                run.branch_from.fingerprint
                == fingerprint(study.parent_of(run))
                != before.branch_from.fingerprint
            )


def test_layout_alone_leaves_the_parents_what_they_are():
    study, plain = (
        resolve("olmo2-7b-lr", "full", chosen) for chosen in (("parallel.tensor=4",), ())
    )
    assert [run.branch_from for run in study.trained] == [run.branch_from for run in plain.trained]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none", "full"), "no recipe 'none'; take one of tiny, olmo2-7b-lr"),
        (("tiny", "large"), "recipe tiny has no profile 'large'; take one of full, smoke"),
        (("pythia-70m-kumar", "full", ("engine=megatron",)), "the megatron engine trains olmo2"),
        (("olmo2-7b-lr", "full", ("total_steps=10",)), "save_steps must be in 0..10"),
        (("trajectory", "full"), "trajectory needs a released model; give --set source="),
        (("trajectory", "full", ("source=a/b", "seed=1")), "--set: unknown key 'seed'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, words):
    with pytest.raises(UserError, match=words) as refused:
        resolve(*arguments)
    assert "\n" not in str(refused.value)


def test_the_list_says_what_training_takes():
    lines = list(recipe_lines())
    assert [line.split(" (")[0] for line in lines] == [*RECIPES, "trajectory"]
    big = next(line for line in lines if line.startswith("olmo2-7b-lr ("))
    assert big.endswith("[2.06T tokens, 61,357 H100-hours of training at 45% of the peak]")
    small = next(line for line in lines if line.startswith("olmo2-30m-lr ("))
    assert small.endswith("[804M tokens, 0.5 H100-hours of training at 10% of the peak]")


def test_a_study_is_told_with_its_sources_and_branches():
    lines = list(summary(resolve("olmo2-7b-lr", "full")))
    anneal = next(line for line in lines if line.startswith("  lr3e-4-anneal50b:"))
    assert (
        "cosine to 10% of the peak at 5,000,000,000,000 tokens, linear anneal from step 72000 to zero;"
        " from step 72000 of lr3e-4 to step 83921, 4,194,304 tokens each" in anneal
    )
    assert any(
        "arXiv 2501.00656, section 4.1" in line for line in lines if line.startswith("  source: ")
    )
