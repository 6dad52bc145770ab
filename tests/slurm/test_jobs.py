"""Arrays that a study is cut into, worked out by hand from its steps."""

import json
import random

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from slurm.__main__ import app
from slurm.site import EXAMPLE, JobLimits, ResourcesByKind, Site, load_site
from slurm.submission.arrays import JobArray, arrays_of
from slurm.submission.submit import dry_run
from study.definition import Study
from study.recipes.resolve import resolve, whole_recipes
from study.released import ReleasedRevision, ReleasedRun, ReleasedSoup
from study.steps import steps_of
from study.text.own import TextOptions
from study.text_kinds import USES
from tests.study.ablation import tiny

USUAL = JobLimits()
SMALL = JobLimits(checkpoints_per_job=3, specs_per_job=1, max_array_size=7)
PROFILES = [(name, profile) for name in whole_recipes() for profile in ("full", "smoke")]


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
@pytest.mark.parametrize("limits", [USUAL, SMALL], ids=["usual", "small"])
def test_every_step_runs_once_and_after_what_it_reads(recipe, profile, limits):
    check_order(resolve(recipe, profile), limits)


@pytest.mark.parametrize("limits", [USUAL, SMALL, JobLimits(checkpoints_per_job=1)])
def test_averages_of_released_revisions_run_after_their_downloads(tmp_path, limits):
    """A soup of two stages, and of a revision that is fetched for it alone."""
    early, late, fetched, first, last = (
        ReleasedRevision(name=name, step=int(name[6:]))
        for name in ("stable100", "stable200", "stable400", "anneal50", "anneal100")
    )
    stable = ReleasedRun(
        name="stable",
        model="b",
        source="a/b",
        revisions=(early, late),
        windows=(2,),
        ingredients=(fetched,),
    )
    soup = ReleasedSoup(name="mine", members=("stable/stable400", "anneal/anneal100"))
    anneal = ReleasedRun(
        name="anneal",
        model="b",
        source="a/b",
        parent="stable",
        revisions=(first, last),
        windows=(2,),
        soups=(soup,),
    )
    runs = [stable.model_dump(), anneal.model_dump()]
    changed = {"runs": runs, "soups": (), "averaged_steps": (), "labels": {}}
    study = Study.model_validate(tiny().model_dump() | changed)
    arrays = check_order(study, limits)
    assert {"download", "average", "quantize-soups-1"} <= arrays.keys()


@pytest.mark.parametrize("limits", [USUAL, SMALL], ids=["usual", "small"])
def test_tasks_along_training_run_once_where_the_models_are(limits):
    """The paper's settings: tasks of every checkpoint beside its quantization, none at the end."""
    study = resolve("pythia-160m-budgets", "full", ("settings=paper",))
    arrays = [
        array for name, array in check_order(study, limits).items() if name.startswith("tasks")
    ]
    of_tasks = [step.name for step in steps_of(study) if step.kind == "tasks"]
    listed = [name for array in arrays for element in array.elements for name in element]
    assert sorted(listed) == sorted(of_tasks)
    # Two specs in one job, or one each.
    assert len({array.name.split(".")[0] for array in arrays}) == (1 if limits == USUAL else 2)


def check_order(study: Study, limits: JobLimits) -> dict[str, JobArray]:
    """Every step is in one element that is not empty, after all that it comes after."""
    steps = {step.name: step for step in steps_of(study)}
    arrays = {array.name: array for array in arrays_of(study, limits)}
    listed = [name for array in arrays.values() for element in array.elements for name in element]
    assert sorted(listed) == sorted(steps)
    assert all(
        0 < len(array.elements) <= (limits.max_array_size or 1001) for array in arrays.values()
    )
    order = {name: number for number, name in enumerate(listed)}
    late = [
        (step.name, before)
        for step in steps.values()
        for before in step.after
        if order[before] > order[step.name]
    ]
    assert late == []
    assert all(element for array in arrays.values() for element in array.elements)
    return arrays


def on_one_node(site: Site) -> Site:
    resources = dict(site.resources)
    resources["train"] = site.resources.train.model_copy(update={"nodes": 1})
    return site.model_copy(update={"resources": ResourcesByKind(**resources)})


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_every_recipe_has_a_dry_run_on_the_example_site(recipe, profile):
    study, site = resolve(recipe, profile), load_site(EXAMPLE)
    ranks = 2 * site.resources.train.gpus_per_node
    if any(run.batch_size < ranks and run.engine == "deepspeed" for run in study.trained):
        # Its batches have fewer sequences than the two nodes have GPUs, and no tensor is split.
        with pytest.raises(UserError, match="fits no layout on 2 nodes"):
            list(dry_run(study, site))
        site = on_one_node(site)
    scripts = list(dry_run(study, site))
    assert len(scripts) == len(arrays_of(study, JobLimits()))
    for script in scripts:
        call, _, text = script.partition("\n")
        assert call.startswith("### sbatch --parsable --array=0")
        assert " --comment=quantdyn:TOKEN " in call
        assert text.startswith("#!/bin/bash\n#SBATCH --job-name=")
        assert f"python -m slurm job {site.root}/{study.name} " in text


def test_tiny_in_arrays():
    arrays = {array.name: array for array in arrays_of(tiny(), JobLimits(specs_per_job=1))}
    assert {name: len(array.elements) for name, array in arrays.items()} == {
        "text": 1,
        "prepare": 3,
        "train": 4,
        "export": 28,
        "quantize-1": 28,
        "quantize-2": 28,
        "curvature": 28,
        "export-averages": 12,
        "quantize-averages-1": 12,
        "quantize-averages-2": 12,
        "average": 8,
        "quantize-soups-1": 8,
        "quantize-soups-2": 8,
        "ends": 4,
        "final": 1,
    }
    # element for element the same checkpoint
    for index in range(28):
        (export,) = arrays["export"].elements[index]
        for name in ("quantize-1", "quantize-2", "curvature"):
            (step,) = arrays[name].elements[index]
            assert export.removeprefix("export-") in step


def test_branches_are_an_array_of_their_own():
    arrays = {array.name: array for array in arrays_of(resolve("olmo2-7b-lr", "full"), JobLimits())}
    assert len(arrays["train"].elements) == 4
    assert len(arrays["branches"].elements) == 7 + 4


def test_text_of_the_users_is_made_by_jobs_before_training(tmp_path):
    """A tokenizer first, then a token file per share, none of which needs a network."""
    words = [f"{number:x}" for number in range(5000)]
    documents = [
        {"text": " ".join(random.Random(seed).choices(words, k=100))} for seed in range(2000)
    ]
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps(document) + "\n" for document in documents))
    arguments = ["submit", "tiny", "--profile", "smoke", "--dry-run"]
    arguments += ["--site", str(EXAMPLE), "--text", str(source)]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "tiny-smoke-text=mine." in shown
    study = resolve("tiny", "smoke", text=TextOptions((source,)), root=tmp_path)
    arrays = {array.name: array for array in arrays_of(study, JobLimits())}
    assert arrays["text"].elements == (("tokenizer",),)
    assert arrays["prepare"].elements == tuple((f"prepare-{use}",) for use in USES)
