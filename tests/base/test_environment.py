"""The software of a process: versions, where they come from, and what differs from the lock."""

import json
import os
import shutil
import site
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from base import environment
from base.environment import software
from tests.present import present
from tests.runs import PROJECT, execute


def locked(name: str, lock: str = "requirements.lock") -> str:
    lines = (PROJECT / lock).read_text().splitlines()
    return next(line.removeprefix(f"{name}==") for line in lines if line.startswith(f"{name}=="))


def install_wheels(folder: Path, **versions: str) -> str:
    """A folder of packages that only say their versions."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
    return str(folder)


@pytest.fixture
def container(tmp_path, monkeypatch):
    """An environment over the Python of a container, with its own torch and Transformer Engine, a
    home, and PYTHONPATH. Returns the first two folders of packages.
    """
    venv, system = tmp_path / "checkout" / ".venv", tmp_path / "python"
    monkeypatch.setattr(sys, "prefix", str(venv))
    monkeypatch.setattr(sys, "base_prefix", str(system))
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "home"))
    paths = [
        install_wheels(tmp_path / "modules", deepspeed="0.1"),
        install_wheels(venv / "lib", megatron_core=locked("megatron-core"), numpy=locked("numpy")),
        install_wheels(tmp_path / "home", transformers=locked("transformers")),
        install_wheels(
            system / "lib", torch="2.15.0a0+c0ffee.nv26.09", transformer_engine="2.19", numpy="1"
        ),
    ]
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.delitem(sys.modules, "torch")  # whose libraries are this machine's
    monkeypatch.setattr(environment, "_library_files", dict)
    return venv, system


def test_each_package_is_the_one_that_an_import_takes(container):
    here = software()
    assert here["packages"] == {
        "torch": "2.15.0a0+c0ffee.nv26.09",
        "megatron-core": locked("megatron-core"),
        "deepspeed": "0.1",
        "transformer-engine": "2.19",
        "transformers": locked("transformers"),
        "numpy": locked("numpy"),
    }
    assert here["origins"] == {
        "torch": "system",
        "deepspeed": "elsewhere",
        "transformer-engine": "system",
        "transformers": "user",
    }


def test_what_differs_from_the_lock_is_listed_with_both_versions(container):
    assert software()["differs_from_tested"] == {
        "torch": {"tested": locked("torch"), "here": "2.15.0a0+c0ffee.nv26.09"},
        "deepspeed": {"tested": locked("deepspeed"), "here": "0.1"},
    }


def test_another_build_of_the_same_release_is_no_difference(container, monkeypatch):
    venv, _ = container
    install_wheels(venv / "more", torch=f"{locked('torch')}+cpu")
    monkeypatch.setattr(sys, "path", [str(venv / "more")])
    assert software()["differs_from_tested"] == {}
    assert software()["origins"] == {}


def test_a_build_for_another_cuda_is_compared_with_its_own_lock(container, monkeypatch):
    venv, _ = container
    nccl = locked("nvidia-nccl-cu12", "requirements-cu126.lock")
    install_wheels(venv / "more", torch=f"{locked('torch')}+cu126", nvidia_nccl_cu12=nccl)
    monkeypatch.setattr(sys, "path", [str(venv / "more")])
    monkeypatch.setattr(environment, "_library_versions", lambda _: {"nccl": nccl, "cuda": "12.8"})
    assert software()["differs_from_tested"] == {"cuda": {"tested": "12.6", "here": "12.8"}}


def test_a_python_without_an_environment_has_nothing_of_its_own(container, monkeypatch):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "megatron-core" in software()["origins"]


def test_libraries_are_those_that_torch_says():
    here = software()
    if torch.version.cuda is None:
        assert not {"cuda", "cudnn", "nccl"} & here.keys()
        return
    number = torch.backends.cudnn.version()
    parts = [int(part) for part in here["cudnn"].split(".")]
    assert parts[0] * 10000 + parts[1] * 100 + parts[2] == number
    assert here["nccl"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert here["cuda"] == torch.version.cuda


def test_no_place_of_this_machine_is_recorded(container, monkeypatch):
    monkeypatch.setenv("APPTAINER_CONTAINER", "/home/somebody/images/quantdyn.sif")
    monkeypatch.delenv("QUANTDYN_IMAGE", raising=False)  # a path of the site file, as it is there
    assert "/" not in json.dumps(software())


def test_a_copy_without_a_lock_compares_nothing(tmp_path):
    shutil.copytree(PROJECT / "base", tmp_path / "base")
    command = "from base.environment import software; print(software()['differs_from_tested'])"
    done = execute([sys.executable, "-c", command], cwd=tmp_path)
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"APPTAINER_CONTAINER": "/shared/a.sif", "SINGULARITY_CONTAINER": "/shared/a.sif"},
            {"kind": "apptainer", "image": "a.sif"},
        ),
        ({"SINGULARITY_CONTAINER": "/b.sif"}, {"kind": "singularity", "image": "b.sif"}),
        (
            {"APPTAINER_CONTAINER": "/a.sif", "QUANTDYN_IMAGE": "nvcr.io#nvidia/pytorch"},
            {"kind": "apptainer", "image": "nvcr.io#nvidia/pytorch"},
        ),
        (
            {"APPTAINER_CONTAINER": "", "NVIDIA_PYTORCH_VERSION": "26.07", "NVIDIA_BUILD_ID": "7"},
            {"kind": "apptainer", "nvidia_pytorch": "26.07", "nvidia_build": "7"},
        ),
    ],
)
def test_the_container_by_its_variables(variables, expected):
    with mock.patch.dict(os.environ, variables, clear=True):
        assert environment._container() == expected


def test_the_drivers_version_is_read_off_both_kinds_of_its_file():
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
    ):
        assert present(environment.DRIVER.search(text))[0] == "580.95.05"
