"""Promises of all recipes, and changes of their settings."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from base.errors import UserError
from base.frozen import fingerprint
from study.definition import Study, load_study, save_study
from study.recipes.resolve import recipe_names, resolve, whole_recipes
from study.recipes.shown import recipe_lines, source_lines, summary
from study.steps import steps_of
from study.text_kinds import PreparedText
from tests.study.commands import printed
from train.run.branching import MUST_AGREE
from train.run.schedules import learning_rate

PROFILES = [(recipe, profile) for recipe in whole_recipes() for profile in ("full", "smoke")]


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


def parts_of(study: Study) -> list[Study]:
    """Its experiments, or the whole where it is one."""
    return [study.part(experiment) for experiment in study.experiments] or [study]


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_every_run_has_a_label_of_its_own(recipe, profile):
    study = resolve(recipe, profile)
    labels = [study.label_of(run) for run in study.runs]
    assert len(set(labels)) == len(labels)
    for part in parts_of(study):
        if part.varied:
            first = {group.runs[0].name for group in part.groups}
            others = [run for run in part.varied.values if run in first - part.controls]
            places = {(part.varied.values[run], part.varied.groups.get(run)) for run in others}
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


@pytest.mark.parametrize("recipe", whole_recipes())
def test_the_small_profile_has_the_structure_of_the_full_one(recipe):
    """The same kinds of runs, at most two peaks or budgets of each, on a model of the same
    family and engine.
    """
    full, small = (resolve(recipe, profile) for profile in ("full", "smoke"))
    assert small.ranks <= 2
    # four optimizers, each with its control
    assert max(len(part.trained) for part in parts_of(small)) <= 8
    for study in (full, small):
        assert {run.engine for run in study.trained} == {full.trained[0].engine}
        assert {run.model.family for run in study.trained} == {full.trained[0].model.family}

    def kinds(study):
        return {
            (run.schedule.phase.kind, bool(run.schedule.anneal), bool(run.branch_from))
            for run in study.trained
        }

    assert kinds(small) == kinds(full)
    averaging, of_full = ({bool(run.averages) for run in study.trained} for study in (small, full))
    assert averaging == of_full
    assert bool(small.averaged_steps) == bool(full.averaged_steps)
    assert bool(small.soups) == bool(full.soups) or recipe == "tiny"


def test_settings_reach_parents_and_branches():
    settings = ("optimizer.weight_decay=0", "parallel.tensor=4")
    study, plain = (resolve("olmo2-7b-lr", "full", chosen) for chosen in (settings, ()))
    assert study.name == "olmo2-7b-lr-weight_decay=0-tensor=4"
    assert study.settings == settings
    for run, before in zip(study.trained, plain.trained, strict=True):
        changes: dict[str, Any] = {
            "optimizer": before.optimizer.model_copy(update={"weight_decay": 0.0}),
            "parallel": before.parallel.model_copy(update={"tensor": 4}),
            "branch_from": run.branch_from,
        }
        assert run == before.model_copy(update=changes)
        if run.branch_from and before.branch_from:
            parent = fingerprint(study.parent_of(run))
            assert run.branch_from.fingerprint == parent != before.branch_from.fingerprint


def test_the_list_says_what_training_takes():
    lines = list(recipe_lines())
    assert [line.split()[0] for line in lines[1 : 1 + len(recipe_names())]] == list(recipe_names())
    cells = {line.split()[0]: line.split()[1:3] for line in lines}
    # 27,600 hours at the peak, and half to all of that again
    tokens, hours = cells["olmo2-7b-lr"]
    assert tokens == "2.06T"
    assert 42_000 < float(hours) < 56_000
    assert cells["tiny"] == ["9.83M", "on"]  # a CPU


def test_a_study_is_told_with_its_branches_and_schedules():
    lines = list(summary(resolve("olmo2-7b-lr", "full")))
    anneal = next(line for line in lines if line.startswith("lr3e-4-anneal50b "))
    assert anneal.split() == [
        *("lr3e-4-anneal50b", "0.0003", "b", "lr3e-4", "at", "72,000", "83,921", "50B", "8")
    ]
    text = " ".join(line.strip() for line in lines)
    assert (
        "schedule b: warm-up to step 2000, cosine to 10% of the peak at 5,000,000,000,000 tokens,"
        " linear anneal from step 72000 to zero" in text
    )
    assert "all runs: tokens a step 4,194,304, engine megatron" in text
    assert "arXiv 2501.00656, section 4.1" in "".join(source_lines(resolve("olmo2-7b-lr")))


MINE = Path(__file__).parent / "mine.py"
HEAD = "from study.recipes.parts import recipe\n"


def test_an_ablation_of_two_factors_takes_25_lines():
    assert len(MINE.read_text().splitlines()) <= 25
    study = resolve(str(MINE), "smoke")
    assert study.name == "rate-and-decay-smoke"
    assert study.description.endswith("on the source of Python packages")
    assert [run.name for run in study.trained if run.schedule.anneal] == [
        *("lr3e-3-wd0", "lr3e-3-wd0.1", "lr1e-2-wd0", "lr1e-2-wd0.1")
    ]
    assert [axis.name for axis in study.axes] == ["peak learning rate", "weight decay"]
    assert len(steps_of(study)) == len({step.name for step in steps_of(study)}) > 40


def test_it_is_shown_and_changed_like_any_other():
    shown = printed("show", MINE, "--profile", "smoke", "--set", "seed=7", "--all")
    assert shown.startswith("rate-and-decay-smoke-seed=7: ")
    assert "train-lr1e-2-wd0.1: " in shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no recipe; write one: a function"),
        (f"{HEAD}@recipe\ndef a(): ...\n@recipe\ndef b(): ...\n", r"2 recipes \(a, b\), not one"),
        (f"{HEAD}@recipe\ndef a(*, smoke): return 1\n", "a does not return a study"),
        (f"{HEAD}@recipe\ndef a(*, smoke):\n    return 1 / 0\n", "line 4: ZeroDivisionError"),
        ("import no_such_thing\n", "line 1: ModuleNotFoundError: No module named"),
        ("def a(:\n", "line 1: SyntaxError"),
        (
            f"{HEAD}from study.recipes.parts import study\n@recipe\ndef a(*, smoke):\n"
            "    return study([], text=None, quantization=None)\n",
            r"mine\.py: 'text':",
        ),
    ],
)
def test_a_file_without_one_recipe_is_refused_in_a_line(tmp_path, content, words):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(UserError, match=words) as refused:
        resolve(str(path))
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"does not exist; give a \.py file with a recipe"):
        resolve(str(tmp_path / "other.py"))


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x1b", "\ufffe", "\u202e"])
def test_a_label_with_a_control_character_is_refused_where_a_recipe_is_read(tmp_path, character):
    """The program that draws would abort at it."""
    path = tmp_path / "mine.py"
    labelled = f"labels={{'lr3e-3-wd0': 'low{character.encode('unicode_escape').decode()}'}},"
    source = MINE.read_text().replace("        text=TEXT,\n", f"        {labelled} text=TEXT,\n")
    path.write_text(source)
    with pytest.raises(UserError, match=r"mine\.py: 'low.*' holds a control character; remove it"):
        resolve(str(path), "smoke")
    path.write_text(
        source.replace(
            labelled, "labels={'lr3e-3-wd0': 'low \N{GREEK SMALL LETTER ETA}\xa0=\u20091'},"
        )
    )
    assert "\xa0" in resolve(str(path), "smoke").labels["lr3e-3-wd0"]


def value_at(content: Any, path: str) -> Any:
    for key in path.split("."):
        content = content[key]
    return content


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("quantization.eval_tokens", "40960", 40960),
        ("quantization.bos", "none", "none"),
        ("curvature.pairs", "8", 8),
        ("step.microbatches", "3", 3),
        ("slice.extent", "0.5", 0.5),
        ("averaged_steps", "[48, 72]", [48, 72]),
        ("detailed", "every seed", "every seed"),
    ],
)
def test_a_setting_of_the_study_changes_it_alone(path, text, value):
    plain, changed = (resolve("tiny", "smoke", each) for each in ((), (f"{path}={text}",)))
    content, before = (each.model_dump(mode="json") for each in (changed, plain))
    assert value_at(content, path) == value != value_at(before, path)
    assert content["name"].startswith(f"tiny-smoke-{path}=")
    assert content["settings"] == [f"{path}={text}"]
    assert changed.runs == plain.runs
    different = {key for key in content if content[key] != before[key]}
    assert different == {"name", "settings", path.partition(".")[0]}


def test_a_setting_changes_the_runs_that_have_its_field():
    study = resolve("tiny", "smoke", ("schedule.anneal.floor=0.5", "curvature.pairs=6"))
    assert study.name == "tiny-smoke-floor=0.5-curvature.pairs=6"
    anneals = [run.schedule.anneal for run in study.trained]
    assert [anneal and anneal.floor for anneal in anneals] == [0.5, None] * 2
    assert study.curvature
    assert study.curvature.pairs == 6


def test_long_values_are_in_the_name_by_a_hash():
    """A name is a directory, of which file systems take 255 bytes."""
    many = [f"rtn-b{bits}-g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (8, 16, 32)]
    names = {
        resolve("tiny", "smoke", (f"quantization.methods={json.dumps(methods)}",)).name
        for methods in (["rtn-b3-g32"], many, many[1:])
    }
    assert len(names) == 3
    assert "tiny-smoke-quantization.methods=_rtn-b3-g32_" in names
    assert max(map(len, names)) < 100


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("curvature.pair=8",), "no such setting; did you mean curvature.pairs[?]"),
        (("pairs=8",), "no such setting; did you mean curvature.pairs[?]"),
        (("tasks.limit=3",), "no such setting; did you mean tasks[?]"),
        (("zzz=3",), "no such setting; the nearest are zero"),
        (("curvature.device=cuda",), "no such setting"),
        (("text.vocab_size=512",), "no such setting"),
        (("runs=[]",), "no such setting"),
        (("branch_from.step=3",), "no such setting"),
        (("curvature.pairs",), "no such setting; write PATH=VALUE"),
        (("curvature.pairs=many",), "--set: 'curvature.pairs': Input should be a valid integer"),
        (("total_steps=10",), "save_steps must be in 0..10"),
        (("model.family=gpt_neox",), "the megatron engine trains olmo2"),
        *(  # one value has no standard error
            ((f"{path}=1",), f"--set: '{path}': Input should be greater than")
            for path in (
                *("curvature.pairs", "curvature.norm_pairs", "curvature.companion_pairs"),
                *("step.microbatches", "slice.sequences"),
            )
        ),
        (("quantization.dtype=fp64",), "'quantization.dtype': Input should be 'fp32' or 'bf16'"),
        (("curvature=null",), "by_block measures curvature along the steps; give curvature"),
        (("curvature=null", "curvature.pairs=8"), "curvature is None; leave one of the two out"),
        (
            ("quantization.by_block=[]", "step.microbatches=3"),
            "measures nothing by block; give quant",
        ),
        (("curvature.sequence_length=129",), "129 is beyond the context of 128 tokens of run"),
    ],
)
def test_a_setting_that_the_study_cannot_have_is_refused(settings, words):
    with pytest.raises(UserError, match=words) as refused:
        resolve("tiny", "smoke", settings)
    assert "\n" not in str(refused.value)
