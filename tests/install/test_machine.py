"""Lines of the checks of this machine."""

import re
import tomllib

import pytest

from install import machine
from tests.install.conftest import PROJECT


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
        (
            1e9,
            "cpu",
            "installing takes 4.0 GB and 1.0 GB are free here: .* elsewhere$",
        ),
    ],
)
def test_disk(free, build, words):
    problem = machine.disk_problem(free, build)
    assert (problem is None) if words is None else re.match(words, str(problem))
