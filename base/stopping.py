"""Requests to stop a run: SIGUSR1, SIGTERM, or a file STOP in its directory."""

import signal
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
USER = "user"
OTHER_RANK = "a signal to another rank"
_received: list[int] = []


def _remember(number: int, _frame: FrameType | None) -> None:
    # Only noted: a handler runs between any two lines, and training asks after every step.
    _received.append(number)


def listen() -> None:
    """Remember signals instead of ending the process; called before slow imports."""
    for number in SIGNALS:
        signal.signal(number, _remember)


def ignore() -> None:
    """Ignore signals after the end of training: they must not turn success into failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def terminated() -> bool:
    """Return whether SIGTERM came: from a scheduler, or from torchrun after another rank ended."""
    return signal.SIGTERM in _received


def requested(stop_file: Path | None) -> str | None:
    """Return who asked this rank to stop, if anybody: a signal, or the text of the file.

    Only one rank looks for the file. An empty file means the user.
    """
    if _received:
        return signal.Signals(_received[0]).name
    try:
        return (stop_file.read_text().strip() or USER) if stop_file else None
    except FileNotFoundError:
        return None
