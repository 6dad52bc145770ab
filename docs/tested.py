"""The page of the versions that were tested together, from the locks and tested.toml."""

import hashlib
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from base import CHECKOUT
from base.environment import version
from base.frozen import Frozen
from docs.models import table
from install import settings

RUNS = Path(__file__).parent / "tested.toml"
LOCK, CUDA_LOCKS = "requirements.lock", "requirements-cu*.lock"
APART = ("dev", "gpu")  # extras: of those who change this project, and compiled on the machine
ALL = "all"
RUN_HEADS = ("date", "Python", "machine", "commands")


class Run(Frozen):
    """Commands that passed once with the versions of one lock."""

    lock: str
    date: date
    python: str
    machine: str
    commands: list[str]


def tested(note: str) -> str:
    """Return the page; it names only runs with the versions that it lists.

    Args:
        note: the line that marks a generated page.
    """
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins, digest = pins_of(LOCK), digest_of(LOCK)
    rows = [(name, pins[name], users) for name, users in _users(project).items()]
    return f"""# Versions tested together

{note}

quantdyn {version()} installs these versions on Python `{project["requires-python"]}`, lock
`{digest}`. All others are in `{LOCK}`.

## Runs

{_runs(digest)}
## Packages

{table(["package", "version", "needed by"], rows)}
{_cuda()}
## Transformer Engine

It is installed apart: `{", ".join(extras["gpu"])}`.
"""


def _runs(digest: str) -> str:
    runs = [Run.model_validate(run) for run in tomllib.loads(RUNS.read_text()).get("runs", ())]
    rows = [
        (f"{run.date}", run.python, run.machine, ", ".join(f"`{line}`" for line in run.commands))
        for run in runs
        if run.lock == digest
    ]
    if not rows:
        return "No run of exactly these versions is recorded yet.\n"
    return f"They passed with exactly these versions:\n\n{table(RUN_HEADS, rows)}"


def _cuda() -> str:
    """Return a section for each lock of the libraries that a torch for CUDA brings."""
    locks = sorted(path.name for path in CHECKOUT.glob(CUDA_LOCKS))
    tables = {lock: table(["package", "version"], pins_of(lock).items()) for lock in locks}
    return "\n".join(f"## CUDA, {lock}\n\n{rows}" for lock, rows in tables.items())


def pins_of(lock: str) -> dict[str, str]:
    """Return the version of each package of a lock."""
    pins = [pin.split("==") for pin in settings.pins_of(CHECKOUT / lock)]
    return {canonicalize_name(name): pinned for name, pinned in pins}


def digest_of(lock: str) -> str:
    """Return 12 hex digits of a hash of the lock's pins; comments do not change it."""
    pins = "".join(f"{name}=={pin}\n" for name, pin in sorted(pins_of(lock).items()))
    return hashlib.sha256(pins.encode()).hexdigest()[:12]


def _users(project: dict[str, Any]) -> dict[str, str]:
    """Return the folders that need a package by its name, for all that pyproject.toml names."""
    needs: dict[str, list[str]] = {ALL: project["dependencies"], **project["optional-dependencies"]}
    users: dict[str, list[str]] = {}
    for folder, requirements in needs.items():
        for requirement in requirements if folder not in APART else ():
            name = canonicalize_name(Requirement(requirement).name)
            users.setdefault(name, []).append(folder)
    return {name: ", ".join(users[name]) for name in sorted(users)}
