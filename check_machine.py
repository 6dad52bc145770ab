"""Checks of `make` before it downloads anything: this Python, its venv module, .venv, the disk.

`python3 check_machine.py [TORCH_INDEX]` ends with one line and exit code 2 where .venv could not be
built. It needs no package, and runs under the Pythons that it refuses too.
"""

from __future__ import annotations  # older Pythons read this file too

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

OLDEST, NEWEST = (
    (3, 12),
    (3, 13),
)  # megatron-core 0.19.2 has no wheels for older ones, numpy 2.2.6 none for newer
GB = 10**9
# .venv when it is complete, what pip unpacks beside it, and its cache.
CUDA_BYTES, CPU_BYTES = 10 * GB, 4 * GB


def python_problem(version: tuple[int, int]) -> str | None:
    """Return what is wrong with a Python of this (major, minor), or None."""
    if OLDEST <= version <= NEWEST:
        return None
    return (
        f"Python {version[0]}.{version[1]} cannot run this, 3.12 and 3.13 can: install one "
        "(apt-get install python3.13-venv), then run make with PYTHON3=python3.13"
    )


def venv_problem(
    version: tuple[int, int], find: Callable[[str], object] = importlib.util.find_spec
) -> str | None:
    """Return what keeps this Python from making environments with pip, or None."""
    if find("venv") and find("ensurepip"):
        return None
    package = f"python{version[0]}.{version[1]}-venv"
    return f"this Python makes no environments: run apt-get install {package}, then make again"


def disk_problem(free: float, torch_index: str) -> str | None:
    """Return why `free` bytes are too few, or None. A TORCH_INDEX that ends with cpu is small."""
    small = torch_index.rstrip("/").endswith("cpu")
    needed = CPU_BYTES if small else CUDA_BYTES
    if free >= needed:
        return None
    line = (
        f"installing takes {needed / GB:.1f} GB and {free / GB:.1f} GB are free here: free some, or"
        " clone elsewhere"
    )
    if not small:
        line += ", or take the smaller torch without CUDA: "
        line += "make TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    return line


def link_problem(place: Path) -> str | None:
    """Return why `place` cannot be built anew, or None: what a link points to would be emptied."""
    if not place.is_symlink():
        return None
    return (
        f"{place} is a link to {place.readlink()}, which building it would empty: remove the link"
        f" (rm {place}), then run make again"
    )


def size(directory: str) -> int:
    """Return the bytes that a directory tree takes, 0 where there is none."""
    return sum(path.lstat().st_blocks * 512 for path in Path(directory).rglob("*"))


def main(torch_index: str = "") -> None:
    """End with the first problem's line, if there is one."""
    version = sys.version_info[:2]
    free = shutil.disk_usage(".").free + size(".venv")  # the old .venv makes room for the new one
    problem = (
        python_problem(version)
        or venv_problem(version)
        or link_problem(Path(".venv"))
        or disk_problem(free, torch_index)
    )
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
