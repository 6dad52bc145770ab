"""`make venv SYSTEM_TORCH=1` beside a Python that has its own torch and Transformer Engine."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from install import machine
from tests.install.conftest import errors, installed, make
from tests.install.wheels import wheel

TORCH = "2.15.0a0+1234abcd.nv26.10"
FAKE_TORCH = """
class distributed:
    set_timeout = None
class ones:
    def __init__(self, count):
        pass
    def numpy(self):
        import numpy
        assert numpy.OURS
"""


def image(folder: Path, torch: str = TORCH) -> str:
    """A Python as an image has it, with another numpy than ours; returns its packages' folder."""
    wheels = [
        wheel(folder, "torch", torch, source=FAKE_TORCH),
        wheel(folder, "transformer-engine", "2.21.0"),
        wheel(folder, "numpy", "1.26.4", source="OURS = False"),
    ]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    for path in wheels:
        zipfile.ZipFile(path).extractall(packages)
    return str(folder)


def environment(folder: Path) -> str:
    """An image whose Python is that of an environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    image(folder)
    return str(folder / "bin" / "python3")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that is not bytecode."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check(root: Path, packages: Path, done: subprocess.CompletedProcess[str]) -> None:
    """All of the lock is in .venv but torch, which is the image's, as Transformer Engine is."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"beside torch {TORCH}, transformer-engine 2.21.0" in done.stdout
    ours = installed(root)
    assert ours.items() >= {"numpy": "1.0", "megatron-core": "1.0", "gptqmodel": "1.0"}.items()
    assert not {"torch", "transformer-engine", "nvidia-nccl"} & ours.keys()
    show = (
        "import torch, transformer_engine, numpy;"
        "print(torch.__file__, transformer_engine.__file__, numpy.__file__, sep='\\n')"
    )
    shown = subprocess.run(
        [root / ".venv" / "bin" / "python", "-c", show],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONUSERBASE": str(packages)},
    ).stdout.splitlines()  # fmt: skip
    inside = [Path(path).is_relative_to(root / ".venv") for path in shown]
    assert inside == [False, False, True]


def test_everything_else_is_installed_beside_the_torch_of_an_environment(checkout, tmp_path):
    python = environment(tmp_path / "image")
    before = contents(tmp_path / "image")
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("numpy==1.26.4\n")  # images pin their own packages this way

    done = make(checkout, "SYSTEM_TORCH=1", PYTHON3=python, PIP_CONSTRAINT=str(constraint))

    check(checkout, tmp_path / "image", done)
    assert contents(tmp_path / "image") == before
    assert "Nothing to be done" in make(checkout, PYTHON3=python).stdout


@pytest.mark.stress
def test_the_torch_of_the_interpreter_itself(checkout, tmp_path):
    folder = image(tmp_path / "image")
    base = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
    done = make(checkout, "SYSTEM_TORCH=1", PYTHON3=str(base), PYTHONUSERBASE=folder)
    check(checkout, tmp_path / "image", done)


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (
            None,
            "has no torch: give the Python that has, PYTHON3=/path/to/python3, or leave SYSTEM_",
        ),
        ("2.13.0+nv", "is older than {oldest}, which this needs: take a newer image, or leave SYS"),
    ],
)
def test_a_python_whose_torch_does_not_do_is_refused(checkout, tmp_path, torch, words):
    python = environment(tmp_path / "image")
    folder = next((tmp_path / "image").glob("lib/*/site-packages"))
    metadata = folder / f"torch-{TORCH}.dist-info" / "METADATA"
    if torch:
        metadata.write_text(metadata.read_text().replace(TORCH, torch))
    else:
        shutil.rmtree(metadata.parent)

    (line,) = errors(make(checkout, "SYSTEM_TORCH=1", PYTHON3=python))
    assert words.format(oldest=machine.oldest_torch()) in line
    assert not (checkout / ".venv").exists()
