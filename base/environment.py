"""The environment of a process: version, commit, packages, host, rank."""

import ctypes
import os
import platform
import re
import shutil
import site
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
from base.libraries.locks import LOCK, PYPI_BUILD, lock_of, pins_of
from base.processor import processor

PROJECT = "quantdyn"
TRACKED_PACKAGES = (
    *("torch", "triton", "megatron-core", "deepspeed", "transformer-engine", "transformers"),
    *("tokenizers", "safetensors", "numpy", "mlflow", "gptqmodel", "llmcompressor"),
    *("bitsandbytes", "lm-eval"),
)
# A library of torch's: its file, the package of the lock, and the parts of its version.
LIBRARIES = {
    "cuda": ("libcudart", "cuda-toolkit", 2),
    "cudnn": ("libcudnn", "nvidia-cudnn-cu", 3),
    "nccl": ("libnccl", "nvidia-nccl-cu", 3),
}
DRIVER = re.compile(r"\d+(\.\d+)+")  # the first version in /proc/driver/nvidia/version
MAIN_PACKAGES = ("torch", "megatron-core")  # of a line


def is_rank_zero() -> bool:
    """Return whether this process prints for the job: rank 0, or a process without ranks."""
    return os.environ.get("RANK", "0") == "0"


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
        **software(),
        "host": socket.gethostname(),
        "slurm_job": _slurm_job(),
        "partition": os.environ.get("SLURM_JOB_PARTITION"),
        **hardware(),
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
    # Of a checkout that another user owns, git says nothing unless it is told that we trust it.
    command = ["git", "-c", f"safe.directory={CHECKOUT}", "-C", str(CHECKOUT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def software() -> dict[str, Any]:
    """Return versions of packages and of torch's libraries, and where they come from.

    Returns:
        `packages` and `cuda`, `cudnn`, `nccl`: versions, of the libraries where torch is imported.
        `origins`: those that are not this virtual environment's own, as `_origin` names them.
        `differs_from_tested`: version tested and version here of whatever is installed in another
        than the lock's; None without a lock, as in a copy that pip installed.
        `container`: that of this process, as `_container` describes it.
    """
    search = tuple(sys.path)
    torch, _ = _installed(("torch",), search).get("torch", ("", None))
    files = _library_files()
    # The local version of torch, such as cu126, names the CUDA that its lock is for.
    tested, libraries = _tested_versions(torch.partition("+")[2]), _library_versions(files)
    installed = _installed((*TRACKED_PACKAGES, *tested), search)
    versions = {name: version for name, (version, _) in installed.items()}
    tracked = {name: versions[name] for name in TRACKED_PACKAGES if name in versions}

    paths = {name: installed[name][1] for name in tracked} | files
    origins = {name: _origin(path) for name, path in paths.items()}
    differs = {
        name: {"tested": tested[name], "here": here}
        for name, here in (versions | libraries).items()
        # a local version, such as +cpu, names a build of the same release
        if name in tested and here.partition("+")[0] != tested[name]
    }
    return {
        "packages": tracked,
        **libraries,
        "origins": {name: origin for name, origin in origins.items() if origin},
        "differs_from_tested": differs if tested else None,
        "container": _container(),
    }


@cache
def _tested_versions(build: str) -> dict[str, str]:
    """Return the locked version of every package and library, those of CUDA for a build of torch.

    A build that has no lock is compared with that of PyPI. Empty where there is no lock, as in a
    copy that pip installed.
    """
    of_cuda = [CHECKOUT / lock_of(name) for name in (build, PYPI_BUILD)]
    locks = [CHECKOUT / LOCK, *[lock for lock in of_cuda if lock.is_file()][:1]]
    tested: dict[str, str] = {}
    for lock in locks:
        tested |= pins_of(lock) if lock.is_file() else {}
    for library, (_, prefix, parts) in LIBRARIES.items():
        for package in [name for name in tested if name.startswith(prefix)]:
            tested[library] = ".".join(tested[package].split(".")[:parts])
    return tested


@cache
def _installed(names: tuple[str, ...], path: tuple[str, ...]) -> dict[str, tuple[str, Path]]:
    """Return version and directory of the packages that an import on this path would take."""
    installed = {}
    for name in names:
        package = next(iter(metadata.distributions(name=name, path=list(path))), None)
        if package is not None and package.version:
            installed[name] = package.version, Path(str(package.locate_file("")))
    return installed


def _origin(path: Path) -> str | None:
    """Return where a package or library comes from; None: this virtual environment itself.

    "system" is what the Python below the environment came with, or /usr; "user" the home's
    packages; all other places, such as those of PYTHONPATH, are "elsewhere".
    """

    def is_below(root: str) -> bool:
        return path.resolve().is_relative_to(Path(root).resolve())

    # Outside of a virtual environment both prefixes are the same.
    if sys.prefix != sys.base_prefix and is_below(sys.prefix):
        return None
    if is_below(site.getusersitepackages()):
        return "user"
    return "system" if is_below(sys.base_prefix) or is_below("/usr") else "elsewhere"


def _library_files() -> dict[str, Path]:
    """Return the files of torch's libraries that this process has loaded."""
    # The sixth field of a mapping is its file. There are thousands, and every result asks.
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {
        library: Path(path)
        for library, (stem, _, _) in LIBRARIES.items()
        # By path, since addresses are by chance: of two, the same one is taken each time.
        for path in sorted(line.split(maxsplit=5)[5] for line in lines if f"/{stem}.so" in line)
    }


def _library_versions(files: dict[str, Path]) -> dict[str, str]:
    """Return the versions of torch's libraries; empty where torch is not imported.

    To import it takes seconds. cuDNN is asked itself: torch raises for one that is older than the
    one it was built with, which a record should show.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:
        return {}
    versions = {"cuda": torch.version.cuda}
    if "cudnn" in files:
        number = ctypes.CDLL(str(files["cudnn"])).cudnnGetVersion()
        # From version 9 on the number is major x 10000 + minor x 100 + patch.
        versions["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _container() -> dict[str, str]:
    """Return the container of this process: kind, image, NVIDIA's release; empty outside of one.

    The image is the site file's, or the name of apptainer's file without its place.
    """
    variables = os.environ
    kinds = {
        "apptainer": "APPTAINER_CONTAINER" in variables,
        "singularity": "SINGULARITY_CONTAINER" in variables,
        "docker": Path("/.dockerenv").exists(),
        "podman": Path("/run/.containerenv").exists(),
    }
    file = variables.get("APPTAINER_CONTAINER") or variables.get("SINGULARITY_CONTAINER") or ""
    known = {
        "kind": next((kind for kind, is_it in kinds.items() if is_it), None),
        "image": variables.get("QUANTDYN_IMAGE") or Path(file).name,
        "nvidia_pytorch": variables.get("NVIDIA_PYTORCH_VERSION"),
        "nvidia_build": variables.get("NVIDIA_BUILD_ID"),
    }
    return {name: value for name, value in known.items() if value}


def hardware() -> dict[str, Any]:
    """Return the `processor`, and names of the GPUs and the driver's version where torch sees any.

    torch is asked only where it is imported already. Not run on a GPU yet.
    """
    torch, driver = sys.modules.get("torch"), Path("/proc/driver/nvidia/version")
    if torch is None or not torch.cuda.is_available():
        return {"processor": processor().model_dump()}
    version = DRIVER.search(driver.read_text()) if driver.exists() else None
    return {
        "processor": processor().model_dump(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": version and version[0],
    }


def _slurm_job() -> str | None:
    """Return the job as squeue names it, of an array JOB_TASK; None outside SLURM."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
