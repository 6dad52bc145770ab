"""Checks before anything is downloaded: this Python, its venv module, .venv, the disk."""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from install.settings import CUDA_OF, PYTORCH, Settings

OLDEST = (3, 12)  # megatron-core 0.19.2 has no wheels for older ones
NEWEST = (3, 13)  # numpy 2.2.6 has none for newer ones
GB = 10**9
# .venv when it is complete, what is unpacked beside it, and the installer's cache.
CUDA_BYTES, CPU_BYTES = 10 * GB, 4 * GB


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


def link_problem(place: Path) -> str | None:
    """Return why `place` cannot be built anew, or None: what a link points to would be emptied."""
    if not place.is_symlink():
        return None
    return (
        f"{place} is a link to {place.readlink()}, which building it would empty: remove the link"
        f" (rm {place}), then run make again"
    )


def size(directory: Path) -> int:
    """Return the bytes that a directory tree takes, 0 where there is none."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def problem(settings: Settings, venv: Path) -> str | None:
    """Return the first reason why this machine cannot build `venv`, or None."""
    version = sys.version_info[:2]
    return (
        python_problem(version)
        or venv_problem(version)
        or link_problem(venv)
        # the old .venv makes room for the new one
        or disk_problem(shutil.disk_usage(".").free + size(venv), settings.build)
    )
