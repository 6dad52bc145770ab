"""The NVIDIA driver of this machine, and whether it runs a build of torch."""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import re
import subprocess
from dataclasses import dataclass

from base.libraries.locks import PYPI_BUILD
from install.settings import CUDA_OF, PYTORCH, Settings, locked


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


def installed() -> Driver | None:
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
    return parsed(done.stdout)


def parsed(report: str) -> Driver | None:
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


def problem(driver: Driver | None, settings: Settings) -> str | None:
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


def note(driver: Driver | None, settings: Settings) -> str | None:
    """Return what to know of a build that this machine does not run, or None."""
    if settings.build not in CUDA_OF or (driver and driver.runs(settings.build)):
        return None
    needed, oldest = CUDA_OF[settings.build]
    here = str(driver) if driver else "no NVIDIA driver here (nvidia-smi)"
    line = f"{here}: torch for CUDA {needed} computes on GPUs of a driver {oldest} or newer"
    if not settings.torch_index:
        line += f"; TORCH_INDEX={PYTORCH}/cu126 takes {CUDA_OF['cu126'][1]}, .../cpu has no CUDA"
    return line
