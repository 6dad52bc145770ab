"""Branches: on the parent's data, from its weights, bit for bit, and without touching it."""

import json
import shutil

import numpy as np
import pytest

from base.errors import UserError
from base.frozen import fingerprint
from tests.runs import make_run, python, refusal, succeed
from tests.train.test_refusals import edit
from tests.train.trajectories import flip_a_byte, numbers, tree
from train.optimizers.adamw import AdamW
from train.optimizers.lion import Lion
from train.optimizers.muon import Muon
from train.run.branching import check_parent
from train.run.config import BranchFrom, RunConfig, load_run
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.optimization import Lawa
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 8}, "has the seed of its parent"),
        ({"batch_size": 4}, "has the batch_size of its parent"),
        (
            {"batch_warmup": [{"until_step": 3, "batch_size": 4}]},
            "has the batch_warmup of its parent",
        ),
        ({"precision": "bf16"}, "has the precision of its parent"),
        ({"branch_from.step": 12}, "has no checkpoint of step 12; it has 0, 10, 20"),
        ({"branch_from.fingerprint": "0" * 16}, "has fingerprint"),
        ({"optimizer.beta2": 0.9}, "has the optimizer.beta2 of its parent"),
        ({"data.order": "sequential"}, "has the data.order of its parent"),
        ({"parametrization": "completep"}, "has the parametrization of its parent"),
    ],
)
def test_a_branch_that_is_none_is_refused(trained, tmp_path, inputs, changes, words):
    make_branch(tmp_path / "child", trained("dp1"), inputs)
    edit(tmp_path / "child", changes)
    with pytest.raises(UserError, match=words):
        check_parent(load_run(tmp_path / "child" / "run.json"), RunDirectory(trained("dp1")))


@pytest.mark.parametrize(
    ("optimizer", "parents"),
    [
        (AdamW(peak_lr=1e-3, beta2=0.99), Lion(peak_lr=1e-3)),
        (AdamW(peak_lr=1e-3), Lion(peak_lr=1e-3)),
        (Lion(peak_lr=1e-3), AdamW(peak_lr=1e-3)),
        (Muon(peak_lr=1e-3), AdamW(peak_lr=1e-3)),
    ],
)
def test_a_branch_with_another_kind_of_optimizer_is_refused(tmp_path, inputs, optimizer, parents):
    """Whatever else the two kinds have in common, or not."""
    parent = RunDirectory(tmp_path / "parent")
    make_run(parent.path, **inputs, optimizer=parents)
    branch = make_branch(tmp_path / "child", parent.path, inputs, optimizer=optimizer)
    with pytest.raises(UserError, match=r"has the optimizer\.matrices of its parent"):
        check_parent(branch, parent)


def test_a_damaged_parent_and_other_data_are_refused_and_left_alone(trained, tmp_path, inputs):
    parent, child = tmp_path / "parent", tmp_path / "child"
    shutil.copytree(trained("dp1"), parent)
    make_branch(child, parent, inputs)
    swapped = {"data.train": "held_out_prefix", "data.held_out": "train_prefix"}
    edit(child, {path: str(inputs[name]) for path, name in swapped.items()})
    before = tree(parent)
    assert "was trained on other data" in refusal(child)
    assert tree(parent) == before
    make_branch(tmp_path / "second", parent, inputs)
    flip_a_byte(RunDirectory(parent).checkpoint(10) / "__0_0.distcp")
    before = tree(parent)
    assert "was changed after it was written" in refusal(tmp_path / "second")
    assert tree(parent) == before
    assert json.loads(RunDirectory(child).status_json.read_text())["status"] == "failed"
