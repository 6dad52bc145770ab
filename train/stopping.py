"""How a run is asked to stop: SIGUSR1, SIGTERM, or a file STOP in its directory."""

import signal
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_received: list[int] = []


def _remember(number: int, _frame: FrameType | None) -> None:
    _received.append(number)


def listen() -> None:
    """From now on a signal is remembered instead of ending the process. Call it before anything slow is imported."""
    for number in SIGNALS:
        signal.signal(number, _remember)


def ignore() -> None:
    """A signal that comes after the end of training must not turn its success into a failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def terminated() -> bool:
    """Whether SIGTERM has come: a scheduler's, or torchrun's after another rank has ended."""
    return signal.SIGTERM in _received


def requested(stop_file: Path | None) -> str | None:
    """What asked this rank to stop; None for nothing. Only one rank needs to look for the file."""
    if _received:
        return signal.Signals(_received[0]).name
    return stop_file.name if stop_file and stop_file.exists() else None
