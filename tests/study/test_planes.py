"""Named planes and planes of trajectories: the models that they go through, and their steps."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from base.errors import UserError
from curvature.settings import PlaneSettings
from slurm.site import JobLimits
from slurm.submission.arrays import arrays_of
from study.definition import Study, load_study, save_study
from study.machine.disk import needed_bytes
from study.paths import MeasuredModel
from study.planes import NamedPlane, StudyPoint
from study.recipes.resolve import resolve
from study.released import ReleasedRevision, ReleasedRun
from study.step import Step
from study.steps import steps_of


@pytest.fixture(scope="module")
def lawa() -> Study:
    return resolve("pythia-160m-lawa", "smoke")


@pytest.fixture(scope="module")
def budgets() -> Study:
    return resolve("pythia-160m-budgets", "smoke")


def by_name(study: Study) -> dict[str, Step]:
    return {step.name: step for step in steps_of(study)}


def changed(study: Study, **changes) -> Study:
    """The study with fields changed, validated as a whole."""
    return Study.model_validate(dict(study) | changes)


def through(*points: str, name: str = "ends") -> tuple[NamedPlane, ...]:
    return (NamedPlane(name=name, points=dict(zip("abc", points, strict=True))),)


def test_a_plane_through_models_of_two_runs_waits_for_both(lawa):
    steps = by_name(lawa)
    plane = steps["plane-ends"]
    ends = "stable/hf/step00000080", "wsd-164k/hf/step00000080", "stable/hf/lawa5x4-step00000080"
    assert plane.command[:4] == ("{launch}", "-m", "curvature", "slice")
    assert plane.command[4:13:3] == tuple(f"{{study}}/{path}" for path in ends)
    names = [after for word, after in pairwise(plane.command) if word == "--name"]
    assert names == ["constant rate", "annealed", "average"]
    assert {f"{path}/lineage.json" for path in ends} <= set(plane.reads)
    assert {f"export-{path.replace('/hf/', '-')}" for path in ends} <= set(plane.after)
    assert plane.outputs == ("stable/hf/step00000080/curvature/plane-ends/result.json",)
    assert plane.name in steps["report"].after


def test_quantized_weights_of_a_plane_are_kept_by_a_step_of_their_own(budgets):
    both = (*budgets.planes, *through(*budgets.planes[0].points.values(), name="again"))
    study = changed(budgets, planes=both)
    steps = by_name(study)
    dense = steps["dense-wsd-164k-step00000080-gptq-b3-g32"]
    place = "wsd-164k/hf/step00000080/dense/gptq-b3-g32"
    assert dense.outputs == (f"{place}/result.json",)
    assert "--dense" in dense.command
    assert dense.command[-2:] == ("--out", f"{{study}}/{place}")
    # one serves both planes, and what it keeps is counted once
    for name in ("ends", "again"):
        assert dense.name in steps[f"plane-{name}"].after
        assert dense.outputs[0] in steps[f"plane-{name}"].reads
        assert f"{{study}}/{place}" in steps[f"plane-{name}"].command
    kept = [needed_bytes(each)["quantized weights"] for each in (budgets, study)]
    assert kept[0] == kept[1] > 0


def test_the_plane_of_a_trajectory_is_of_a_run_and_projects_its_branches(budgets):
    steps = by_name(budgets)
    pca = steps["pca-stable"]
    words = pca.command[4 : pca.command.index("--data")]
    fitted = [f"{{study}}/stable/hf/step000000{step}" for step in (32, 40, 72, 80)]
    branches = (("wsd-81.9k", 36), ("wsd-81.9k", 40), ("wsd-164k", 76), ("wsd-164k", 80))
    projected = [f"{{study}}/{run}/hf/step000000{step}" for run, step in branches]
    assert words == (*fitted, *(word for path in projected for word in ("--project", path)))
    assert pca.outputs == ("stable/hf/step00000080/curvature/pca/result.json",)
    assert len({name for name in pca.after if name.startswith("export")}) == 8


def test_averages_and_replicates_have_no_part_in_trajectories(lawa):
    assert {model.average for each in lawa.branched_runs for model in each.models} == {None}
    tiny = resolve("tiny", "full")
    assert [each.run for each in tiny.branched_runs] == ["lr6e-3-seed1", "lr7.2e-2-seed1"]
    for trajectory in tiny.branched_runs:
        assert list(trajectory.branches) == [trajectory.run.replace("-seed1", "-control-seed1")]


def stage(name: str, parent: str | None, *steps: int, **more: Any) -> ReleasedRun:
    revisions = tuple(ReleasedRevision(name=f"step{step}", step=step) for step in steps)
    windows = (2,) if len(steps) > 1 else ()
    return ReleasedRun(
        name=name,
        model="b",
        source="a/b",
        parent=parent,
        revisions=revisions,
        windows=windows,
        **more,
    )


def test_stages_of_a_released_model_are_a_trajectory(lawa):
    stages = (stage("stage1", None, 1, 2, 3), stage("anneal", "stage1", 4))
    study = changed(
        lawa, runs=stages, planes=through("stage1@step3/lawa2", "stage1@step3", "anneal@step4"),
        averaged_steps=(), labels={},
    )  # fmt: skip
    (trajectory,) = study.branched_runs
    assert [model.revision for model in trajectory.models] == ["step1", "step2", "step3"]
    assert [model.revision for model in trajectory.branches["anneal"]] == ["step4"]
    (plane,) = study.resolved_planes
    assert plane.points["c"] == StudyPoint("anneal", MeasuredModel(4, revision="step4"), None)
    members = ("stage1/hf/step2", "stage1/hf/step3")
    assert plane.points["a"] == StudyPoint("stage1", MeasuredModel(3, "lawa2", members), None)
    assert by_name(study)["pca-stage1"].after[0] == "download-stage1-step3"


def test_a_slice_of_a_stage_goes_through_the_checkpoint_before_or_is_refused(lawa):
    """That of its first one is the last one of the stage before; an average has none."""
    quantization = lawa.quantization.model_copy(update={"by_block": ("gptq-b3-g32",)})
    stages = (stage("stage1", None, 1, 2), stage("anneal", "stage1", 4))
    without: dict[str, Any] = {"planes": (), "pca": None, "averaged_steps": (), "labels": {}}
    study = changed(lawa, runs=stages, quantization=quantization, **without)
    steps = by_name(study)
    # after the model itself
    assert steps["slice-stage1"].command[5] == "{study}/stage1/hf/step1"
    assert steps["slice-anneal"].command[5] == "{study}/stage1/hf/step2"
    assert "download-stage1-step2" in steps["slice-anneal"].after

    soup = stage("main", None, 4, average_of=("anneal",))
    with pytest.raises(ValidationError, match="main has no checkpoint before its last one, and a"):
        changed(study, runs=(*stages, soup))
    tiny = resolve("tiny", "smoke")
    first = tiny.trained[0]
    one = first.model_copy(update={"save_steps": first.save_steps[-1:]})
    with pytest.raises(ValidationError, match=f"{first.name} has no .* goes through both; save"):
        changed(tiny, runs=(one,), averaged_steps=(), soups=(), planes=())


def test_a_slice_of_a_cooldown_with_one_checkpoint_goes_through_that_which_it_leaves(budgets):
    quantization = budgets.quantization.model_copy(update={"by_block": ("gptq-b3-g32",)})
    cooldown = next(run for run in budgets.trained if run.name == "wsd-81.9k")
    one = cooldown.model_copy(update={"save_steps": cooldown.save_steps[-1:]})
    runs = tuple(one if run == cooldown else run for run in budgets.runs)
    study = changed(budgets, runs=runs, quantization=quantization)
    command = by_name(study)["slice-wsd-81.9k"].command
    assert command[4:6] == (
        "{study}/wsd-81.9k/hf/step00000040",
        "{study}/stable/hf/step00000032",
    )


def test_quantized_weights_of_a_released_model_are_counted(lawa):
    """By transformers' modules: those of two points in fp32, once however many planes there are."""
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 500}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    blocks = model.model.layers.modules()
    linear = sum(module.weight.numel() for module in blocks if isinstance(module, torch.nn.Linear))

    config = json.dumps({"model_type": "llama", **shape})
    stages = (stage("stage1", None, 1, 2, config=config), stage("anneal", "stage1", 4))
    points = ("stage1@step1", "stage1@step1/gptq-b3-g32", "stage1@step2/gptq-b3-g32")
    study = changed(
        lawa, runs=stages, planes=through(*points) + through(*points, name="again"),
        pca=None, averaged_steps=(), labels={},
    )  # fmt: skip
    assert needed_bytes(study)["quantized weights"] == 2 * linear * 4


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("stable", "'stable' names no checkpoint; write RUN@STEP"),
        ("stabel@80", "'stabel@80': no run 'stabel'; did you mean stable?"),
        ("stable@81", "stable has no checkpoint '81' that is measured; take one of"),
        ("wsd-164k@80/lawa5x4", "'lawa5x4' is no average of that checkpoint (it has none)"),
        ("stable@80/lawa5x9", "(it has lawa5x4), and no spec"),
        ("stable@80/lawa5x4/gptq-b3-g0032", "write gptq-b3-g32 instead of gptq-b3-g0032"),
        ("stable@80/w4a4-g32", "w4a4-g32 rounds activations too, it is no point of a plane"),
        ("stable@40", "plane ends goes through one model twice; give three"),
    ],
)
def test_points_that_are_none_are_refused_where_the_study_is_made(lawa, point, message):
    with pytest.raises(ValidationError) as refused:
        changed(lawa, planes=through("stable@40", point, "wsd-164k@80"))
    assert message in str(refused.value)


