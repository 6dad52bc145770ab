"""The part of a machine that a study may use, with a stand-in for the driver; and what this machine
really answers.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from base import gpus
from base.errors import UserError
from study.machine.hardware import Hardware, planned, this_machine
from tests.interpreter import interpreter

PROJECT = Path(__file__).resolve().parent.parent.parent
GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


def driver(*used: float, models: tuple[str, ...] = (), cuda: int = 13000) -> SimpleNamespace:
    """Answers of NVML to a study, for GPUs of a model, with so many GiB in use on each."""

    def memory(number: int, version: int) -> SimpleNamespace:
        total, reserved, taken = 80 * GIB, GIB, round(used[number] * GIB)
        return SimpleNamespace(
            total=total, reserved=reserved, used=taken, free=total - reserved - taken
        )

    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlMemory_v2=pynvml.nvmlMemory_v2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUUID=lambda number: f"GPU-{number}0000000",
        nvmlDeviceGetName=lambda number: (models or (H100,) * len(used))[number],
        nvmlDeviceGetMemoryInfo=memory,
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
    )


@pytest.fixture
def machine(monkeypatch):
    """Makes this a machine with these GPUs and a torch of this CUDA."""

    def make(*used: float, torch_cuda: str | None = "13.0", **answers) -> None:
        monkeypatch.setattr(gpus, "pynvml", driver(*used, **answers))
        monkeypatch.setattr(
            gpus, "_torch_version", lambda: SimpleNamespace(cuda=torch_cuda, __version__="2.13.0")
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


def chosen(device: str = "auto", count: int | None = None, sized_for: str = "cuda") -> Hardware:
    return this_machine(device, count, 16, sized_for=sized_for)


def test_a_study_has_all_idle_gpus_or_as_many_as_asked_for(machine, monkeypatch):
    machine(0, 0, 0, 0)
    assert chosen() == Hardware(16, ("0", "1", "2", "3"), "h100", 79 * GIB)
    assert chosen(count=2).gpus == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-10000000")
    assert chosen().gpus == ("3", "1")
    machine(0, 70, 0, 0)
    assert chosen(count=3).gpus == (
        "0",
        "2",
        "3",
    ), "a busy one is passed over where others are left"


def test_what_a_study_is_sized_for_decides_where_it_runs_unless_it_is_told(machine):
    machine(0)
    assert chosen(sized_for="cpu") == Hardware(16)
    assert chosen("cuda", sized_for="cpu").gpus == ("0",)
    assert chosen("cpu") == Hardware(16)
    assert chosen(sized_for="any").gpus == ("0",)
    machine()
    assert chosen(sized_for="any") == Hardware(16)


@pytest.mark.parametrize(
    ("has", "asked", "words"),
    [
        ({"used": ()}, {}, "has no NVIDIA GPU; give --device cpu"),
        (
            {"used": (0, 0)},
            {"count": 3},
            "--gpus 3 asks for more GPUs than the 2 there are; give fewer",
        ),
        (
            {"used": (0, 60)},
            {},
            (
                r"GPU 1 \(NVIDIA H100 80GB HBM3, 64.4 of 84.8 GB in use\) is busy; wait until it is"
                r" free, give --gpus 1"
            ),
        ),
        ({"used": (60,)}, {}, "is busy; wait until it is free, end what runs there"),
        (
            {"used": (0,), "torch_cuda": None},
            {},
            "torch 2.13.0 is a build without CUDA; .* or give --device cpu",
        ),
        (
            {"used": (0,), "cuda": 12040},
            {},
            r"driver 580.65.06 runs CUDA up to 12.4 and torch 2.13.0 needs 13.0; update the driver, b",
        ),
        ({"used": (0, 0), "models": (H100, "NVIDIA A100")}, {}, "GPUs differ .* choose equal ones"),
        ({"used": (0,)}, {"device": "gpu"}, "--device gpu is unknown; did you mean cuda"),
        ({"used": (0,)}, {"device": "cpu", "count": 1}, "add --device cuda"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_helps(machine, has, asked, words):
    machine(*has.pop("used"), **has)
    with pytest.raises(UserError, match=words):
        chosen(**asked)


@pytest.mark.parametrize("names", ["", "-1", "7", "MIG-12"])
def test_gpus_that_are_hidden_or_unknown_are_refused(machine, monkeypatch, names):
    machine(0, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        chosen()


def test_a_driver_within_the_same_major_version_of_cuda_is_taken(machine):
    machine(0, cuda=13000, torch_cuda="13.2")
    assert chosen().gpus == ("0",)


def test_what_a_study_ran_on_is_read_back(tmp_path):
    two = planned(2, "h200", 5)
    two.record(tmp_path)
    assert Hardware.recorded(tmp_path) == two
    assert str(two) == "2 x h200 of 141 GB"
    assert Hardware.recorded(tmp_path / "absent") == Hardware(1)
    with pytest.raises(UserError, match="--gpu b300 is unknown; take one of h100"):
        planned(2, "b300", 5)


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has a GPU")
def test_where_there_is_no_gpu_cuda_is_one_line_and_code_2(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # set, it hides them, and says so
    command = [interpreter(), "-m", "study", "run", "tiny", "--profile", "smoke"]
    done = subprocess.run(
        [*command, "--device", "cuda", "--root", str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: this machine has no ")
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
