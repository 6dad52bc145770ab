"""Every check of tests/gpu on this CPU, in small: what is measured there runs here first."""

import json
import multiprocessing
import os
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from base.errors import UserError
from tests.forked import Forked
from tests.gpu import kernels, speed
from tests.gpu.__main__ import main
from tests.gpu.bundle import PACKAGES, PROJECT, SOURCES, locked, parts
from tests.gpu.checks import ON_ONE, Check, run
from tests.gpu.figures import CheckedFigure, table
from tests.gpu.workbench import FORKS, IN_SMALL, Workbench
from tests.interpreter import interpreter, share
from tests.present import present
from tests.rehearsal.processes import forked, run_one

# A check is a fork of a server that has imported what it needs, itself a fork: else every check
# would import torch, 10 seconds. Commands that it starts are forks of the interpreter's server.
share()
multiprocessing.set_executable(interpreter())
FORKS.set_forkserver_preload(["tests.preloaded"])

SECONDS = 600.0  # nothing is timed here: a bound on a check that hangs
# Start new interpreters.
TRAINING = {"training, CPU and GPU", "training, tied embeddings", "perturbations, CPU and GPU"}
# As a command: tests/rehearsal/test_training.py has that on the stand-in.
STARTS_TRAINING = {*TRAINING, "DeepSpeed", "saves", "speed, 190M", "speed, 1B"}
NEEDS_GPU = {
    *(check.name for check in ON_ONE if check.name.startswith("Transformer Engine")),
    *("training, CUDA graph", "DeepSpeed, kernels"),
    *("libraries", "saved checkpoints in vLLM"),
}
STRESSED = {*TRAINING, "speed, 1B"}  # in small as speed, 190M


def rows(without: set[str]) -> list[Any]:
    """The checks but these, as parameters; the long ones in `make stress` alone."""
    return [
        pytest.param(
            check, id=check.name, marks=[pytest.mark.stress] if check.name in STRESSED else []
        )
        for check in ON_ONE
        if check.name not in without
    ]


def figures_of(checks: list[Check], work: Path, seconds: float = SECONDS) -> list[CheckedFigure]:
    outcomes = run(Workbench("cpu", IN_SMALL, work, start=forked), checks, seconds)
    return [figure for outcome in outcomes for figure in outcome.figures]


@pytest.mark.parametrize("check", rows(NEEDS_GPU))
def test_a_check_runs_and_holds_on_the_cpu(tmp_path, check):
    figures = figures_of([check], tmp_path)
    assert figures
    assert not [figure for figure in figures if figure.verdict not in ("ok", "recorded")], table(
        figures
    )


@pytest.mark.parametrize("check", rows(NEEDS_GPU | STARTS_TRAINING))
def test_a_check_takes_every_tensor_to_the_gpu(tmp_path, check):
    """The stand-in refuses what is left on the CPU; limits of speed and memory it has not."""
    out = tmp_path / "figures.json"
    child = FORKS.Process(target=run_one, args=(check.measure, tmp_path, out))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert all(figure["value"] is not None for figure in json.loads(out.read_text()))


@pytest.mark.parametrize("check", rows({check.name for check in ON_ONE} - NEEDS_GPU))
def test_a_check_that_needs_a_gpu_says_why_it_is_skipped(tmp_path, check):
    (figure,) = figures_of([check], tmp_path)
    assert figure.verdict == "skipped"
    assert "need a GPU" in figure.note


def hangs(workbench: Workbench) -> list[CheckedFigure]:
    """Never ends, nor does what it started."""
    (workbench.work / "pid").write_text(str(os.getpid()))
    time.sleep(SECONDS)
    return []


def breaks(workbench: Workbench) -> list[CheckedFigure]:
    raise KeyError("no such kernel")


