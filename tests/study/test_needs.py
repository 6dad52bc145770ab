"""Hardware that steps take: every recipe on one GPU and on eight, and how a job's processes
share a step.
"""

import json
from pathlib import Path

import pytest

from base.errors import UserError
from base.frozen import fingerprint
from dynamics.recipes import RECIPES
from dynamics.recipes import resolve as recipe
from study.definition import Study, load_study, save_study
from study.machine.hardware import UNKNOWN_BYTES, Hardware, planned
from study.machine.needs import ON_GPU, Needs
from study.machine.run_configurations import write_run_configurations
from study.pipeline.step import Step, resolve
from study.pipeline.steps import steps_of
from train.planning.flops import GPUS
from train.planning.memory import rank_memory
from train.run.config import load_run

NOWHERE = Path("/nonexistent")
PLACEHOLDERS = ("{launch}", "{device}", "{sharding}", "{cores}", "{python}", "{study}", "{root}")


def needs_on(study: Study, gpus: int, kind: str = "h100") -> Needs:
    return Needs(study, planned(gpus, kind, 16), NOWHERE)


def steps_by_kind(study: Study) -> dict[str, Step]:
    """The first step of each kind."""
    return {step.kind: step for step in reversed(steps_of(study))}


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("olmo2-7b-lr", 8),
        *((name, 1) for name in RECIPES if name != "tiny"),
        *(pytest.param(name, 8, marks=pytest.mark.stress) for name in RECIPES if name != "tiny"),
    ],
)
def test_every_recipe_has_a_plan_for_one_gpu_and_eight_or_names_the_machine_that_takes_it(
    name, gpus
):
    study = recipe(name, "full")
    needs = needs_on(study, gpus)
    if name.startswith("olmo2-7b") and gpus == 1:  # 18 bytes a parameter are 131 GB
        with pytest.raises(
            UserError, match=r"fits no layout on 1 x h100 of 80 GB; .* that take it: 4 x h100, "
        ):
            _ = needs.trainings
        return
    for run in study.trained:
        fitted, ranks = needs.trainings[run.name]
        assert fingerprint(fitted) == fingerprint(run), "a layout is not part of what a run is"
        assert rank_memory(fitted, ranks).bytes <= GPUS["h100"].memory_bytes
        assert 1 <= ranks <= gpus
        assert fitted.batch_size % (fitted.data_parallel_size(ranks) * fitted.micro_batch_size) == 0
    for kind, step in steps_by_kind(study).items():
        machine = needs.machine(step)
        assert machine.gpus <= gpus
        assert (machine.gpus > 0) == (kind in ON_GPU)
        words = resolve(step.command, NOWHERE, machine)
        assert not [word for word in words if word.startswith(PLACEHOLDERS)]
        # `curvature step` refuses several ranks that share nothing
        assert kind != "step" or machine.gpus == 1 or "fsdp" in words


def test_a_machine_that_a_refusal_names_takes_the_study_and_half_of_it_does_not():
    study = recipe("olmo2-7b-lr", "full")
    assert needs_on(study, 4).trainings["lr3e-4"].ranks == 4
    with pytest.raises(UserError):
        _ = needs_on(study, 2).trainings


def test_runs_that_can_train_at_once_have_a_share_each():
    study = recipe("olmo2-190m-lr", "full")  # four runs, and the anneals that branch from them
    assert {training.ranks for training in needs_on(study, 8).trainings.values()} == {2}
    assert {training.ranks for training in needs_on(study, 3).trainings.values()} == {1}
    sevens = needs_on(recipe("olmo2-7b-lr", "full"), 8).trainings["lr3e-4"]
    # two at a time on four GPUs each would have to recompute every layer
    assert (sevens.ranks, sevens.run.recompute) == (8, "none")


def test_on_the_cpu_everything_is_as_the_recipe_has_it():
    study = recipe("tiny", "smoke")
    needs = Needs(study, Hardware(2), NOWHERE)
    steps = steps_by_kind(study)
    launch = needs.machine(steps["train"]).launch
    assert launch[launch.index("--nproc-per-node") + 1] == "2"
    for step in steps_of(study):
        machine = needs.machine(step)
        assert (machine.device, machine.gpus, machine.sharding) == ("cpu", 0, "none")
        assert step.kind == "train" or machine.launch == ("{python}",)
    assert [training.run for training in needs.trainings.values()] == list(study.trained)


def test_runs_of_one_rank_train_on_all_cores_without_torchrun():
    study = recipe("tiny", "full")
    needs = Needs(study, Hardware(2), NOWHERE)
    train = steps_by_kind(study)["train"]
    assert (needs.at_once, train.slots, needs.machine(train).launch) == (2, 1, ("{python}",))


def test_ranks_of_a_job_share_what_can_be_shared():
    study = recipe("olmo2-190m-lr", "full")
    steps = steps_by_kind(study)
    four = Needs(study, Hardware(4, ("0", "1", "2", "3"), "GPU", UNKNOWN_BYTES), NOWHERE)
    ranks = {kind: four.ranks(step, 4) for kind, step in steps.items()}
    assert {
        kind: ranks[kind] for kind in ("train", "quantize", "blocks", "curvature")
    } == dict.fromkeys(("train", "quantize", "blocks", "curvature"), 4)
    assert {kind: ranks[kind] for kind in ("step", "slice", "methods")} == dict.fromkeys(
        ("step", "slice", "methods"), 1
    )


def test_a_model_that_one_gpu_does_not_hold_is_shared():
    study = recipe("olmo2-190m-lr", "full")
    step = steps_by_kind(study)["step"]
    whole = needs_on(study, 1).hessian_memory(step)
    assert whole is not None
    smaller = Needs(study, Hardware(16, ("0", "1", "2", "3"), "other", int(whole * 0.9)), NOWHERE)
    assert smaller.sharding(step) == "fsdp"
    assert smaller.ranks(step, 4) == 4
    assert 1 < smaller.gpus(step) <= 4
    shared = smaller.hessian_memory(step)
    assert shared is not None
    assert shared <= smaller.hardware.gpu_bytes
    assert smaller.gpus(steps_by_kind(study)["quantize"]) == 1


def test_layouts_of_the_hardware_at_hand_are_written_and_nothing_else_changes(tmp_path):
    study = recipe("olmo2-7b-lr", "full")
    for gpus in (4, 8):
        trainings = needs_on(study, gpus).trainings
        write_run_configurations(
            tmp_path, study, {name: training.run for name, training in trainings.items()}
        )
        save_study(tmp_path, study)
        for run in study.trained:
            path = tmp_path / run.name / "run.json"
            assert load_run(path) == trainings[run.name].run
            assert json.loads(path.read_text())["fingerprint"] == fingerprint(run)
    four, eight = (needs_on(study, gpus).trainings["lr3e-4"].run for gpus in (4, 8))
    assert four != eight
    assert load_study(tmp_path) == study
