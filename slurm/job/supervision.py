"""A job besides its work: it waits for one process and says what happens.

Nothing here needs a file to be written: a job must survive a full disk, on which even its log
cannot grow.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_SECONDS = 1.0
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
    hung: Callable[[], str | None] = lambda: None,
) -> int:
    """Run a command; return its exit status, 128 + number for a signal.

    `recurring` is called about every second. Once the job is `asked` to stop, `stop` asks the
    command to end by itself, or returns False for one that cannot be asked: it is interrupted.
    Once `hung` says what hangs, the command is ended.
    """
    process = subprocess.Popen(command, env=environment, cwd=directory, stdin=subprocess.DEVNULL)
    was_asked = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL_SECONDS)
                return status if status >= 0 else 128 - status
            recurring()
            if reason := hung():
                say(f"error: {reason}")
                end(process)
            if asked() and not was_asked:
                was_asked = True
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
