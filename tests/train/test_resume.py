"""Stopping, being killed and resuming: nothing changes and nothing complete is lost."""

import fcntl
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from base.frozen import fingerprint
from tests.ckpt_tools.checkpoints import seal
from tests.runs import make_run, python, ranks, refusal, start_ranks, succeed
from tests.train.stalled import stalling
from tests.train.trajectories import assert_same, copy_until
from tests.waiting import wait_until
from train.run.config import load_run
from train.run.dcp_metadata import METADATA, read_metadata
from train.run.directory import CHECKPOINT_JSON, RunDirectory, read_checkpoint_record
from train.run.metrics import read_metrics
from train.run.status import divergence


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_resumed_run_is_bit_identical(trained, tmp_path, layout):
    """The last checkpoint is removed, as if the run had died after step 10; then it resumes."""
    whole = RunDirectory(trained(layout))
    again = copy_until(10, whole, tmp_path / layout)
    rows = again.metrics.read_text().splitlines()
    # The last lines are lost, one of them is torn.
    again.metrics.write_text("\n".join(rows[:-3]) + "\n" + rows[-3][:20])
    resumed = succeed(ranks(2, "train", "run", str(again.path)))
    assert "Warning" not in resumed.stderr, resumed.stderr[-3000:]
    assert_same(again, whole, 20)
    assert read_checkpoint_record(again.checkpoint(20)).attempt == 2


def test_killed_run_keeps_its_checkpoints_and_ends_the_same(trained, tmp_path, inputs):
    """kill -9 of every process right after the checkpoint of step 10 is complete."""
    directory = RunDirectory(tmp_path / "dp1")
    make_run(directory.path, **inputs)
    command = ["train", "run", str(directory.path)]
    never = stalling(tmp_path / "never", step=13)
    killed = start_ranks(1, "tests.train.stalled", *command, variables=never)
    wait_until((directory.checkpoint(10) / CHECKPOINT_JSON).exists, "step 10 saved", killed)
    killed.kill()
    succeed(python(*command))
    assert_same(directory, RunDirectory(trained("dp1")), 20)
    assert not list(directory.checkpoints.glob(".*"))


@pytest.mark.parametrize("incomplete", [False, True], ids=["only step 0", "half-deleted step 10"])
def test_a_run_goes_on_from_its_first_checkpoint(trained, tmp_path, incomplete):
    """Killed after step 0 was saved; or a checkpoint was removed half, its seal first."""
    whole = RunDirectory(trained("dp1"))
    directory = copy_until(10 if incomplete else 0, whole, tmp_path / "dp1")
    if incomplete:
        (directory.checkpoint(10) / CHECKPOINT_JSON).unlink()
    assert directory.complete_steps() == [0]
    succeed(python("train", "run", str(directory.path)))
    assert_same(directory, whole, 10, 20)


@pytest.mark.parametrize(
    ("save_steps", "expected", "kept"),
    [
        ((0, 20), "hot diverged at step 2: not finite: loss nan", [0]),
        ((0, 1, 20), "hot diverged at step 1: not finite: held-out loss nan", [0]),
    ],
    ids=["training", "held-out"],
)
def test_a_loss_that_is_not_finite_stops_at_its_step(tmp_path, inputs, save_steps, expected, kept):
    """The first update overflows: the next loss shows it, or the held-out loss before a save."""
    directory = RunDirectory(tmp_path / "hot")
    make_run(directory.path, **inputs, peak_lr=1e38, save_steps=save_steps)
    line = refusal(directory.path)
    assert expected in line
    assert "last good checkpoint is step 0" in line
    assert directory.complete_steps() == kept
    status = divergence(directory, fingerprint(load_run(directory.run_json)))
    assert status is not None, "a result of this configuration"
    assert (f"at step {status.step}: " in expected, status.loss) == (True, None)
    assert status.words in line
    assert divergence(directory, "of another") is None
    assert all(np.isfinite(list(row.values())).all() for row in read_metrics(directory.metrics))


def test_two_attempts_cannot_train_one_run(tmp_path, inputs):
    directory = RunDirectory(tmp_path / "busy")
    make_run(directory.path, **inputs)
    with (directory.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is training" in refusal(directory.path)
    assert not directory.checkpoints.exists()


class Call:
    """Pickled, it makes a directory when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", [".metadata", "common.pt", "an object"])
def test_no_pickle_of_a_checkpoint_runs_code_though_its_hash_is_right(trained, tmp_path, kind):
    run = copy_until(10, RunDirectory(trained("dp1")), tmp_path / "run")
    sprung, checkpoint = tmp_path / "sprung", run.checkpoint(10)
    if kind == "common.pt":
        torch.save({"steps": Call(sprung)}, checkpoint / kind)
    else:
        metadata = Metadata({"a": Call(sprung)})  # type: ignore[dict-item]
        if kind == "an object":  # of which torch would open the pickle, wherever it is
            metadata = read_metadata(checkpoint)
            metadata.state_dict_metadata["a/shard_0_1"] = BytesStorageMetadata()
        (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    seal(checkpoint)
    refused = python("train", "run", str(run.path))
    assert refused.returncode == 2, refused.stderr[-3000:]
    assert "do not open it with other programs" in refused.stderr.splitlines()[-1]
    assert not sprung.exists()
