"""The pins of the locks, against what packages and pyproject.toml ask for."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from install import machine, packages, settings
from tests.runs import PROJECT

LEFT_OUT = {"torchao", "maturin", "torchvision", "pypcre"}
PYTHONS = ("3.12", "3.13")
# Of the metadata of torch-2.14.0+cu126-cp312-cp312-manylinux_2_28_x86_64.whl, for Linux. Each library's package is the one
# that an extra of cuda-toolkit 12.6.3 names.
NEEDS_OF_CU126 = """
cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvrtc,nvtx]==12.6.3
cuda-bindings<13,>=12.9.4 nvidia-cudnn-cu12==9.10.2.21 nvidia-cusparselt-cu12==0.7.1 nvidia-nccl-cu12==2.29.3
nvidia-nvshmem-cu12==3.4.5 nvidia-nvjitlink-cu12<13,>=12.6.85 triton~=3.8.0
"""


def pins(name: str) -> dict[str, str]:
    """Versions that a lock pins, by canonical name."""
    lines = [line for line in (PROJECT / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", line) for line in lines), (
        "a pin of another form"
    )
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_pins_what_the_extras_need_and_nothing_else(python):
    """Followed through the metadata of what is installed here, whose markers are evaluated for
    each Python.
    """
    locked, cuda = pins("requirements.lock"), pins("requirements-cu130.lock")
    assert not locked.keys() & (cuda.keys() | LEFT_OUT)
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [Requirement(need) for need in project["dependencies"]]
    todo += [Requirement(need) for extra in extras for need in extras[extra] if extra != "gpu"]
    seen, environment = set(), {"python_version": python, "python_full_version": f"{python}.0"}
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if name in LEFT_OUT:
            continue
        assert name in locked | cuda, f"{need} is not pinned"
        assert need.specifier.contains((locked | cuda)[name], prereleases=True), (
            f"{need} is not what is pinned"
        )
        if name in cuda or (name, frozenset(need.extras)) in seen:
            continue
        seen.add((name, frozenset(need.extras)))
        for line in importlib.metadata.requires(name) or ():
            child = Requirement(line)
            if any(
                child.marker is None or child.marker.evaluate(environment | {"extra": extra})
                for extra in need.extras | {""}
            ):
                todo.append(child)
    assert {name for name, _ in seen} == locked.keys()


def test_the_lock_for_cuda_12_pins_what_its_torch_needs():
    locked = pins("requirements-cu126.lock")
    for line in NEEDS_OF_CU126.split():
        need = Requirement(line)
        assert need.specifier.contains(locked[canonicalize_name(need.name)]), line

    # the same libraries as for CUDA 13, under the names that they had then
    plain = {re.sub("-cu1[23]$", "", name) for name in pins("requirements-cu130.lock")}
    assert {re.sub("-cu1[23]$", "", name) for name in locked} == plain
    libraries = [name for name in locked if name.startswith("nvidia-")]
    assert all(name.endswith("-cu12") for name in libraries)


def test_every_build_has_a_lock_and_every_lock_that_is_named_is_there():
    builds = {f"requirements-{build}.lock" for build in settings.CUDA_OF}
    assert builds == {path.name for path in PROJECT.glob("requirements-*.lock")}
    patterns = ("Makefile", "*.lock", "*.md", "docs/**/*.md", "slurm/images/*", "tests/**/*.py")
    texts = [path.read_text() for pattern in patterns for path in PROJECT.glob(pattern)]
    named = {name for text in texts for name in re.findall(r"requirements[a-z0-9-]*\.lock", text)}
    assert named == builds | {"requirements.lock"}


@pytest.mark.parametrize(
    ("words", "torch", "others"),
    [
        ([], ["torch==2.14.0"], "requirements-cu130.lock"),
        (["TORCH_INDEX=https://a.b/whl/cu126"], ["torch==2.14.0+cu126"], "requirements-cu126.lock"),
        (["TORCH_INDEX=/cpu/of/whl/cu130/"], ["torch==2.14.0+cu130"], "requirements-cu130.lock"),
        (["TORCH_INDEX=https://a.b/whl/cpu"], ["torch==2.14.0+cpu"], None),
        (["TORCH_INDEX=", "SYSTEM_TORCH=1"], [], None),
    ],
)
def test_what_is_installed(words, torch, others):
    names = pins("requirements.lock") | (pins(others) if others else {})
    required = [Requirement(line) for line in settings.requirements(settings.read(words))]
    assert [str(need) for need in required if need.name == "torch"] == torch
    assert {canonicalize_name(need.name) for need in required} - {"torch"} == names.keys() - {
        "torch"
    }


@pytest.mark.parametrize(("variable", "at_once"), [("1", True), ("", False)])
def test_bytecode_is_compiled_at_once_where_python_writes_none_later(
    monkeypatch, variable, at_once
):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", variable)
    commands = [
        packages.command(uv, settings.read([]), "python", Path("pins")) for uv in ([], ["uv"])
    ]
    assert ("--no-compile" not in commands[0]) == ("--compile-bytecode" in commands[1]) == at_once


@pytest.mark.parametrize("torch", ["2.14.0", "2.14.0a0+1234abc.nv26.8", "2.15.0a0+5678def.nv26.10"])
def test_pip_with_an_extra_keeps_the_torch_of_an_image(torch):
    """A pre-release counts as installed where it fits; an exact pin would replace it."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    needs = [
        Requirement(need) for needs in project["optional-dependencies"].values() for need in needs
    ]
    ours = [need for need in needs if need.name == "torch"]
    assert len(ours) == 4
    assert all(need.specifier.contains(torch, prereleases=True) for need in ours)
    assert {str(need.specifier) for need in ours} == {f">={machine.oldest_torch()}"}
