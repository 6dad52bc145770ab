"""The environment of a process: version, commit, packages, host, rank."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from base import CHECKOUT
from base.errors import UserError

PROJECT = "quantdyn"


def is_rank_zero() -> bool:
    """Return whether this process prints for the job: rank 0, or a process without ranks."""
    return os.environ.get("RANK", "0") == "0"


TRACKED_PACKAGES = (
    *("torch", "megatron-core", "deepspeed", "transformer-engine", "transformers", "tokenizers"),
    *("safetensors", "numpy", "mlflow", "gptqmodel", "llmcompressor", "bitsandbytes", "lm-eval"),
)
MAIN_PACKAGES = ("torch", "megatron-core")  # of a line


@cache
def version() -> str:
    """Return the version of this project, which pyproject.toml of the checkout has.

    An installed copy has no pyproject.toml beside it, or another project's. Its version is what
    the installer recorded.
    """
    pyproject = CHECKOUT / "pyproject.toml"
    content = tomllib.loads(pyproject.read_text()) if pyproject.is_file() else {}
    project = content.get("project", {})
    if project.get("name") == PROJECT:
        return str(project["version"])
    try:
        return metadata.version(PROJECT)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"{pyproject}, which holds the version, is missing; copy it from the same checkout"
        ) from None


def version_line() -> str:
    """Return version, commit and main packages in a line, without importing any of them.

    quantdyn 0.2.0 (commit 1234567, Python 3.12.1, torch 2.14.0, megatron-core 0.19.2)
    """
    code, parts = _code(), []
    if code["commit"]:
        changed = " with uncommitted changes" if code["uncommitted_changes"] else ""
        parts.append(f"commit {code['commit'][:7]}{changed}")

    parts.append(f"Python {platform.python_version()}")
    for package in MAIN_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            parts.append(f"{package} {metadata.version(package)}")
    return f"{PROJECT} {version()} ({', '.join(parts)})"


def environment() -> dict[str, Any]:
    """Return version, commit, command line and host, needed to reproduce a number."""
    return {
        PROJECT: version(),
        **_code(),
        "argv": sys.argv,
        "python": platform.python_version(),
        "packages": _package_versions(),
        "host": socket.gethostname(),
        "slurm_job": _slurm_job(),
        "partition": os.environ.get("SLURM_JOB_PARTITION"),
        "image": os.environ.get("QUANTDYN_IMAGE"),
        **_gpus(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _code() -> dict[str, Any]:
    """Return the commit of this code and whether tracked files were changed; None where unknown.

    The files may come from an archive, or from an installer. Then a repository around them, such
    as the one that a virtual environment is in, is another project's and does not track them.
    """
    here = str(Path(__file__).relative_to(CHECKOUT))
    tracked = _git("ls-files", "--error-unmatch", here)
    status = _git("status", "--porcelain", "--untracked-files=no") if tracked else None
    return {
        "commit": _git("rev-parse", "HEAD") if tracked else None,
        "uncommitted_changes": None if status is None else bool(status),
    }


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this project; None if it fails or there is no git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(CHECKOUT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def _package_versions() -> dict[str, str]:
    """Return the version of each tracked package that is installed."""
    versions = {}
    for package in TRACKED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> dict[str, Any]:
    """Return names of the GPUs, and versions of driver, CUDA and NCCL; empty where torch sees none.

    torch is asked only where it is imported already: to import it takes seconds. Not run on a GPU
    yet.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    driver = Path("/proc/driver/nvidia/version")
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    }


def _slurm_job() -> str | None:
    """Return the job as squeue names it, of an array JOB_TASK; None outside SLURM."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
