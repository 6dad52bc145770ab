"""The settings of a start: they leave their traces and change no number."""

import gzip
import json
import os
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from base import gpus
from base.processor import kind_of
from tests.runs import error_line, make_run, on_ranks, python, ranks, succeed
from tests.train.trajectories import numbers
from train.checkpoints.attempt import Attempt
from train.distributed import start
from train.run import launch
from train.run.directory import RunDirectory
from train.run.environment import attempts, kinds_of, node_count
from train.run.history import history
from train.run.launch import Launch, set_variables
from train.run.parallel import ParallelConfig


def test_a_profiled_run_has_the_same_losses(trained, tmp_path, inputs):
    directory = RunDirectory(tmp_path / "dp2")
    make_run(directory.path, **inputs)
    began_at = time.time()
    succeed(ranks(2, "train", "run", str(directory.path), "--profile", "3:5"))
    assert numbers(directory.path) == numbers(trained("dp2"))

    (trace,) = directory.profile.iterdir()
    assert trace.name == "steps3-4.json.gz"
    with gzip.open(trace) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    layers, steps, matrices = 2, 2, 4  # qkv, out, gate and up, down: one product forward, two back
    products = names.count("aten::mm") + names.count("aten::addmm")
    assert products >= 3 * layers * steps * matrices
    assert not directory.watch.exists(), "of heartbeats nothing is left"

    (attempt,) = attempts(directory.environment_json)
    assert not attempt["deterministic"]
    assert attempt["kernels"] == {"attention": "flash", "weight_gradients": "torch, in fp32"}
    assert attempt["variables"]["TORCH_FR_DUMP_TEMP_FILE"] == str(directory.flight_recorder)
    (node,) = attempt["nodes"]
    assert (node["hosts"], node_count(attempt)) == ([socket.gethostname()], 1)
    assert kinds_of(attempt) == [kind_of(attempt)]
    (work,) = history(directory)
    assert (work.first_step, work.last_step) == (1, 20)
    assert work.began is not None
    assert began_at - 1 < work.began < work.first_time < work.last_time < time.time()  # of a jiffy


def begin_an_attempt(run_dir: str) -> None:
    """The second rank is kept from some instructions, as on a node of another kind."""
    start()
    if dist.get_rank() == 1:
        os.environ["MKL_CBWR"] = "AVX2"
    Attempt(RunDirectory(Path(run_dir)), "0" * 16, {})


def test_the_processors_of_all_ranks_are_recorded(tmp_path):
    on_ranks(2, begin_an_attempt, tmp_path / "run")
    (attempt,) = attempts(RunDirectory(tmp_path / "run").environment_json)
    first, second = kinds_of(attempt)
    assert second == f"{first[:-1]}, MKL_CBWR=AVX2)"
    assert node_count(attempt) == 1


def test_a_deterministic_run_says_so_and_has_the_losses_but_for_their_last_bits(
    trained, tmp_path, inputs
):
    """The sums of the embedding's gradient are added in another order."""
    directory = RunDirectory(tmp_path / "dp1")
    make_run(directory.path, **inputs)
    succeed(python("train", "run", str(directory.path), "--deterministic"))
    assert attempts(directory.environment_json)[0]["deterministic"]
    losses, usual = (
        [row["loss"] for row in numbers(path) if "loss" in row]
        for path in (directory.path, trained("dp1"))
    )
    assert losses == pytest.approx(usual, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "words"), [("5:5", "holds no step"), ("0:2", "holds no step"), ("19:23", "1 to 20")]
)
def test_steps_that_are_never_made_are_refused(tmp_path, inputs, given, words):
    make_run(tmp_path / "run", **inputs)
    done = python("train", "run", str(tmp_path / "run"), "--profile", given)
    assert words in error_line(done)


def test_cpus_beside_a_gpu(monkeypatch):
    """As NVML has them: 64 to a word."""
    for name, answer in {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": None,
        "nvmlDeviceGetCpuAffinityWithinScope": [0b101, 0b10],
    }.items():
        monkeypatch.setattr(f"pynvml.{name}", lambda *_, answer=answer: answer)
    assert gpus.near_cpus("GPU-0") == {0, 2, 65}


def test_variables_of_gpus_are_set_unless_the_user_has(tmp_path, inputs, monkeypatch, capsys):
    run = make_run(tmp_path / "run", **inputs, tensor=2)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "backend:native"}
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr(launch, "has_gpu", lambda: True)
    set_variables(run, RunDirectory(tmp_path / "run"), Launch(deterministic=True))
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert environment["PYTORCH_ALLOC_CONF"] == "backend:native"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    output = capsys.readouterr().out
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in output
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in output

    environment.clear()
    set_variables(run, RunDirectory(tmp_path / "run"), Launch())
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    alone = run.model_copy(update={"parallel": ParallelConfig()})
    environment.clear()
    set_variables(alone, RunDirectory(tmp_path / "run"), Launch())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_a_gpu_without_a_c_compiler_is_slower_and_says_so(tmp_path, inputs, monkeypatch, capsys):
    """As torch does, it looks for gcc and others on the PATH."""
    run = make_run(tmp_path / "run", **inputs)
    (tmp_path / "clang").touch(mode=0o755)
    monkeypatch.setattr(launch, "has_gpu", lambda: True)
    for path, says_so in (("/nowhere", True), (str(tmp_path), False)):
        monkeypatch.setattr("os.environ", {"PATH": path})
        set_variables(run, RunDirectory(tmp_path / "run"), Launch())
        assert ("install gcc" in capsys.readouterr().out) == says_so
