"""Checks before anything is downloaded: this Python, .venv, the disk, the NVIDIA driver, and the
torch of SYSTEM_TORCH=1, which .venv takes in place of its own.
"""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from base.libraries.locks import PYPI_BUILD
from install.settings import CUDA_OF, PYTORCH, VenvSettings, locked

OLDEST = (3, 12)  # megatron-core 0.19.2 has no wheels for older ones
NEWEST = (3, 13)  # numpy 2.2.6 has none for newer ones
GB = 10**9
# .venv when it is complete, what is unpacked beside it, and the installer's cache.
CUDA_BYTES, CPU_BYTES = 10 * GB, 4 * GB
BESIDE_IT = ("transformer-engine", "triton", "flash-attn", "apex")  # built for that torch, too
SYSTEM_PTH = "system_torch.pth"


def python_problem(version: tuple[int, int]) -> str | None:
    """Return what is wrong with a Python of this (major, minor), or None."""
    if OLDEST <= version <= NEWEST:
        return None
    return (
        f"Python {version[0]}.{version[1]} cannot run this, 3.12 and 3.13 can: install one"
        " (apt-get install python3.13-venv, or uv python install 3.13), then run make again, or"
        " give it as PYTHON3=/path/to/python3.13"
    )


def venv_problem(
    version: tuple[int, int], find: Callable[[str], object] = importlib.util.find_spec
) -> str | None:
    """Return what keeps this Python from making environments with pip, or None."""
    if find("venv") and find("ensurepip"):
        return None
    package = f"python{version[0]}.{version[1]}-venv"
    return f"this Python makes no environments: run apt-get install {package}, then make again"


def disk_problem(free: float, build: str) -> str | None:
    """Return why `free` bytes are too few for a build of torch, or None."""
    large = build in CUDA_OF
    needed = CUDA_BYTES if large else CPU_BYTES
    if free >= needed:
        return None
    line = (
        f"installing takes {needed / GB:.1f} GB and {free / GB:.1f} GB are free here: free some, or"
        " clone elsewhere"
    )
    if large:
        line += f", or take the smaller torch without CUDA: make TORCH_INDEX={PYTORCH}/cpu"
    return line


def link_problem(venv: Path) -> str | None:
    """Return why `venv` cannot be built anew, or None: what a link points to would be emptied."""
    if not venv.is_symlink():
        return None
    return (
        f"{venv} is a link to {venv.readlink()}, which building it would empty: remove the link"
        f" (rm {venv}), then run make again"
    )


