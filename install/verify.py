"""The check that .venv has what was installed and starts it, run by the Python of .venv."""

import importlib.metadata
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def different(pins: list[str]) -> list[str]:
    """Return the pins that Python finds in another version, or not at all.

    PYTHONPATH, which modules of clusters set, comes before the packages of .venv.
    """
    wrong = []
    for pin in pins:
        name, _, version = pin.partition("==")
        try:
            seen = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            seen = "missing"
        if seen != version and seen.partition("+")[0] != version:
            wrong.append(f"{pin} is {seen}")
    return wrong


def start(system_torch: bool) -> None:
    """Import what is slow to import or hard to install, and fails where a library is missing."""
    torch = announced("torch")
    if system_torch:
        torch.ones(1).numpy()  # fails where that torch was built for another numpy than ours
        assert hasattr(torch.distributed, "set_timeout"), f"torch {torch.__version__} is too old"
    announced("megatron.core")
    announced("deepspeed")

    from quant_eval.libraries import pcre

    pcre.stand_in()
    announced("gptqmodel")


def announced(name: str) -> ModuleType:
    """Import a module after a line that says so: each may take a minute."""
    print(f"import {name}", flush=True)
    return import_module(name)


def main(pins: str, system_torch: str = "") -> None:
    """End with one line where .venv is not what was asked for."""
    wrong = different(Path(pins).read_text(encoding="utf-8").split())
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        sys.exit(f"{wrong[0]}{more}; unset PYTHONPATH if it is set")
    start(bool(system_torch))


if __name__ == "__main__":
    main(*sys.argv[1:])
