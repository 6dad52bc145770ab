"""A rank that hangs is named, its attempt ended, and the run resumed as if nothing had been."""

import json
import os
import pickle
import signal
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from study.machine.hardware import Hardware
from study.pipeline.runner import Runner, locked
from study.step import Machine, Step, log_path, torchrun
from tests.forked import Forked
from tests.interpreter import interpreter
from tests.runs import ended, make_run, ranks, start_ranks, succeed
from tests.train.stalled import stalling
from tests.train.trajectories import last_step, numbers, saves
from tests.waiting import wait_until
from train.run.directory import CHECKPOINT_JSON, RunDirectory
from train.run.environment import attempts
from train.run.launch import HUNG
from train.running.watchdog import Heartbeat, LoopPhase, diagnosis

HANG = "10"  # seconds; longer than a step or a look at the files takes on a busy machine


def start_watched(directory: RunDirectory, released: Path, **stalled_at: Any) -> Forked:
    """Start two ranks that come no further than a step, or a save, until `released` is there."""
    command = ("tests.train.stalled", "train", "run", str(directory.path), "--hang-seconds", HANG)
    return start_ranks(2, *command, variables=stalling(released, **stalled_at))


def hang(training: Forked, released: Path) -> str:
    """Stop rank 1 by SIGSTOP, which it cannot answer; return what the watchdog ended rank 0 with."""
    os.kill(training.pid(rank=1), signal.SIGSTOP)
    released.touch()
    wait_until(lambda: training.poll() is not None, "the end of rank 0")
    training.kill()  # as torchrun does
    done = ended(training)
    assert done.returncode == os.EX_TEMPFAIL, done.stderr[-3000:]
    return done.stderr


def test_a_stopped_rank_is_named_and_the_run_resumed(trained, tmp_path, inputs):
    directory, released = RunDirectory(tmp_path / "dp2"), tmp_path / "released"
    make_run(directory.path, **inputs)
    training = start_watched(directory, released, step=14)
    wait_until(lambda: last_step(directory.path) == 12, "step 12", training)
    wait_until(directory.heartbeat(1).exists, "a heartbeat", training)
    stopped = Heartbeat(*json.loads(directory.heartbeat(1).read_text()))
    assert stopped.pid == training.pid(rank=1)
    errors = hang(training, released)  # rank 0 waits for rank 1 in step 13

    (line,) = [each for each in errors.splitlines() if each.startswith(HUNG)]
    words = f"no step for {HANG} s after step 12: no sign of life of {stopped}"
    assert line.startswith(f"{HUNG}{words}; ")
    status = json.loads(directory.status_json.read_text())
    assert (status["status"], status["step"], status["reason"]) == ("failed", 12, words)
    assert "in train_step" in directory.stacks(0).read_text()
    trace = Path(f"{directory.flight_recorder}0")
    newest = pickle.loads(trace.read_bytes())["entries"][-1]
    assert newest["state"] != "completed"

    succeed(ranks(2, "train", "run", str(directory.path)))
    resumed_from = [each["resumed_from_step"] for each in attempts(directory.environment_json)]
    assert resumed_from == [None, 10]
    assert numbers(directory.path) == numbers(trained("dp2"))


def test_a_rank_stopped_during_a_save_is_named(tmp_path, inputs):
    """A save takes as long as it needs, but no rank is waited for that is not alive."""
    directory, released = RunDirectory(tmp_path / "dp2"), tmp_path / "released"
    make_run(directory.path, **inputs)
    training = start_watched(directory, released, save=10)
    wait_until(lambda: saves(directory, 1, step=10), "a heartbeat of a save", training)
    time.sleep(2 * float(HANG))
    assert training.poll() is None  # both are alive
    assert "no sign of life of rank 1 on " in hang(training, released)


@pytest.mark.stress
def test_a_study_resumes_a_training_that_hung(trained, tmp_path, inputs, monkeypatch):
    """By torchrun, which needs half a minute to kill a stopped rank, below the local runner."""
    directory, released = RunDirectory(tmp_path / "dp2"), tmp_path / "released"
    make_run(directory.path, **inputs)
    for name, value in stalling(released, step=14).items():
        monkeypatch.setenv(name, value)

    def stop_rank_one() -> None:
        wait_until(lambda: last_step(directory.path) == 12, "step 12")
        wait_until(directory.heartbeat(1).exists, "a heartbeat")
        os.kill(Heartbeat(*json.loads(directory.heartbeat(1).read_text())).pid, signal.SIGSTOP)
        released.touch()

    words = ("tests.train.stalled", "train", "run", "{study}/dp2", "--hang-seconds", HANG)
    last = directory.checkpoint(20) / CHECKPOINT_JSON
    output = str(last.relative_to(tmp_path))
    step = Step("train-dp2", "train", ("{launch}", "-m", *words), (output,), resumes=True)
    machine = Machine(torchrun(2), python=interpreter())
    stopping = Thread(target=stop_rank_one)
    stopping.start()
    with locked(tmp_path) as lock_fd:
        Runner(tmp_path, [step], Hardware(2), lock_fd, lambda _: machine).run()
    stopping.join()
    lines = log_path(tmp_path, step).read_text().splitlines()
    assert sum(line.startswith(HUNG) and "life of rank 1" in line for line in lines) == 1
    assert numbers(directory.path) == numbers(trained("dp2"))


AGREE, COMPUTE = LoopPhase.AGREE, LoopPhase.COMPUTE
READ, SAVE = LoopPhase.READ, LoopPhase.SAVE


def beat(rank: int, phase: LoopPhase, step: int = 9) -> Heartbeat:
    return Heartbeat(rank, f"node{rank // 2}", 100 + rank, 7, step, phase)


@pytest.mark.parametrize(
    ("living", "dead", "words"),
    [
        (
            [beat(0, COMPUTE), beat(2, READ)],
            [beat(1, COMPUTE), Heartbeat(3)],
            "no sign of life of rank 1 on node0 (pid 101), rank 3 on an unknown host (pid 0)",
        ),
        (
            [beat(0, AGREE), beat(1, READ), beat(2, AGREE)],
            [],
            "rank 1 on node0 (pid 101) still reads its batch after step 9",
        ),
        (
            [beat(0, SAVE, 8), beat(1, COMPUTE), beat(2, COMPUTE)],
            [],
            "rank 0 on node0 (pid 100) still logs, evaluates or saves after step 8",
        ),
        (
            [beat(rank, COMPUTE) for rank in range(8)],
            [],
            "every rank computes step 9: a collective or a kernel does not end",
        ),
        ([beat(0, READ)], [], "rank 0 on node0 (pid 100) still reads its batch after step 9"),
    ],
)
def test_diagnosis(living, dead, words):
    assert diagnosis(living, dead) == words
