"""Checks of a machine: Pythons, `install/find_python.sh` among them, the disk, and drivers of ten years."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from install import machine, settings
from tests.runs import PROJECT, write_program

HEAD = "| NVIDIA-SMI {0}    Driver Version: {0}    CUDA Version: {1}     |"
NEW_HEAD = "| NVIDIA-SMI {0}    KMD Version: {0}     CUDA UMD Version: {1}     |"
CU126 = "https://download.pytorch.org/whl/cu126"
SCRIPT = PROJECT / "install" / "find_python.sh"
DOES_NOT_RUN = ""


@pytest.mark.parametrize(
    ("version", "right"), [((3, 11), False), ((3, 12), True), ((3, 13), True), ((3, 14), False)]
)
def test_pythons(version, right):
    problem = machine.python_problem(version)
    assert (problem is None) == right
    assert right or str(problem).startswith(
        f"Python 3.{version[1]} cannot run this, 3.12 and 3.13 can: install one (apt-get"
    )


def test_pyproject_names_the_same_pythons():
    oldest, newest = machine.OLDEST, machine.NEWEST
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"


def test_a_python_without_ensurepip_is_told_the_package():
    assert machine.venv_problem((3, 13)) is None
    problem = machine.venv_problem((3, 13), find={"venv": 1}.get)
    assert "apt-get install python3.13-venv" in str(problem)


@pytest.mark.parametrize(
    ("free", "build", "words"),
    [
        (12e9, "cu130", None),
        (5e9, "cu126", "installing takes 10.0 GB and 5.0 GB are free here: .* make TORCH_INDEX="),
        (5e9, "system", None),
        (1e9, "cpu", "installing takes 4.0 GB and 1.0 GB are free here: .* elsewhere$"),
    ],
)
def test_disk(free, build, words):
    problem = machine.disk_problem(free, build)
    assert (problem is None) if words is None else re.match(words, str(problem))


@pytest.mark.parametrize(
    ("report", "version", "cuda"),
    [
        (HEAD.format("470.256.02", "11.4"), "470.256.02", "11.4"),
        (HEAD.format("550.54.15", "12.4"), "550.54.15", "12.4"),
        (HEAD.format("580.159.03", "13.0"), "580.159.03", "13.0"),
        # a newer libcuda than the driver's own, as NVIDIA's images bring for data centers
        (HEAD.format("550.54.15", "13.0"), "550.54.15", "13.0"),
        (NEW_HEAD.format("610.57.04", "13.3"), "610.57.04", "13.3"),
        (HEAD.format("570.86.10", "N/A"), "570.86.10", "12.6"),
        (HEAD.format("590.44.01", "ERR!"), "590.44.01", "13.0"),
        (HEAD.format("510.108.03", "ERR!"), "510.108.03", "11"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "", ""),
        ("", "", ""),
    ],
)
def test_the_head_of_nvidia_smi(report, version, cuda):
    expected = machine.Driver(version, cuda) if version else None
    assert machine.parsed_driver(report) == expected


@pytest.mark.parametrize(
    ("version", "cuda", "words"),
    [
        (
            *("550.54.15", "12.4"),
            r"driver 550.54.15 runs CUDA up to 12.4 and torch \S+ of PyPI needs 13.0 \(driver 580 or"
            rf" newer\): add TORCH_INDEX={CU126} to the command, or update the driver",
        ),
        ("525.60.13", "12.0", rf".*add TORCH_INDEX={CU126} "),
        ("470.256.02", "11.4", r".*add TORCH_INDEX=https://download.pytorch.org/whl/cpu "),
        ("580.65.06", "13.0", None),
        ("610.57.04", "13.3", None),
        ("550.54.15", "13.0", None),
    ],
)
def test_torch_of_pypi(version, cuda, words):
    problem = machine.driver_problem(machine.Driver(version, cuda), settings.read([]))
    assert problem is None if words is None else re.match(words, str(problem))


@pytest.mark.parametrize(
    ("here", "word", "note"),
    [
        (None, "TORCH_INDEX=", "no NVIDIA driver here (nvidia-smi): torch for CUDA 13.0 computes"),
        (None, f"TORCH_INDEX={CU126}", "no NVIDIA driver here (nvidia-smi): torch for CUDA 12.6"),
        (None, "TORCH_INDEX=https://download.pytorch.org/whl/cpu", None),
        (("550.54.15", "12.4"), f"TORCH_INDEX={CU126}", None),
        (
            *(("550.54.15", "12.4"), f"TORCH_INDEX={CU126[:-3]}130"),
            "driver 550.54.15 runs CUDA up to 12.4: torch for CUDA 13.0 computes on GPUs of a"
            " driver 580 or newer",
        ),
        (("580.65.06", "13.0"), "TORCH_INDEX=", None),
    ],
)
def test_a_build_that_is_asked_for_is_obeyed_and_what_it_needs_is_said(here, word, note):
    present, asked = here and machine.Driver(*here), settings.read([word])
    if here or asked.torch_index:
        assert machine.driver_problem(present, asked) is None
    line = machine.driver_note(present, asked)
    assert line is None if note is None else str(line).startswith(note)


def test_a_machine_without_a_driver_is_not_refused():
    assert machine.driver_problem(None, settings.read([])) is None


def write_pythons(folder: Path, pythons: dict[str, str]) -> None:
    """Pythons that say their version (empty: shims of pyenv for a Python that is not chosen)."""
    for name, version in pythons.items():
        answer = f"echo {version}" if version else "echo 'pyenv: command not found' >&2; exit 127"
        write_program(folder / name, f"#!/bin/sh\n{answer}\n")


@pytest.mark.parametrize(
    ("pythons", "asked", "newest"),
    [
        ({"bin/python3.12": "3.12", "bin/python3.13": "3.13"}, (), "python3.13"),
        ({"bin/python3.12": "3.12", "bin/python3.13": "3.13"}, ("3.12", "3.13"), "python3.12"),
        ({"bin/python3.12": "3.12", "bin/python3.13": DOES_NOT_RUN}, (), "python3.12"),
        ({"bin/python3.12": "3.12", "bin/python3": "3.13"}, (), "python3"),
        ({"bin/python3": "3.12", "bin/python3.14": "3.14"}, (), "python3"),
        ({"bin/python3": "3.11"}, (), "python3"),
        ({"bin/python3": "3.14"}, (), "python3"),
        ({}, (), "python3"),
        ({"bin/python3.13": "3.13t", "bin/python3.12": "3.12"}, (), "python3.12"),
        (
            {
                "bin/python3": "3.11",
                "bin/python3.12": DOES_NOT_RUN,
                "a home/.pyenv/versions/3.12.1/bin/python": "3.12",
                "a home/.pyenv/versions/3.14.0/bin/python": "3.14",
            },
            (),
            "{}/a home/.pyenv/versions/3.12.1/bin/python",
        ),
        (
            {"a home/.local/share/uv/python/cpython-3.13.9-linux-x86_64-gnu/bin/python": "3.13"},
            (),
            "{}/a home/.local/share/uv/python/cpython-3.13.9-linux-x86_64-gnu/bin/python",
        ),
    ],
)
def test_the_newest_that_runs_is_found(tmp_path, pythons, asked, newest):
    write_pythons(tmp_path, pythons)
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "a home")}
    done = subprocess.run(
        [SCRIPT, *asked], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (newest.format(tmp_path) + "\n", "")


def test_it_looks_for_what_the_checks_accept():
    newest, oldest = machine.NEWEST, machine.OLDEST
    versions = [f"3.{minor}" for minor in range(newest[1], oldest[1] - 1, -1)]
    assert f"set -- {' '.join(versions)}\n" in SCRIPT.read_text()
