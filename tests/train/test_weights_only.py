"""Permanent checkpoints of weights alone: what is written, resumed from, exported and refused."""

import json
from typing import Any

import pytest

from base.errors import UserError
from base.files import write_json
from ckpt_tools.checkpoint import verified_record
from ckpt_tools.export import export
from study.recipes.parts import annealed, lean
from tests.ckpt_tools.checkpoints import read_weights
from tests.runs import make_run, python, start_ranks
from tests.train.stalled import stalling
from tests.train.test_refusals import edit
from tests.train.trajectories import numbers, tree
from tests.waiting import wait_until
from train.run.branching import check_parent
from train.run.config import dump_run, load_run
from train.run.directory import CHECKPOINT_JSON, RunDirectory
from train.run.environment import attempts
from train.run.optimization import CosinePhase, Lawa, ScheduleConfig
from train.run.saving import SavingConfig

SAVING: dict[str, Any] = {"restart_every_steps": 4}


def full(directory: RunDirectory) -> dict[int, bool]:
    """By step of every permanent checkpoint whether training may resume from it."""
    return {
        step: verified_record(directory.checkpoint(step)).is_full
        for step in directory.complete_steps()
    }


def losses(run_dir, *, after: int = 0) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in numbers(run_dir) if row["step"] > after}


def test_weights_alone_lose_nothing(trained, tmp_path, inputs):
    """Stopped at a permanent step, killed between two, ended, and started once more."""
    whole, lean = RunDirectory(trained("dp1")), RunDirectory(tmp_path / "lean")
    steps: dict[str, Any] = {"full_steps": (10,), "average_steps": (20,)}
    make_run(
        lean.path,
        **inputs,
        save_steps=(1, 10, 13, 20),
        averages=(Lawa(interval_steps=2, window=2),),
        saving=SavingConfig(**SAVING, **steps),
    )
    command = ["train", "run", str(lean.path)]

    lean.stop_file.touch()  # preempted at step 1, which keeps weights
    assert python(*command).returncode == 0
    assert full(lean) == {1: False}
    assert lean.complete_restarts() == [1]

    never = stalling(tmp_path / "never", step=16)
    killed = start_ranks(1, "tests.train.stalled", *command, variables=never)
    wait_until((lean.checkpoint(13) / CHECKPOINT_JSON).exists, "step 13 saved", killed)
    killed.kill()
    assert full(lean) == {1: False, 10: True, 13: False}
    replayed = tree(lean.checkpoint(13))

    assert python(*command).returncode == 0
    assert attempts(lean.environment_json)[-1]["resumed_from_step"] == 12  # not the weights of 13
    assert full(lean) == {1: False, 10: True, 13: False, 20: False}
    assert tree(lean.checkpoint(13)) == replayed  # a complete checkpoint is never replaced
    assert lean.complete_restarts() == []
    averages = [path.name for path in lean.checkpoints.glob("lawa*")]
    assert averages == ["lawa2x2-step00000020"]
    assert losses(lean.path) == losses(whole.path)
    for step in (10, 20):
        weights, expected = (read_weights(run.checkpoint(step)) for run in (lean, whole))
        assert all(weights[name].equal(expected[name]) for name in expected), step
    assert export(lean.checkpoint(20), tmp_path / "hf")["max_absolute_error"] < 1e-4

    before = tree(lean.checkpoints)
    assert python(*command).returncode == 0
    assert tree(lean.checkpoints) == before
    assert json.loads(lean.status_json.read_text())["status"] == "done"


def test_an_ablation_keeps_state_where_its_anneals_leave(tmp_path, inputs):
    """As recipes make it, with DeepSpeed; an anneal from weights alone is refused."""
    parent = make_run(
        tmp_path / "parent",
        **inputs,
        engine="deepspeed",
        save_steps=(10, 13, 20),
        schedule=ScheduleConfig(warmup_tokens=4 * 256, phase=CosinePhase(horizon_tokens=25_600)),
        averages=(Lawa(interval_steps=2, window=2),),
        saving=SavingConfig(**SAVING),
    )
    anneal = annealed(parent, "anneal", start=10, save_steps=(14, 20))
    runs = lean([parent, anneal], averaged_steps=(20,))
    directories = [RunDirectory(tmp_path / run.name) for run in runs]
    for directory, run in zip(directories, runs, strict=True):
        directory.path.mkdir(exist_ok=True)
        write_json(directory.run_json, dump_run(run))
        assert python("train", "run", str(directory.path)).returncode == 0
    assert list(map(full, directories)) == [
        {10: True, 13: False, 20: False},
        {14: False, 20: False},
    ]
    kept = [[path.name for path in run.checkpoints.glob("lawa*")] for run in directories]
    assert kept == [["lawa2x2-step00000020"]] * 2
    before, after = (losses(run.path, after=10) for run in directories)
    assert before[11] == after[11]
    assert before[20] != after[20]

    edit(directories[1].path, {"branch_from.step": 13})
    with pytest.raises(UserError, match=r"weights only.* with 13 in saving\.full_steps"):
        check_parent(load_run(directories[1].run_json), directories[0])


@pytest.mark.parametrize(
    ("saving", "reason"),
    [
        ({"full_steps": ()}, "set saving.restart_every_steps too"),
        ({**SAVING, "full_steps": (11,)}, "saving.full_steps has 11, which save_steps lacks"),
        ({**SAVING, "average_steps": (7,)}, "saving.average_steps has 7, which save_steps lacks"),
    ],
)
def test_what_could_lose_a_run_or_names_no_checkpoint_is_refused(tmp_path, inputs, saving, reason):
    with pytest.raises(ValueError, match=reason):
        make_run(tmp_path / "run", **inputs, saving=SavingConfig(**saving))