def test_a_plane_has_three_points_and_a_name_of_its_own(lawa):
    with pytest.raises(ValidationError, match="at least 3 items"):
        NamedPlane(name="two", points={"a": "stable@40", "b": "stable@80"})
    with pytest.raises(ValidationError, match="two planes share a name among ends, ends"):
        changed(lawa, planes=lawa.planes * 2)


def test_a_trajectory_without_a_plane_is_refused(lawa):
    tiny = resolve("tiny", "smoke")
    message = "no run with 3 checkpoints has others that branch from it"
    with pytest.raises(ValidationError, match=message):
        changed(tiny, pca=PlaneSettings())
    with pytest.raises(ValidationError, match=message):
        changed(lawa, runs=lawa.runs[:1], planes=(), averaged_steps=(), pca=PlaneSettings())


def test_settings_of_planes_are_refused_where_nothing_has_them(lawa):
    study = resolve("pythia-160m-lawa", "smoke", ("slice.grid=7", "pca.grid=9"))
    assert (study.slice.grid, study.pca and study.pca.grid) == (7, 9)
    assert resolve("pythia-160m-lawa", "smoke", ("pca=null",)).pca is None
    with pytest.raises(UserError, match=r"slice.grid=7: .* measures nothing by block"):
        resolve("pythia-160m-schedules", "smoke", ("slice.grid=7",))


def test_a_study_on_disk_has_its_points_in_their_order(lawa, tmp_path):
    save_study(tmp_path, lawa)
    assert list(load_study(tmp_path).planes[0].points) == ["constant rate", "annealed", "average"]


def test_planes_are_arrays_after_those_that_quantize_for_them(budgets):
    arrays = arrays_of(budgets, JobLimits())
    names = [array.name for array in arrays]
    assert names[-3:] == ["dense", "planes", "final"]
    assert arrays[-2].elements == (("plane-ends",), ("pca-stable",))
