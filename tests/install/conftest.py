"""A checkout to build .venv in, beside an index of small wheels."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.install.wheels import index, wheel
from tests.runs import PROJECT

COPIED = (
    "Makefile",
    "pyproject.toml",
    *(f"base/{name}.py" for name in ("__init__", "libraries/__init__", "libraries/locks")),
    *(f"quant_eval/{name}.py" for name in ("__init__", "libraries/__init__", "libraries/pcre")),
    *(str(path.relative_to(PROJECT)) for path in (PROJECT / "install").glob("*.[ps][yh]")),
)


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a path with a space, beside an index like PyPI's: its torch needs CUDA's
    libraries.
    """
    root = tmp_path / "a checkout"
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, root / name)
    check = root / "install" / "machine.py"
    check.write_text(check.read_text().replace("= 10 * GB, 4 * GB", "= 0, 0"))  # /tmp may be small
    names = ("numpy", "megatron-core", "deepspeed", "gptqmodel")
    (root / "requirements.lock").write_text(
        "# a lock\ntorch==2.14.0\n" + "".join(f"{name}==1.0\n" for name in names)
    )
    (root / "requirements-cu130.lock").write_text("nvidia-nccl==2.0\n")
    (root / "requirements-cu126.lock").write_text("nvidia-nccl-cu12==2.0\n")

    pypi = tmp_path / "pypi"
    wheel(pypi, "torch", "2.14.0", needs=("nvidia-nccl>=1",), source="import nvidia_nccl")
    for version in ("1.0", "2.0", "3.0"):
        wheel(pypi, "nvidia-nccl", version)
    wheel(pypi, "nvidia-nccl-cu12", "2.0")
    wheel(pypi, "numpy", "1.0", source="OURS = True")
    for name in ("megatron-core", "deepspeed"):
        wheel(pypi, name, "1.0", source="import torch")
    wheel(
        pypi,
        "gptqmodel",
        "1.0",
        needs=("pypcre",),
        source="import os, pcre\nassert os.path.isdir(os.environ['TMPDIR'])",
    )
    index(pypi)
    for build in ("cpu", "cu126"):
        wheel(tmp_path / build, "torch", f"2.14.0+{build}")
        index(tmp_path / build)
    return root


def make(root: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `make venv` in the checkout, with no configuration of pip or uv but the index."""
    pypi = (root.parent / "pypi" / "simple").as_uri()
    variables = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": pypi,
        "PIP_NO_CACHE_DIR": "1",
        "UV_DEFAULT_INDEX": pypi,
        "UV_CACHE_DIR": str(root.parent / "uv"),
        "PYTHON3": sys.executable,
        "INSTALLER": "pip",
    }
    of_make = ("MAKE", "MFLAGS", "TORCH_INDEX", "SYSTEM_TORCH")  # where make runs this test
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "UV_", "TMPDIR", "PYTHONPATH", "PYTHONDONT", *of_make))
    }
    return subprocess.run(
        ["make", "venv", *settings],
        cwd=root, env=plain | variables | environment, capture_output=True, text=True, check=False, umask=0o077,
    )  # fmt: skip


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr of a command that failed, but for make's own."""
    assert done.returncode == 2, done.stdout + done.stderr
    return [line for line in done.stderr.splitlines() if not line.startswith("make")]


def installed(root: Path) -> dict[str, str]:
    """The versions in .venv, by name."""
    folder = next((root / ".venv").glob("lib/python3*/site-packages"))
    distributions = importlib.metadata.distributions(path=[str(folder)])
    return {
        canonicalize_name(distribution.name): distribution.version for distribution in distributions
    }