def test_a_check_that_fails_or_hangs_is_a_failed_figure(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.gpu.checks.SLOWER_SECONDS", 1)
    failed, hung = figures_of([Check("a", breaks, 1), Check("b", hangs, 0.1)], tmp_path)
    assert (failed.verdict, hung.verdict) == ("FAILED", "FAILED")
    assert "KeyError: 'no such kernel'" in failed.note
    assert "no figure within 1 s" in hung.note
    assert not psutil.pid_exists(int((tmp_path / "1" / "pid").read_text()))


def test_what_the_time_does_not_suffice_for_is_not_run(tmp_path):
    """One is cut off, the next too long to be started, and the last ends before it is late."""
    rows = [Check("a", hangs, 0), Check("b", hangs, 5), Check("c", kernels.rope, 0)]
    figures = figures_of(rows[:1], tmp_path / "late", seconds=2)
    figures += figures_of(rows[1:], tmp_path, seconds=4)
    assert [figure.verdict for figure in figures] == ["NOT RUN", "NOT RUN", "ok"]
    assert "cut off after 2 s" in figures[0].note
    assert "4 s were left, and it takes about 5" in figures[1].note


def test_steps_of_an_older_tree_are_timed_beside_those_of_this_one(tmp_path):
    """The older tree is this one here; which of them is asked for is the bench's word."""
    trees = []

    def start(ranks: int, *words: str, tree: Path) -> Forked:
        trees.append(tree)
        return forked(ranks, *words)

    bench = Workbench("cpu", IN_SMALL, tmp_path / "0", base=tmp_path / "older", start=start)
    figures = speed.before_and_after(bench, "190M")
    assert trees == [tmp_path / "older", PROJECT]
    ratio, moved = figures[-2:]
    before, after = (present(figure.value) for figure in figures if figure.name.endswith("step"))
    assert ratio.value == pytest.approx(before / after)
    assert (moved.value, moved.verdict) == (0, "ok")


@pytest.mark.stress
def test_an_older_commit_trains_with_its_own_modules(tmp_path):
    """By a real interpreter: forks have this tree's modules."""
    older = speed.tree_of("HEAD", tmp_path / "older")
    (older / "train" / "model" / "rotary.py").write_text("raise SystemExit(77)\n")
    bench = Workbench("cpu", IN_SMALL, tmp_path / "0", base=older)
    with pytest.raises(RuntimeError, match="exit code 77"):
        speed.before_and_after(bench, "190M")
    older = speed.tree_of("HEAD", tmp_path / "again")
    bench = Workbench("cpu", IN_SMALL, tmp_path / "1", base=older)
    assert speed.before_and_after(bench, "190M")[-1].verdict == "ok"


def test_an_older_tree_is_a_commit_of_the_checkout_or_a_directory(tmp_path, monkeypatch):
    repository, out = tmp_path / "repository", tmp_path / "out"
    main_file = repository / "train" / "__main__.py"
    main_file.parent.mkdir(parents=True)
    main_file.write_text("older")
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "a"), ("tag", "v1")):
        subprocess.run(("git", "-C", str(repository), *words), check=True)
    main_file.write_text("newer")
    monkeypatch.setattr(speed, "CHECKOUT", repository)
    exported = speed.tree_of("v1", out)
    assert (exported / "train" / "__main__.py").read_text() == "older"
    assert speed.tree_of(str(repository), out) == repository
    with pytest.raises(UserError, match=r"BASE v2 is no directory .*; give one of them"):
        speed.tree_of("v2", tmp_path / "other")


def test_the_table_judges_every_figure():
    figures = [
        CheckedFigure("as good as it gets", 0.5, "s", most=0.5),
        CheckedFigure("too slow", 0.51, "s", most=0.5, note="why that matters"),
        CheckedFigure("too little", 1.0, least=2.0),
        CheckedFigure("not a number", float("nan"), most=1.0),
        CheckedFigure("for the record", 3.0, "GB"),
        CheckedFigure("not here", None, absent="skipped", note="no such kernels"),
        CheckedFigure("too late", None, absent="NOT RUN", note="no time"),
    ]
    verdicts = ["ok", "FAILED", "FAILED", "FAILED", "recorded", "skipped", "NOT RUN"]
    assert [figure.verdict for figure in figures] == verdicts
    lines = table(figures).splitlines()
    assert lines[0].split() == ["figure", "value", "unit", "limit", "verdict"]
    assert lines[1].endswith("<= 0.5  ok")
    assert lines[3].strip() == "why that matters"
    assert lines[-3].strip() == "no such kernels"
    json.dumps([figure.described() for figure in figures], allow_nan=False)


def test_no_check_of_a_name_is_refused(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["tests.gpu", "--device", "cpu", "--only", "speed, 2B"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert "--only speed, 2B: no check; there are nccl, training" in capfd.readouterr().err


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


def test_a_bundle_holds_what_its_packages_require():
    bundled = {canonicalize_name(name) for name in (*PACKAGES, *SOURCES)}
    for name in bundled:
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            assert canonicalize_name(requirement.name) in bundled | {"torch"}, (name, text)
