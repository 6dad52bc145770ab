"""Pins installed into .venv by uv or pip, one command that resolves nothing."""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import os
import re
import ssl
import subprocess
import sys
from pathlib import Path

from install.settings import RefusedError, VenvSettings

# What tells pip where packages come from, and how they are reached; uv reads none of it.
PIP_SOURCES = {
    *("index-url", "extra-index-url", "find-links", "no-index"),
    *("proxy", "cert", "client-cert", "trusted-host"),
}
UV_SOURCES = {
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"),
    *("UV_NO_INDEX", "UV_CONFIG_FILE"),
}
UV = "uv==0.13.9"  # taken where none is installed; 25 MB
UV_FILES = ("~/.config/uv/uv.toml", "/etc/uv/uv.toml")
# What they and the check of imports print that says what is being done.
TELLING = re.compile(r"\s*(Collecting|Building|Built|import) ")
# What pip and uv print when they have downloaded everything.
LAST_PHASES = {
    "Building wheels for collected packages": "build: what has no wheel",
    "Installing collected packages": "unpack",
    "Prepared ": "unpack",
}


def installer(settings: VenvSettings, python: str, temporary: Path) -> tuple[list[str], str]:
    """Return how uv is started, or nothing where pip installs, and why: pip where it alone is told
    where packages come from.
    """
    if settings.installer == "pip":
        return [], "INSTALLER=pip"
    configured = [] if settings.installer or uv_is_configured() else pip_sources(python)
    if configured:
        return [], f"it is told {', '.join(configured)}, which uv does not read"
    uv = installed_uv() or fetched_uv(python, temporary)
    if not uv and settings.installer:
        raise RefusedError("pip finds no uv here; install it, or leave INSTALLER out")
    return uv, "faster than pip" if uv else f"it finds no {UV}"


def installed_uv() -> list[str]:
    """Return how an installed uv is started, as a program or as a module; empty without one."""
    for words in (["uv"], [sys.executable, "-m", "uv"]):
        try:
            done = subprocess.run([*words, "--version"], capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return words
    return []


def fetched_uv(python: str, temporary: Path) -> list[str]:
    """Return how the uv is started that pip downloads for this once; empty if it cannot.

    Nothing of it stays, nor the cache that uv keeps in the home of a user who has it.
    """
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary", ":all:", "--target", str(temporary / "uv"), UV]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode != 0:
        return []
    return [str(temporary / "uv" / "bin" / "uv"), "--no-cache", *certificates()]


def certificates() -> list[str]:
    """Return the option by which uv trusts whom this system trusts, as pip does: a firm's proxy,
    say. Empty where the system has no certificates; uv and pip bring some.
    """
    paths = ssl.get_default_verify_paths()
    some = paths.cafile or (paths.capath and any(Path(paths.capath).iterdir()))
    return ["--system-certs"] if some else []


def pip_sources(python: str) -> list[str]:
    """Return the settings in pip's files and variables that say where packages come from."""
    command = [python, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = {line.partition("=")[0].rpartition(".")[2] for line in done.stdout.splitlines()}
    return sorted(names & PIP_SOURCES)


def uv_is_configured() -> bool:
    """Return whether a variable or a file tells uv where packages come from."""
    return bool(UV_SOURCES & os.environ.keys()) or any(
        Path(path).expanduser().exists() for path in UV_FILES
    )


def command(uv: list[str], settings: VenvSettings, python: str, pins: Path) -> list[str]:
    """Return the command that installs the pins. They are complete: nothing is resolved.

    Bytecode is compiled when a module is first imported. Where Python is told to write none then,
    as in many images, every process would compile: there it is compiled here.
    """
    compiled = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if uv:
        words = [*uv, "pip", "install", "--python", python]
        words += ["--compile-bytecode"] if compiled else []
        if settings.torch_index:  # the version decides, as with pip, and not the first index
            words += ["--index", settings.torch_index, "--index-strategy", "unsafe-best-match"]
    else:
        words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar"]
        words += ["off", "--use-pep517", "--ignore-installed"]
        words += [] if compiled else ["--no-compile"]
        if settings.torch_index:
            words += ["--extra-index-url", settings.torch_index]
    return [*words, "--no-deps", "-r", str(pins)]


def environment(settings: VenvSettings, temporary: Path) -> dict[str, str]:
    """Return the variables of that command. It unpacks below .venv: /tmp may be too small."""
    variables = {**os.environ, "TMPDIR": str(temporary.resolve())}
    if settings.system_torch:
        # Images pin the packages of their own Python with it, and .venv has others.
        variables["PIP_CONSTRAINT"] = os.devnull
    return variables
