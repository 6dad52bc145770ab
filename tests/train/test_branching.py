"""Branches: on the parent's data, from its weights, bit for bit, and without touching it."""

import json
import shutil

import numpy as np
import pytest

from base.errors import UserError
from base.files import write_json
from base.frozen import fingerprint
from tests.runs import make_run, python, refusal, succeed
from tests.train.trajectories import flip_a_byte, numbers, tree
from train.run.branching import check_parent
from train.run.config import BranchFrom, RunConfig, load_run
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.optimization import Anneal, Lawa
from train.run_data import open_data


def make_branch(directory, parent, inputs, **changes) -> RunConfig:
    """A branch from step 10 that trains as its parent does."""
    origin = load_run(parent / "run.json")
    branch_from = BranchFrom(run=str(parent), step=10, fingerprint=fingerprint(origin))
    return make_run(
        directory, **inputs, branch_from=branch_from, **({"save_steps": (20,)} | changes)
    )


def test_an_unchanged_branch_is_its_parent(trained, tmp_path, inputs):
    """It is damaged after its end and trained once more: again from the parent."""
    parent, child = RunDirectory(trained("dp1")), RunDirectory(tmp_path / "child")
    before = tree(parent.path)
    run = make_branch(child.path, parent.path, inputs, averages=(Lawa(interval_steps=2, window=3),))
    succeed(python("train", "run", str(child.path)))
    expected = {row["step"]: row for row in numbers(parent.path)}
    for row in numbers(child.path):
        row.pop("held_out_loss/lawa3x2", None)
        assert row == expected[row["step"]]
    assert [row["step"] for row in numbers(child.path)] == list(range(11, 21))
    assert child.complete_steps() == [20]
    average = read_checkpoint_record(child.average_checkpoint("lawa3x2", 20)).average
    assert average is not None
    assert average["steps"] == [16, 18, 20]
    data, origin = open_data(run, child, verify_hashes=True), load_run(parent.run_json)
    for step in range(1, 21):
        theirs = open_data(origin, parent, verify_hashes=False).batch(step).tokens_BS
        assert np.array_equal(data.batch(step).tokens_BS, theirs)
    assert tree(parent.path) == before


def test_a_cooldown_starts_at_the_parents_weights(trained, tmp_path, inputs):
    """Its first loss is the parent's next one, before its own update at another learning rate."""
    parent, out = trained("dp1"), tmp_path / "cooldown"
    schedule = load_run(parent / "run.json").schedule
    cooldown = schedule.model_copy(update={"anneal": Anneal(start_step=10, shape="sqrt")})
    make_branch(out, parent, inputs, schedule=cooldown, total_steps=14, save_steps=(14,))
    assert python("train", "run", str(out)).returncode == 0
    assert RunDirectory(out).complete_steps() == [14]
    theirs = {row["step"]: row["loss"] for row in numbers(parent) if "loss" in row}
    ours = {row["step"]: row["loss"] for row in numbers(out)}
    assert ours[11] == theirs[11]
    assert ours[13] != theirs[13]


def edit(run_dir, changes):
    """Changes values of a run.json that never started."""
    content = json.loads((run_dir / "run.json").read_text())
    del content["fingerprint"]
    for key, change in changes.items():
        content[key] = content[key] | change if isinstance(change, dict) else change
    write_json(run_dir / "run.json", content)


REFUSED = {
    "has the seed of its parent": {"seed": 8},
    "has the batch_size of its parent": {"batch_size": 4},
    "has the batch_warmup of its parent": {"batch_warmup": [{"until_step": 3, "batch_size": 4}]},
    "has the precision of its parent": {"precision": "bf16"},
    "has no checkpoint of step 12; it has 0, 10, 20": {"branch_from": {"step": 12}},
    "has fingerprint": {"branch_from": {"fingerprint": "0" * 16}},
    "has the optimizer.beta2 of its parent": {"optimizer": {"beta2": 0.9}},
    "has the data.order of its parent": {"data": {"order": "sequential"}},
}


@pytest.mark.parametrize("expected", REFUSED)
def test_a_branch_that_is_none_is_refused(trained, tmp_path, inputs, expected):
    make_branch(tmp_path / "child", trained("dp1"), inputs)
    edit(tmp_path / "child", REFUSED[expected])
    with pytest.raises(UserError, match=expected):
        check_parent(load_run(tmp_path / "child" / "run.json"), RunDirectory(trained("dp1")))


def test_a_damaged_parent_and_other_data_are_refused_and_left_alone(trained, tmp_path, inputs):
    parent, child = tmp_path / "parent", tmp_path / "child"
    shutil.copytree(trained("dp1"), parent)
    make_branch(child, parent, inputs)
    edit(
        child,
        {
            "data": {
                "train": str(inputs["held_out_prefix"]),
                "held_out": str(inputs["train_prefix"]),
            }
        },
    )
    before = tree(parent)
    assert "was trained on other data" in refusal(child)
    assert tree(parent) == before
    make_branch(tmp_path / "second", parent, inputs)
    flip_a_byte(RunDirectory(parent).checkpoint(10) / "__0_0.distcp")
    before = tree(parent)
    assert "was changed after it was written" in refusal(tmp_path / "second")
    assert tree(parent) == before
    assert json.loads(RunDirectory(child).status_json.read_text())["status"] == "failed"
