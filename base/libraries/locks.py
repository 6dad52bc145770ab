"""The locks: the version of every package that was tested together with the others."""

from __future__ import annotations  # Pythons that `make venv` refuses read this file too

from pathlib import Path

LOCK = "requirements.lock"
PYPI_BUILD = "cu130"  # what torch of PyPI is built for


def lock_of(build: str) -> str:
    """Return the lock of the libraries that a build of torch for CUDA brings."""
    return f"requirements-{build}.lock"


def pins_of(lock: Path) -> dict[str, str]:
    """Return the version of each package of a lock, in its order."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {name: version for name, _, version in pins}
