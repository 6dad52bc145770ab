"""One process that a job waits for, while it looks for a stop file and does what recurs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_SECONDS = 1.0
GRACE_SECONDS = 20.0  # after the interrupt, before SIGKILL


def wait_for(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    *,
    asked: Callable[[], bool],
    stop: Callable[[], bool],
    recurring: Callable[[], None],
) -> int:
    """Exit status of the command, 128 + number for a signal.

    Args:
        command: what is run, its output goes where this process's does.
        environment: of the command.
        directory: it starts there.
        asked: whether the job has to stop.
        stop: called once when it has: asks the command to end by itself, or returns False for a command that cannot be
            asked, which is interrupted then.
        recurring: called about every second.
    """
    process = subprocess.Popen(command, env=environment, cwd=directory, stdin=subprocess.DEVNULL)
    told = False
    while True:
        try:
            status = process.wait(POLL_SECONDS)
            return status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            pass
        recurring()
        if asked() and not told:
            told = True
            if not stop():
                end(process)


def end(process: subprocess.Popen) -> None:
    """Interrupts a process, and kills it if that does not end it. srun hands both on to its tasks."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # srun wants the interrupt twice
        if process.poll() is not None:
            return
        process.send_signal(number)
        deadline = time.monotonic() + (0.5 if number == signal.SIGINT else GRACE_SECONDS)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)


def without_network(kind: str, online: Sequence[str]) -> dict[str, str]:
    """The environment of a step of a kind, as of this process: what fetches may reach the network."""
    environment = dict(os.environ)
    if kind in online:
        environment.pop("HF_HUB_OFFLINE", None)
    return environment
