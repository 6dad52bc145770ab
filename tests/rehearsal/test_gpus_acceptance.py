"""Every check of several GPUs on ranks of this CPU, in small: over gloo, and where it goes each rank
on a stand-in for its GPU.
"""

import json
import multiprocessing
import subprocess
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.gpu.__main__ import main
from tests.gpu.bundle import PROJECT
from tests.gpu.checks import ON_SEVERAL, Check
from tests.gpu.figures import SkippedError, table
from tests.gpu.workbench import FORKS, IN_SMALL, Workbench
from tests.interpreter import interpreter
from tests.rehearsal.processes import forked, forked_on_stand_ins

multiprocessing.set_executable(interpreter())
FORKS.set_forkserver_preload(["tests.preloaded"])

# What asks CUDA in C++: FSDP, the name of the GPU, DeepSpeed's accelerator.
ON_CPU = {
    "curvature, FSDP",
    "ZeRO-2",
    "on one GPU",
    "speed, 1B, data parallel",
    "speed, 1B, tensor parallel",
}
SKIPPED = {
    "tensor and pipeline parallel": "four GPUs",
    "Transformer Engine, tensor parallel": "GPU",
}
# Other layouts and optimizers of `against_one`, and what tests/train and tests/quant_eval have, too.
STRESSED = {
    *("rank hangs", "GPTQ on ranks"),
    *("data parallel", "pipeline parallel", "Muon, data parallel", "Muon, tensor parallel"),
    *("ZeRO-2", "on one GPU", "speed, 1B, tensor parallel"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The directory of runs that checks share."""
    return tmp_path_factory.mktemp("several")


def bench(root, check: Check, gpus: int = 2) -> Workbench:
    device, start = ("cpu", forked) if check.name in ON_CPU else ("cuda", forked_on_stand_ins)
    return Workbench(device, IN_SMALL, root, gpus=gpus, start=start).at(f"{gpus} {check.name}")


def hold(check: Check, workbench: Workbench) -> None:
    figures = check.measure(workbench)
    assert figures
    verdicts = {figure.verdict for figure in figures}
    assert verdicts <= {"ok", "recorded"}, table(figures)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check, id=check.name, marks=[pytest.mark.stress] if check.name in STRESSED else []
        )
        for check in ON_SEVERAL
        if check.name not in SKIPPED
    ],
)
def test_a_check_holds_on_two_ranks(root, check):
    hold(check, bench(root, check))


@pytest.mark.stress
@pytest.mark.parametrize(
    "name", ["tensor and pipeline parallel", "state at other layouts", "rank killed"]
)
def test_a_check_holds_on_four_ranks(root, name):
    (check,) = (check for check in ON_SEVERAL if check.name == name)
    hold(check, bench(root / "of four", check, gpus=4))


def reason(root, name: str) -> str:
    """Why a check is skipped. It may import megatron-core, which changes torch for good."""
    (check,) = (check for check in ON_SEVERAL if check.name == name)
    with pytest.raises(SkippedError) as skipped:
        check.measure(bench(root, check))
    return str(skipped.value)


@pytest.mark.parametrize("name", SKIPPED)
def test_a_check_that_two_gpus_cannot_make_says_why(root, name):
    with ProcessPoolExecutor(1, FORKS) as pool:
        assert SKIPPED[name] in pool.submit(reason, root, name).result()


def test_the_command_starts_ranks_and_writes_their_figures(tmp_path):
    out = tmp_path / "report.json"
    command = [interpreter(), "-m", "tests.gpu", "--gpus", "2", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--only", "^coll.*s$", "--out", str(out)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["gpus"] == 2
    (check,) = report["checks"]
    assert check["name"] == "collectives"
    assert 0 < check["seconds"] < check["expected_seconds"] * 10
    assert {figure["verdict"] for figure in report["figures"]} == {"ok", "recorded"}


def test_fewer_gpus_than_asked_for_are_refused_in_a_line(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.executable", interpreter())
    monkeypatch.setattr("sys.argv", ["tests.gpu", "--gpus", "4", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: these checks need 4 GPUs, and torch sees 0 here; ")
    assert not (tmp_path / "out").exists()
