"""Every check of tests/gpu on this CPU, in small: what is measured there runs here first."""

import json
import multiprocessing
import subprocess
from pathlib import Path

import pytest

from tests.gpu.__main__ import main
from tests.gpu.bundle import PACKAGES, PROJECT, locked, parts
from tests.gpu.checks import checks, run
from tests.gpu.figures import CheckedFigure, table
from tests.gpu.workbench import FORKS, IN_SMALL, Workbench
from tests.interpreter import interpreter
from tests.rehearsal.processes import run_one

# A check is a fork of a server that has imported what it needs, itself a fork: else every check
# would import torch, 10 seconds.
multiprocessing.set_executable(interpreter())
FORKS.set_forkserver_preload(["tests.preloaded"])

SECONDS = 600.0  # nothing is timed here: a bound on a check that hangs
TRAINING = "training, CPU and GPU"  # starts new interpreters
# As a command: tests/rehearsal/test_training.py has that on the stand-in.
STARTS_TRAINING = {TRAINING, "DeepSpeed", "saves"}
NAMES = list(checks(Workbench("cpu", IN_SMALL, Path())))
NEEDS_GPU = {
    *(name for name in NAMES if name.startswith("Transformer Engine")),
    *("DeepSpeed, kernels", "libraries", "saved checkpoints in vLLM"),
}
QUICK = [name for name in NAMES if name not in {*NEEDS_GPU, TRAINING}]


@pytest.mark.parametrize("name", [*QUICK, pytest.param(TRAINING, marks=pytest.mark.stress)])
def test_a_check_runs_and_holds_on_the_cpu(tmp_path, name):
    figures = run(Workbench("cpu", IN_SMALL, tmp_path), [name], SECONDS)
    assert figures
    assert not [figure for figure in figures if figure.verdict not in ("ok", "recorded")], table(
        figures
    )


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in NEEDS_GPU | STARTS_TRAINING]
)
def test_a_check_takes_every_tensor_to_the_gpu(tmp_path, name):
    """The stand-in refuses what is left on the CPU; limits of speed and memory it has not."""
    child = FORKS.Process(target=run_one, args=(name, tmp_path, tmp_path / "figures.json"))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert all(
        figure["value"] is not None
        for figure in json.loads((tmp_path / "figures.json").read_text())
    )


@pytest.mark.parametrize("name", sorted(NEEDS_GPU))
def test_a_check_that_needs_a_gpu_says_why_it_is_skipped(tmp_path, name):
    (figure,) = run(Workbench("cpu", IN_SMALL, tmp_path), [name], SECONDS)
    assert figure.verdict == "skipped"
    assert "need a GPU" in figure.note


def test_a_check_that_fails_or_hangs_is_a_failed_figure(tmp_path):
    unknown = run(Workbench("cpu", IN_SMALL, tmp_path / "unknown"), ["none of them"], SECONDS)
    late = run(Workbench("cpu", IN_SMALL, tmp_path / "late"), ["rope"], 0.0)
    assert [figure.verdict for figure in (*unknown, *late)] == ["FAILED", "FAILED"]
    assert "KeyError" in unknown[0].note
    assert "no figure" in late[0].note


def test_the_table_judges_every_figure():
    figures = [
        CheckedFigure("as good as it gets", 0.5, "s", most=0.5),
        CheckedFigure("too slow", 0.51, "s", most=0.5, note="why that matters"),
        CheckedFigure("too little", 1.0, least=2.0),
        CheckedFigure("not a number", float("nan"), most=1.0),
        CheckedFigure("for the record", 3.0, "GB"),
        CheckedFigure("not here", None, skipped=True, note="no such kernels"),
    ]
    verdicts = ["ok", "FAILED", "FAILED", "FAILED", "recorded", "skipped"]
    assert [figure.verdict for figure in figures] == verdicts
    lines = table(figures).splitlines()
    assert lines[0].split() == ["figure", "value", "unit", "limit", "verdict"]
    assert lines[1].endswith("<= 0.5  ok")
    assert lines[3].strip() == "why that matters"
    assert lines[-1].strip() == "no such kernels"
    json.dumps([figure.described() for figure in figures], allow_nan=False)


def test_no_check_of_a_name_is_refused(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["tests.gpu", "--device", "cpu", "--only", "speed, 2B"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert "--only speed, 2B: no check; there are nccl, rope" in capfd.readouterr().err


def test_without_a_gpu_it_is_skipped_as_a_whole(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.executable", interpreter())
    monkeypatch.setattr("sys.argv", ["tests.gpu", "--out", str(tmp_path / "report.json")])
    assert main() == 0
    assert capfd.readouterr().out.startswith("skipped as a whole: torch sees no GPU")
    assert not (tmp_path / "report.json").exists()


def test_the_command_starts_checks_and_writes_their_figures(tmp_path):
    """Processes of the checks have to find what `python -m tests.gpu` has as its __main__."""
    out = tmp_path / "report.json"
    command = [interpreter(), "-m", "tests.gpu", "--device", "cpu", "--only", "snap|^rope"]
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [figure["verdict"] for figure in json.loads(out.read_text())["figures"]]
    assert len(verdicts) == 3
    assert set(verdicts) == {"ok", "recorded"}


def test_a_bundle_holds_what_the_checks_import_in_parts_that_fit():
    wanted = locked((PROJECT / "requirements.lock").read_text())
    assert len(wanted) == len(PACKAGES)
    assert not [each for each in wanted if each.startswith(("torch", "nvidia-cu"))]
    sizes = {"a": 5, "b": 4, "c": 3, "d": 2, "e": 1}
    assert parts(sizes, most=6) == [["a", "e"], ["b", "d"], ["c"]]
