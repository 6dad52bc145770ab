"""The ground floor, needed by every folder: errors, files, progress, ranks and statistics."""

from __future__ import annotations  # Pythons that `make venv` refuses read this file too

import sys
from pathlib import Path
from types import TracebackType

CHECKOUT = Path(__file__).parents[1]


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """End a program whose imports were interrupted, or lack a library, in one line."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)  # the interpreter exits as SIGINT would end it
    elif missing and not (CHECKOUT / missing).is_dir():
        # torch.distributed puts this hook in one of its own, which keeps what sys.stderr is told.
        print(
            f"error: {sys.executable} has no {missing}; make .venv with 'make venv' and start"
            " .venv/bin/python, or '. .venv/bin/activate' first",
            file=sys.__stderr__,
            flush=True,
        )
        sys.exit(2)
    else:
        sys.__excepthook__(kind, error, traceback)


if sys.argv[0] == "-m":  # `python -m FOLDER`: the folder is imported before its libraries
    sys.excepthook = _end
