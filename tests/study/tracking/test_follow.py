"""The importer beside a run: it sees the run end, outlives a store that does not, and is nothing to training."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from study.settings import save_study
from study.tracking.follow import follow, sample_node
from study.tracking.store import create_store
from tests.runs import environment, make_run, ranks
from tests.study.tracking.stores import append_steps, expected, write_small_study
from tests.waiting import HANG_SECONDS, wait_until
from train.run_directory import RunDirectory, write_json
from train.tracking import read_metrics

TIMES = {
    "time",
    "tokens_per_second",
    "model_flops_per_second",
    "memory_bytes",
    "save_seconds",
    "save_stall_seconds",
}  # no two runs have the same

BARE: dict = {"soups": (), "averaged_steps": (), "labels": {}, "varied": None}  # fits any run


def trained_points(points) -> dict:
    return {key: values for key, values in points.items() if not key[0].startswith("system/")}


@pytest.fixture
def followed(database, forked, tmp_path):
    """A store, a run that has begun, and its follower every second; the run failed before, in an earlier attempt."""
    there = database("sqlite")
    create_store(there.uri)
    directory, study = write_small_study(tmp_path, "live", 1)
    run = RunDirectory(directory / study.runs[0].name)
    append_steps(run.path, range(1, 51), 1)
    write_json(run.status_json, {"status": "failed", "step": 50, "attempt": 1, "reason": "", "time": 0.0})
    child = forked(follow, directory, study, study.runs[0].name, there.uri, 1.0)
    wait_until(
        lambda: trained_points(there.points("live")[run.path.name]) == expected(50, {1: 1}), "50 steps in the store"
    )
    yield there, run, child
    child.kill()
    child.join()


def test_it_follows_until_the_run_is_done(followed):
    there, run, child = followed
    run.status_json.unlink()
    append_steps(run.path, range(51, 101), 2)
    wait_until(
        lambda: trained_points(there.points("live")[run.path.name]) == expected(100, {1: 1, 2: 51}),
        "100 steps in the store",
    )
    append_steps(run.path, range(101, 111), 2)
    write_json(run.status_json, {"status": "done", "step": 110, "attempt": 2, "reason": "", "time": 1.0})
    child.join(HANG_SECONDS)
    assert child.exitcode == 0
    points = there.points("live")[run.path.name]
    assert trained_points(points) == expected(110, {1: 1, 2: 51})
    (file,) = run.path.glob("system-*.jsonl")
    host, samples = socket.gethostname(), [json.loads(line) for line in file.read_text().splitlines()]
    memory = [points[f"system/{host}/system_memory_usage_megabytes", sample] for sample in range(len(samples))]
    assert memory == [[row["system_memory_usage_megabytes"]] for row in samples]
    assert len(memory) >= 2


def test_sigterm_ends_it_after_a_last_import(followed):
    there, run, child = followed
    append_steps(run.path, range(51, 61), 1)
    os.kill(child.pid, signal.SIGTERM)
    child.join(HANG_SECONDS)
    assert child.exitcode == 0
    assert trained_points(there.points("live")[run.path.name]) == expected(60, {1: 1})


def test_training_beside_an_importer_whose_server_never_answers_is_the_same(tmp_path, inputs, trained):
    """It outlives many failed imports and one killed importer, and leaves the files that it leaves alone."""
    run = make_run(tmp_path / "study/dp1", **inputs)
    _, study = write_small_study(tmp_path, "study", 1)
    save_study(tmp_path / "study", study.model_copy(update=BARE | {"runs": (run,)}))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "study", "mirror", "study", "--root", str(tmp_path), "--tracking-uri", uri]
        patience = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        follower = subprocess.Popen(
            [*command, "--run", "dp1", "--follow", "1"], env=environment() | patience, stderr=subprocess.PIPE, text=True
        )
        assert follower.stderr
        assert "dp1: MLflow's store http://127.0.0.1" in follower.stderr.readline()  # it goes on after this line
        done = ranks(1, "train", "run", str(tmp_path / "study/dp1"))
        assert follower.poll() is None or follower.returncode == 2, "2: the run was done, the last import failed"
        follower.kill()
        follower.wait()
        follower.stderr.close()
    assert done.returncode == 0, done.stderr[-2000:]
    alone, beside = RunDirectory(trained("dp1")), RunDirectory(tmp_path / "study/dp1")
    rows = [
        [{key: row[key] for key in row.keys() - TIMES} for row in read_metrics(one.metrics)] for one in (alone, beside)
    ]
    assert rows[0] == rows[1]
    files = [{str(path.relative_to(one.path)) for path in one.path.rglob("*")} for one in (alone, beside)]
    assert {name for name in files[1] - files[0] if not name.startswith("system-")} == set()
    assert files[0] <= files[1]


def test_gpus_are_what_nvidia_smi_says(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 97, 71680, 143771, 512.30'\necho '1, [N/A], 1024, 143771, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = sample_node()
    assert (found["gpu_0_utilization_percentage"], found["gpu_0_power_usage_watts"]) == (97.0, 512.3)
    assert found["gpu_0_memory_usage_megabytes"] == pytest.approx(71680 * 1.048576)
    assert found["gpu_1_memory_usage_percentage"] == pytest.approx(100 * 1024 / 143771)
    assert "gpu_1_utilization_percentage" not in found
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert not any(name.startswith("gpu") for name in sample_node())
