"""Requests to stop a run: SIGUSR1, SIGTERM, or a file STOP in its directory."""

import signal
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_received: list[int] = []


def _remember(number: int, _frame: FrameType | None) -> None:
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
    """Return whether SIGTERM has come: a scheduler's, or torchrun's after another rank ended."""
    return signal.SIGTERM in _received


def requested(stop_file: Path | None) -> str | None:
    """Return what asked this rank to stop, if anything. One rank looks for the file."""
    if _received:
        return signal.Signals(_received[0]).name
    return stop_file.name if stop_file and stop_file.exists() else None
