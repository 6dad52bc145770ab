"""`install/find_python.sh` among Pythons of other versions and shims that do not run."""

import subprocess
from pathlib import Path

import pytest

from install import machine

SCRIPT = Path(__file__).resolve().parent.parent.parent / "install" / "find_python.sh"
DOES_NOT_RUN = ""


def place(folder: Path, pythons: dict[str, str]) -> None:
    """Pythons that say their version (empty: shims of pyenv for a Python that is not chosen)."""
    for name, version in pythons.items():
        python = folder / name
        python.parent.mkdir(parents=True, exist_ok=True)
        answer = f"echo {version}" if version else "echo 'pyenv: command not found' >&2; exit 127"
        python.write_text(f"#!/bin/sh\n{answer}\n")
        python.chmod(0o755)


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
    place(tmp_path, pythons)
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "a home")}
    done = subprocess.run(
        [SCRIPT, *asked], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (newest.format(tmp_path) + "\n", "")


def test_it_looks_for_what_the_checks_accept():
    newest, oldest = machine.NEWEST, machine.OLDEST
    versions = [f"3.{minor}" for minor in range(newest[1], oldest[1] - 1, -1)]
    assert f"set -- {' '.join(versions)}\n" in SCRIPT.read_text()
