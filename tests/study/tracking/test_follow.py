"""The importer beside a run: it sees the run end, outlives a store that does not, and is nothing
to training.
"""

import os
import signal
import socket
import subprocess

import pytest

from study.definition import save_study
from study.tracking.importer import follow
from tests.interpreter import interpreter
from tests.runs import environment, make_run, ranks
from tests.sealing import write_ending
from tests.study.tracking.stores import append_steps, expected, write_small_study
from tests.waiting import HANG_SECONDS, wait_until
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics

# no two runs have the same
TIMES = {"time", "tokens_per_second", "model_flops_per_second", "memory_bytes"}
TIMES |= {"save_seconds", "save_stall_seconds"}

BARE: dict = {"soups": (), "averaged_steps": (), "labels": {}, "varied": None}  # fits any run


@pytest.fixture
def followed(database, forked, tmp_path):
    """A store, a run that has begun, and its follower every second; the run failed before, in an
    earlier attempt.
    """
    there = database("sqlite")
    directory, study = write_small_study(tmp_path, "live", 1)
    run = RunDirectory(directory / study.runs[0].name)
    append_steps(run.path, range(1, 51), 1)
    write_ending(run, "failed", 50)
    child = forked(follow, directory, study, study.runs[0].name, there.uri, 1.0)
    wait_until(
        lambda: there.points("live")[run.path.name] == expected(50, {1: 1}), "50 steps in the store"
    )
    yield there, run, child
    child.kill()
    child.join()


def test_it_follows_until_the_run_is_done(followed):
    there, run, child = followed
    run.status_json.unlink()
    append_steps(run.path, range(51, 101), 2)
    wait_until(
        lambda: there.points("live")[run.path.name] == expected(100, {1: 1, 2: 51}),
        "100 steps in the store",
    )
    append_steps(run.path, range(101, 111), 2)
    write_ending(run, "done", 110, attempt=2)
    child.join(HANG_SECONDS)
    assert child.exitcode == 0
    points = there.points("live")[run.path.name]
    assert points == expected(110, {1: 1, 2: 51})


def test_sigterm_ends_it_after_a_last_import(followed):
    there, run, child = followed
    append_steps(run.path, range(51, 61), 1)
    os.kill(child.pid, signal.SIGTERM)
    child.join(HANG_SECONDS)
    assert child.exitcode == 0
    assert there.points("live")[run.path.name] == expected(60, {1: 1})


def test_training_beside_an_importer_whose_server_never_answers_is_the_same(
    tmp_path, inputs, trained
):
    """It outlives many failed imports and one killed importer, and leaves the files that it
    leaves alone.
    """
    run = make_run(tmp_path / "study/dp1", **inputs)
    _, study = write_small_study(tmp_path, "study", 1)
    save_study(tmp_path / "study", study.model_copy(update=BARE | {"runs": (run,)}))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [interpreter(), "-m", "study", "mirror", "study", "--root", str(tmp_path)]
        patience = {
            "MLFLOW_TRACKING_URI": uri,
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        }
        follower = subprocess.Popen(
            [*command, "--run", "dp1", "--follow", "1"],
            env=environment() | patience,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert follower.stderr
        # it continues after this line
        assert "dp1: MLflow's store http://127.0.0.1" in follower.stderr.readline()
        done = ranks(1, "train", "run", str(tmp_path / "study/dp1"))
        assert follower.poll() is None or follower.returncode == 2, (
            "2: the run was done, the last import failed"
        )
        follower.kill()
        follower.wait()
        follower.stderr.close()
    assert done.returncode == 0, done.stderr[-2000:]
    alone, beside = RunDirectory(trained("dp1")), RunDirectory(tmp_path / "study/dp1")
    rows = [
        [{key: row[key] for key in row.keys() - TIMES} for row in read_metrics(directory.metrics)]
        for directory in (alone, beside)
    ]
    assert rows[0] == rows[1]
    files = [
        {str(path.relative_to(directory.path)) for path in directory.path.rglob("*")}
        for directory in (alone, beside)
    ]
    assert files[0] == files[1]
