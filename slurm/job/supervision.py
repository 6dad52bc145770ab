"""A job besides its work: it waits for one process, says what happens, and requeues itself.

Nothing here needs a file to be written: a job must survive a full disk, on which even its log
cannot grow.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import typer

from base.errors import UserError
from slurm import cluster

POLL_SECONDS = 1.0
REQUEUED_SECONDS = 120.0  # SLURM ends a job that it has requeued; 60 s is what it took at most
REQUEUE_TRIES, REQUEUE_EVERY_SECONDS = 20, 30.0  # a controller that restarts is away for minutes
GRACE_SECONDS = 20.0  # after the interrupt, before SIGKILL
# srun wants the interrupt twice.
ENDING = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def wait_for(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    *,
    asked: Callable[[], bool],
    stop: Callable[[], bool],
    recurring: Callable[[], None],
) -> int:
    """Run a command; return its exit status, 128 + number for a signal.

    `recurring` is called about every second. Once the job is `asked` to stop, `stop` asks the
    command to end by itself, or returns False for one that cannot be asked: it is interrupted.
    """
    process = subprocess.Popen(command, env=environment, cwd=directory, stdin=subprocess.DEVNULL)
    told = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL_SECONDS)
                return status if status >= 0 else 128 - status
            recurring()
            if asked() and not told:
                told = True
                if not stop():
                    end(process)
    except BaseException:
        end(process)
        raise


def end(process: subprocess.Popen) -> None:
    """Interrupt a process, then kill it. srun passes both on to its tasks."""
    for number in ENDING:
        if process.poll() is not None:
            return
        process.send_signal(number)
        deadline = time.monotonic() + (0.5 if number == signal.SIGINT else GRACE_SECONDS)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)


def say(text: str) -> None:
    """Print a line, if the disk has room for it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def again(element: str, pause_seconds: float = 0.0, *, held: bool = False) -> NoReturn:
    """Requeue one element; SLURM then ends this process, which is its job."""
    if pause_seconds:
        say(f"queued again in {pause_seconds:.0f} s")
        time.sleep(pause_seconds)
    for _ in range(REQUEUE_TRIES):
        try:
            cluster.requeue(element, held=held)
        except UserError as error:
            say(str(error))
            time.sleep(REQUEUE_EVERY_SECONDS)
        else:
            time.sleep(REQUEUED_SECONDS)
            break
    raise typer.Exit(1)
