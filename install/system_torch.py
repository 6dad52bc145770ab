"""The torch that the Python of SYSTEM_TORCH=1 has, which .venv takes in place of its own."""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from install.settings import Settings

BESIDE_IT = ("transformer-engine", "triton", "flash-attn", "apex")  # built for that torch, too
SYSTEM_PTH = "system_torch.pth"


def problem(settings: Settings) -> str | None:
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


def description() -> str:
    """Return what this Python has of torch and of what is built for it, with versions."""
    versions = {name: version_of(name) for name in ("torch", *BESIDE_IT)}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def share(python: str) -> None:
    """Let the Python of .venv find the torch of this one, after its own packages.

    `--system-site-packages` shares what belongs to the interpreter. Where this Python is an
    environment itself, as in images that have one, it shares only what is below that environment.
    """
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    show = (
        "import sysconfig, sys; print(sysconfig.get_path('purelib')); print(*sys.path, sep='\\n')"
    )
    done = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True)
    own, *seen = done.stdout.splitlines()
    lines = [f"import site; site.addsitedir({path!r})\n" for path in places if path not in seen]
    if lines:
        Path(own, SYSTEM_PTH).write_text("".join(lines), encoding="utf-8")