def size(directory: Path) -> int:
    """Return the bytes that a directory tree takes, 0 where there is none."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


@dataclass(frozen=True)
class Driver:
    """Version of a driver, such as 550.54.15, and the newest CUDA that it runs, such as 12.4."""

    version: str
    cuda: str

    def runs(self, build: str) -> bool:
        """Return whether it runs a build of torch: within a major version CUDA is compatible."""
        return build not in CUDA_OF or major(self.cuda) >= major(CUDA_OF[build][0])

    def __str__(self) -> str:
        """Return the driver as error lines name it."""
        return f"driver {self.version} runs CUDA up to {self.cuda}"


def major(version: str) -> int:
    """Return the first number of a version."""
    return int(version.partition(".")[0])


def installed_driver() -> Driver | None:
    """Return the driver that nvidia-smi reports, or None where none answers."""
    try:
        done = subprocess.run(
            ["nvidia-smi"],  # noqa: S607 - wherever the driver put it
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parsed_driver(done.stdout)


def parsed_driver(report: str) -> Driver | None:
    """Return the driver in the head of a report of nvidia-smi, or None.

    Drivers up to 580 write `Driver Version: 550.54.15  CUDA Version: 12.4`, newer ones `KMD
    Version: 610.57.04  CUDA UMD Version: 13.3`. Where libcuda is missing, as in a container that
    was given nvidia-smi alone, the head has no CUDA, and the table of oldest drivers decides.
    """
    version = re.search(r"(?:Driver|KMD) Version:\s*(\d[\d.]*)", report)
    if not version:
        return None
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d[\d.]*)", report)
    if cuda:
        return Driver(version[1], cuda[1])
    runs = [number for number, oldest in CUDA_OF.values() if major(version[1]) >= oldest]
    return Driver(version[1], max(runs, key=major, default="11"))


def driver_problem(driver: Driver | None, settings: VenvSettings) -> str | None:
    """Return why torch of PyPI would not start with this driver, and what would, or None.

    An address that is given is obeyed: .venv may be for other machines than this one.
    """
    if driver is None or settings.torch_index or driver.runs(settings.build):
        return None
    needed, oldest = CUDA_OF[PYPI_BUILD]
    line = (
        f"{driver} and torch {locked('torch')} of PyPI needs {needed} (driver {oldest} or newer): "
    )
    fitting = next((build for build in CUDA_OF if driver.runs(build)), "cpu")
    return line + f"add TORCH_INDEX={PYTORCH}/{fitting} to the command, or update the driver"


def driver_note(driver: Driver | None, settings: VenvSettings) -> str | None:
    """Return what to know of a build that this machine does not run, or None."""
    if settings.build not in CUDA_OF or (driver and driver.runs(settings.build)):
        return None
    needed, oldest = CUDA_OF[settings.build]
    here = str(driver) if driver else "no NVIDIA driver here (nvidia-smi)"
    line = f"{here}: torch for CUDA {needed} computes on GPUs of a driver {oldest} or newer"
    if not settings.torch_index:
        line += f"; TORCH_INDEX={PYTORCH}/cu126 takes {CUDA_OF['cu126'][1]}, .../cpu has no CUDA"
    return line


def system_torch_problem(settings: VenvSettings) -> str | None:
    """Return why .venv cannot take the torch of this Python, or None."""
    if not settings.system_torch:
        return None
    version, oldest = version_of("torch"), oldest_torch()
    python = f"{sys.executable} (Python {sys.version_info[0]}.{sys.version_info[1]})"
    if version is None:
        return (
            f"{python} has no torch: give the Python that has, PYTHON3=/path/to/python3, or leave"
            " SYSTEM_TORCH out"
        )
    if release(version) < release(oldest):
        return (
            f"torch {version} of {python} is older than {oldest}, which this needs: take a newer"
            " image, or leave SYSTEM_TORCH out"
        )
    return None


def version_of(package: str) -> str | None:
    """Return the version of a package of this Python, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Return (major, minor): 2.15.0a0+5228986c39.nv26.10 counts as 2.15."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    assert numbers, version
    return int(numbers[1]), int(numbers[2])


def oldest_torch() -> str:
    """Return the oldest torch that pyproject.toml takes."""
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r'"torch>=([\w.]+)"', text)
    assert needed
    return needed[1]


def system_torch_description() -> str:
    """Return what this Python has of torch and of what is built for it, with versions."""
    versions = {name: version_of(name) for name in ("torch", *BESIDE_IT)}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def share_system_torch(python: str) -> None:
    """Let the Python of .venv find the torch of this one, after its own packages.

    `--system-site-packages` shares what belongs to the interpreter. Where this Python is an
    environment itself, as in images that have one, it shares only what is below that environment.
    """
    directories = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    show = (
        "import sysconfig, sys; print(sysconfig.get_path('purelib')); print(*sys.path, sep='\\n')"
    )
    done = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True)
    packages, *known = done.stdout.splitlines()
    lines = [
        f"import site; site.addsitedir({path!r})\n" for path in directories if path not in known
    ]
    if lines:
        Path(packages, SYSTEM_PTH).write_text("".join(lines), encoding="utf-8")


def machine_problem(settings: VenvSettings, venv: Path) -> str | None:
    """Return the first reason why this machine cannot build `venv`, or None."""
    version = sys.version_info[:2]
    return (
        python_problem(version)
        or venv_problem(version)
        or link_problem(venv)
        # the old .venv makes room for the new one
        or disk_problem(shutil.disk_usage(".").free + size(venv), settings.build)
    )
