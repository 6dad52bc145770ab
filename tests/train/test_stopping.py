"""Asked to stop in every way there is, a run resumes as if it had never been."""

import json
import os
import signal

from tests.interpreter import interpreter
from tests.runs import ended, execute, make_run, ranks, start_ranks, succeed, torchrun
from tests.train.stalled import stalling
from tests.train.trajectories import assert_same, last_step, saves, started
from tests.waiting import HANG_SECONDS, wait_until
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.environment import attempts
from train.run.saving import SavingConfig


def status(directory):
    return json.loads(directory.status_json.read_text())


def test_a_run_that_is_stopped_again_and_again_ends_the_same(trained, tmp_path, inputs):
    """By a file from the start, by SIGUSR1 to a silent rank, by SIGTERM to torchrun."""
    directory = RunDirectory(tmp_path / "dp2")
    make_run(
        directory.path, **inputs, saving=SavingConfig(asynchronous=True, restart_every_steps=2)
    )
    command = ("train", "run", str(directory.path))
    directory.stop_file.touch()
    done = succeed(ranks(2, *command))
    assert done.stdout == "stopped at step 1 of 20; the same command resumes\n"
    assert not directory.stop_file.exists()
    assert directory.complete_restarts() == [1]
    asked = {"status": "preempted", "step": 1, "attempt": 1, "asked_by": "user"}
    assert status(directory).items() >= asked.items()

    stalled, never = ("tests.train.stalled", *command), tmp_path / "never"
    training = start_ranks(2, *stalled, variables=stalling(never, step=6))
    wait_until(lambda: last_step(directory.path) >= 2, "step 2", training)
    assert not directory.status_json.exists()
    os.kill(training.pid(rank=1), signal.SIGUSR1)
    assert ended(training).returncode == 0
    first = status(directory)
    assert (first["status"], first["attempt"]) == ("preempted", 2)
    assert 2 <= first["step"] < 20
    newest = max(directory.complete_restarts() + directory.complete_steps())
    assert newest == first["step"]

    agent = torchrun(2, *stalled, python=interpreter())
    with started(agent, stalling(never, step=first["step"] + 5)) as process:
        wait_until(lambda: last_step(directory.path) > first["step"], "a further step", process)
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_SECONDS)  # torchrun's own code
    second = status(directory)
    assert second["attempt"] == 3
    assert second["step"] > first["step"]
    resumed_from = [each["resumed_from_step"] for each in attempts(directory.environment_json)]
    assert resumed_from == [None, 1, newest]

    released = tmp_path / "released"
    beating = (*stalled, "--hang-seconds", "30")  # a heartbeat every second
    training = start_ranks(2, *beating, variables=stalling(released, save=20))
    wait_until(lambda: saves(directory, 0, step=20), "a heartbeat of the last save", training)
    directory.stop_file.touch()  # too late: it must not outlive the end
    released.touch()
    done = succeed(ended(training))
    assert status(directory)["status"] == "done"
    loss = read_checkpoint_record(directory.checkpoint(20)).held_out_loss
    place = f"in {directory.path}\n"
    line = f"complete: dp2, step 20, held-out loss {loss:.4f} nats/token, {place}"
    assert done.stdout.endswith(line)
    assert not directory.stop_file.exists()
    assert directory.complete_restarts() == []
    assert_same(directory, RunDirectory(trained("dp2")), 0, 10, 20)
    rows = [json.loads(line) for line in directory.ranks.read_text().splitlines()]
    assert {(row["rank"], row["attempt"]) for row in rows} >= {(0, 1), (1, 1)}
    assert all(
        0 < row["step_seconds_p50"] <= row["step_seconds_p95"] <= row["step_seconds_max"]
        for row in rows
    )


SIGNALLED_WHILE_STARTING = """
import os, signal, sys
from base import stopping
stopping.listen()
os.kill(os.getpid(), signal.SIGUSR1)
from pathlib import Path
print(stopping.requested(Path(sys.argv[1])))
stopping.ignore()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_is_remembered_from_the_start_and_ignored_after_the_end(tmp_path):
    done = execute([interpreter(), "-c", SIGNALLED_WHILE_STARTING, str(tmp_path)])
    assert (done.returncode, done.stdout) == (0, "SIGUSR1\n")
    assert list(tmp_path.iterdir()) == []
