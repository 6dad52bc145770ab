"""Settings of `make venv`, and what follows from them: which build of torch, which lock files."""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import re
from dataclasses import dataclass
from pathlib import Path

from base.libraries.locks import LOCK, PYPI_BUILD, lock_of, pins_of

PYTORCH = "https://download.pytorch.org/whl"
# CUDA of a build, and the oldest driver that runs it, by NVIDIA's table of minor versions.
CUDA_OF = {"cu126": ("12.6", 525), "cu130": ("13.0", 580)}
BUILDS = ("cpu", *CUDA_OF)


class RefusedError(Exception):
    """One line: what is wrong, and what to do next."""


@dataclass(frozen=True)
class VenvSettings:
    """Settings of `make venv` as words NAME=VALUE; empty where not given."""

    torch_index: str = ""
    system_torch: bool = False
    installer: str = ""

    @property
    def build(self) -> str:
        """The build of torch: cpu, cu126, cu130, or `system` where it is not ours."""
        if self.system_torch:
            return "system"
        return named_build(self.torch_index) or PYPI_BUILD

    @property
    def stamp(self) -> str:
        """The settings that .venv/complete holds: make compares them with those it is given."""
        return f"TORCH_INDEX={self.torch_index} SYSTEM_TORCH={'1' if self.system_torch else ''}"


def named_build(torch_index: str) -> str | None:
    """Return the build that an address names last, such as cu126 of .../whl/cu126."""
    names = re.findall(r"\b(cpu|cu\d{3})\b", torch_index)
    return names[-1] if names else None


def read(words: list[str]) -> VenvSettings:
    """Return the settings of words NAME=VALUE; RefusedError where a value cannot be obeyed."""
    values = dict(word.split("=", 1) for word in words)
    system_torch, installer = values.get("SYSTEM_TORCH", ""), values.get("INSTALLER", "")
    torch_index = values.get("TORCH_INDEX", "")

    if system_torch not in ("", "1"):
        raise RefusedError(
            f"SYSTEM_TORCH={system_torch} is unknown; give SYSTEM_TORCH=1, or leave it out"
        )
    if installer not in ("", "pip", "uv"):
        raise RefusedError(f"INSTALLER={installer} is unknown; give pip or uv, or leave it out")
    if system_torch and torch_index:
        raise RefusedError("SYSTEM_TORCH=1 takes no torch from TORCH_INDEX; give one of the two")
    if torch_index and named_build(torch_index) not in BUILDS:
        raise RefusedError(
            f"TORCH_INDEX={torch_index} does not end with cpu, cu126 or cu130, the builds of torch"
            f" {locked('torch')} that are locked; give one of them, such as {PYTORCH}/cu126"
        )
    return VenvSettings(torch_index, bool(system_torch), installer)


def locked(name: str) -> str:
    """Return the version that requirements.lock pins."""
    return pins_of(Path(LOCK))[name]


def requirements(settings: VenvSettings) -> list[str]:
    """Return what is installed, as pins. An index's own build of torch is named: pip and uv would
    take that of PyPI where the index has none.
    """
    pins = pins_of(Path(LOCK))
    if settings.build in CUDA_OF:
        pins |= pins_of(Path(lock_of(settings.build)))

    torch = f"torch=={pins.pop('torch')}"
    rest = [f"{name}=={version}" for name, version in pins.items()]
    if settings.system_torch:
        return rest
    return [f"{torch}+{settings.build}" if settings.torch_index else torch, *rest]
