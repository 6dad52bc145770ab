"""The environment of a process: commit, versions, host, rank."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def is_rank_zero() -> bool:
    """Return whether this process prints for the job: rank 0, or a process without ranks."""
    return os.environ.get("RANK", "0") == "0"


TRACKED_PACKAGES = (
    *("torch", "megatron-core", "deepspeed", "transformer-engine", "transformers", "tokenizers"),
    *("safetensors", "numpy", "mlflow", "gptqmodel", "llmcompressor", "bitsandbytes", "lm-eval"),
)


def environment() -> dict[str, Any]:
    """Return commit, versions, command line and host, needed to reproduce a number."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if status is None else bool(status),
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


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this project; None if git or the repository is absent.

    A machine may have got the files as an archive.
    """
    if shutil.which("git") is None:
        return None
    project = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(project), *arguments]
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
