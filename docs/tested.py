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
from base.libraries.locks import LOCK, pins_of
from docs.models import table

RUNS = Path(__file__).parent / "tested.toml"
CUDA_LOCKS = "requirements-cu*.lock"
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
    pins = pins_of(CHECKOUT / LOCK)
    digest = digest_of(pins)
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
    tables = {
        lock.name: table(["package", "version"], pins_of(lock).items())
        for lock in sorted(CHECKOUT.glob(CUDA_LOCKS))
    }
    return "\n".join(f"## CUDA, {name}\n\n{rows}" for name, rows in tables.items())


def digest_of(pins: dict[str, str]) -> str:
    """Return 12 hex digits of a hash of a lock's pins; comments do not change it."""
    lines = "".join(f"{name}=={pinned}\n" for name, pinned in sorted(pins.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _users(project: dict[str, Any]) -> dict[str, str]:
    """Return the folders that need a package by its name, for all that pyproject.toml names."""
    needs: dict[str, list[str]] = {ALL: project["dependencies"], **project["optional-dependencies"]}
    users: dict[str, list[str]] = {}
    for folder, requirements in needs.items():
        for requirement in requirements if folder not in APART else ():
            name = canonicalize_name(Requirement(requirement).name)
            users.setdefault(name, []).append(folder)
    return {name: ", ".join(users[name]) for name in sorted(users)}
