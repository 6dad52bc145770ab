"""Damaged checkpoints, full disks, orphans, spikes: real failures, through real runs."""

import fcntl
import json
import resource
import shutil

import numpy as np
import pytest

from base.files import write_json
from tests.interpreter import interpreter
from tests.runs import error_line, execute, make_run, python, refusal, succeed, torchrun
from tests.train.test_spikes import spikes_of
from tests.train.trajectories import (
    assert_same,
    copy_until,
    flip_a_byte,
    last_step,
    numbers,
    started,
)
from tests.waiting import HANG_SECONDS, wait_until
from train.run.directory import CHECKPOINT_JSON, RunDirectory
from train.run.environment import attempts, record_attempt
from train.run.optimization import SpikeConfig
from train.run.saving import SavingConfig

FILE_LIMIT = 100_000  # bytes: metrics fit, shards do not


def test_damaged_checkpoints_are_set_aside_and_the_one_before_is_used(trained, tmp_path):
    """Step 20 is truncated; step 10 was changed on the disk."""
    directory = RunDirectory(tmp_path / "run")
    shutil.copytree(trained("dp1"), directory.path)
    shard = directory.checkpoint(20) / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-3000])
    flip_a_byte(directory.checkpoint(10) / "__0_0.distcp")
    done = succeed(python("train", "run", str(directory.path)))
    assert "was changed after it was written" in done.stderr
    assert sorted(path.name for path in directory.quarantine.iterdir()) == [
        "step00000010.attempt2",
        "step00000020.attempt2",
    ]
    assert attempts(directory.environment_json)[-1]["quarantined"] == [20, 10]
    rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "quarantined" in row] == [20, 10]
    assert_same(directory, RunDirectory(trained("dp1")), 10, 20)


def test_a_run_without_a_whole_checkpoint_does_not_begin_again(trained, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    shutil.copytree(trained("dp1"), directory.path)
    for step in (0, 10):
        shutil.rmtree(directory.checkpoint(step))
    (directory.checkpoint(20) / CHECKPOINT_JSON).write_bytes(b"\xff\xfe{")
    for _ in range(2):
        assert "no checkpoint of" in refusal(directory.path)
        assert directory.complete_steps() == []
        assert json.loads(directory.status_json.read_text())["status"] == "failed"
    assert (
        directory.quarantine / "step00000020.attempt2" / CHECKPOINT_JSON
    ).read_bytes() == b"\xff\xfe{"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_ends_the_run(tmp_path, inputs, processes):
    """No file may grow beyond the limit: a real write error, in the middle of a save."""
    directory = RunDirectory(tmp_path / "full")
    make_run(directory.path, **inputs, saving=SavingConfig(asynchronous=processes > 1))

    def limit_file_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))

    command = ("train", "run", str(directory.path))
    if processes > 1:
        done = execute(
            torchrun(processes, *command, python=interpreter()), preexec_fn=limit_file_size
        )
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, done.stderr[:6000]
        line = lines[0]
    else:
        done = execute([interpreter(), "-m", *command], preexec_fn=limit_file_size)
        line = error_line(done)
    assert "could not save" in line
    assert "step00000000" in line
    assert "File too large" in line
    assert "free space" in line
    assert list(directory.checkpoints.iterdir()) == []
    assert last_step(directory.path) < 10
    status = json.loads(directory.status_json.read_text())
    assert (status["status"], status["step"]) == ("failed", last_step(directory.path))
    assert "File too large" in status["reason"]


def test_an_orphan_leaves_when_a_later_attempt_has_begun(tmp_path, inputs):
    """The later attempt, on another node, did not see the lock; it is in environment.json."""
    directory = RunDirectory(tmp_path / "orphan")
    saving = SavingConfig(restart_every_steps=1)
    make_run(directory.path, **inputs, total_steps=2000, save_steps=(0, 2000), saving=saving)
    command = ("train", "run", str(directory.path))
    with started(torchrun(1, *command, python=interpreter())) as orphan:
        wait_until(lambda: last_step(directory.path) >= 2, "step 2", orphan)
        assert record_attempt(directory.environment_json) == 2
        write_json(directory.status_json, {"of": "the later attempt"})
        _, errors = orphan.communicate(timeout=HANG_SECONDS)
    assert "attempt 2 has begun on" in errors
    assert json.loads(directory.status_json.read_text()) == {"of": "the later attempt"}
    assert last_step(directory.path) < 2000


def test_the_next_job_of_an_owner_goes_on_beside_its_orphan(trained, tmp_path, monkeypatch):
    """The orphan's node still holds the lock. Any other is refused."""
    directory = RunDirectory(tmp_path / "run")
    shutil.copytree(trained("dp1"), directory.path)
    with (directory.path / ".lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        monkeypatch.setenv("QUANTDYN_OWNER", "4712")
        assert "another process is training" in refusal(directory.path)
        monkeypatch.setenv("QUANTDYN_OWNER", "4711")
        succeed(python("train", "run", str(directory.path)))
    assert json.loads(directory.status_json.read_text())["attempt"] == 2


def test_spikes_are_those_of_numpy_and_survive_a_resume(tmp_path, inputs):
    """Many steps are skipped at this limit. The second half is trained again from the middle."""
    spikes = SpikeConfig(window_steps=6, sigmas=0.1, action="skip")
    whole = RunDirectory(tmp_path / "whole")
    make_run(whole.path, **inputs, spikes=spikes)
    assert python("train", "run", str(whole.path)).returncode == 0
    rows = {row["step"]: row for row in numbers(whole.path)}
    figures = np.array([[rows[step]["loss"], rows[step]["grad_norm"]] for step in range(1, 21)])
    skipped = spikes_of(figures, window_steps=6, sigmas=0.1)
    assert skipped == ["skipped" in rows[step] for step in range(1, 21)]
    assert 0 < sum(skipped) < 18  # both occurred; how often depends on the weights, so on the CPU
    again = copy_until(10, whole, tmp_path / "again")
    succeed(python("train", "run", str(again.path)))
    assert_same(again, whole, 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ": a spike: loss "),
        ({"action": "skip", "most_skips": 1}, ": after 1 steps skipped in a row again a spike: "),
    ],
)
def test_spikes_stop_a_run_that_does_not_skip_them(tmp_path, inputs, changes, words):
    """At this peak rate the loss rises."""
    spikes = SpikeConfig(window_steps=6, sigmas=0.1, **changes)
    make_run(tmp_path / "stop", **inputs, spikes=spikes, peak_lr=1.0)
    assert words in refusal(tmp_path / "stop")
