"""Needs, words and commands of `make transformer-engine`, without compiling anything."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from base import host_memory
from base.libraries.locks import pins_of
from install import transformer_engine
from install.settings import RefusedError
from install.transformer_engine import (
    COMPILER_BYTES,
    DISK_BYTES,
    LOCK,
    BuildMachine,
    build_environment,
    check,
    steps,
    summary,
    this_machine,
)
from tests.runs import PROJECT

FIT = BuildMachine(
    cuda="13.0",
    compiler="/usr/bin/c++",
    python_header=True,
    cuda_headers=True,
    cores=8,
    free_memory=64 * 10**9,
    free_disk=10**12,
)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"cuda": None}, "is for CPUs; run make -B venv"),
        ({"cuda": "12.6"}, "for CUDA 12.6, whose cuDNN is older than the 9.12"),
        ({"cuda_headers": False}, "brings no headers of CUDA, it is a container's"),
        ({"compiler": None}, "no C[+][+] compiler .*; run apt-get install g[+][+]"),
        ({"python_header": False}, "Python.h is missing; run apt-get install python3-dev"),
        ({"free_disk": DISK_BYTES - 1}, "1.0 GB of disk and 1.0 GB are free here"),
    ],
    ids=["no CUDA", "CUDA 12", "a container", "no compiler", "no headers", "full disk"],
)
def test_what_is_missing_is_told_in_one_line(missing, words):
    check(FIT)
    with pytest.raises(RefusedError, match=words) as refused:
        check(replace(FIT, **missing))
    assert "\n" not in str(refused.value)


def test_as_many_compilers_as_there_is_memory_for():
    assert FIT.jobs == 8
    assert replace(FIT, free_memory=3 * COMPILER_BYTES).jobs == 3
    assert replace(FIT, free_memory=1).jobs == 1
    lines = [summary(replace(FIT, cores=cores)) for cores in (1, 8)]
    minutes = [int(re.search(r"about (\d+) minutes", line)[1]) for line in lines]  # type: ignore[index]
    assert minutes[0] == pytest.approx(8 * minutes[1], abs=8)
    assert "with 1 compiler of" in lines[0]
    assert "with 8 compilers of" in lines[1]


def test_compilers_are_as_many_as_the_limit_of_the_container_has_memory_for(monkeypatch, tmp_path):
    """As in a job of 8 GB on a node of 512."""
    group = tmp_path / "cgroup/job"
    contents = {"memory.max": "8000000000", "memory.current": "0", "memory.stat": "inactive_file 0"}
    for path, text in [
        (tmp_path / "proc/self/cgroup", "0::/job\n"),
        *((group / name, text) for name, text in contents.items()),
    ]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    memory = SimpleNamespace(available=512 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(64))
    assert this_machine().jobs == 2


def test_headers_are_those_of_the_wheels_and_of_no_toolkit():
    before = {"CUDA_HOME": "/usr/local/cuda-12", "CPATH": "/else", "HOME": "/me", "PATH": "/bin"}
    after = build_environment(before, 4, Path("/there"))
    assert not {"CUDA_HOME", "CPATH"} & after.keys()
    assert after["HOME"] == "/me"
    assert after["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]
    assert (after["MAX_JOBS"], after["TMPDIR"]) == ("4", "/there")


def test_the_lock_replaces_nothing_of_the_others(monkeypatch):
    monkeypatch.chdir(PROJECT)
    ours = pins_of(LOCK)
    for path in PROJECT.glob("requirements*.lock"):
        others = re.findall(r"^([\w.-]+)==", path.read_text(), re.MULTILINE)
        assert not ours.keys() & {name.lower().replace("_", "-") for name in others}
    assert all(ours[f"nvidia-cuda-{part}"].startswith("13.0.") for part in ("crt", "cccl"))


def test_nothing_is_installed_but_headers_before_the_binding_is_compiled(monkeypatch):
    """megatron-core cannot be imported beside a package without its binding."""
    monkeypatch.chdir(PROJECT)
    named = steps(Path("/wheels"))
    assert list(named) == ["downloading", "headers", "compiling", "installing"]
    engine = [
        step for step, line in named.items() if any(w.startswith("transformer-") for w in line)
    ]
    assert engine == ["downloading", "compiling", "installing"]
    assert [step for step, line in named.items() if "install" in line] == ["headers", "installing"]
    assert all("--no-deps" in line for line in named.values())
    assert "transformer-engine-torch==2.20.2" not in named["downloading"]
    assert "transformer-engine-torch==2.20.2" in named["installing"]
    assert "--no-index" in named["installing"]


def test_a_torch_without_cuda_ends_it_with_exit_code_2(monkeypatch, capsys):
    machine = replace(FIT, cuda=None)
    monkeypatch.setattr(transformer_engine, "this_machine", lambda: machine)
    with pytest.raises(SystemExit) as ended:
        transformer_engine.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the torch of .venv is for CPUs")
    assert error.count("\n") == 1


@pytest.mark.parametrize("failing", ["downloading", "headers", "compiling", "installing"])
def test_a_step_that_fails_is_named_and_leaves_no_files(monkeypatch, tmp_path, failing):
    (tmp_path / ".venv").mkdir()
    lock = (PROJECT / "transformer-engine.lock").read_text()
    (tmp_path / "transformer-engine.lock").write_text(lock)
    monkeypatch.chdir(tmp_path)
    run = []

    def fail(command: list[str], env: dict[str, str], check: bool) -> Any:
        run.append(command)
        names = list(steps(Path()))
        return SimpleNamespace(returncode=int(names[len(run) - 1] == failing))

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(RefusedError, match=f"{failing} failed"):
        transformer_engine.install(FIT)
    assert len(run) == list(steps(Path())).index(failing) + 1
    assert not list((tmp_path / ".venv").iterdir())
