"""Waiting for an event: a file, a row, a state. A limit on time exists only to end a hang."""

import signal
import subprocess
import time
from collections.abc import Callable

from tests.forked import Forked

# Longer than any wait takes on a slow and busy machine; a test as a whole is ended by
# faulthandler_timeout of pytest. Both are short beside the time limit of continuous integration,
# so that a test that hangs is named there.
HANG_SECONDS = 600.0
EVERY_SECONDS = 0.02


def wait_until(
    condition: Callable[[], object], what: str, process: subprocess.Popen | Forked | None = None
) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: `process` ended first; its last words are in the message if they are piped.
        TimeoutError: naming `what`, after HANG_SECONDS.
    """
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        if process and process.poll() is not None and not condition():
            words = process.communicate(timeout=HANG_SECONDS)[1] or ""
            raise AssertionError(
                f"{what}: the process ended first, with code {process.returncode}: {words[-3000:]}"
            )
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {HANG_SECONDS:g} s")
        time.sleep(EVERY_SECONDS)


def interruptible() -> None:
    """Let SIGINT end a child: its `preexec_fn`.

    What a shell starts in its background ignores that signal, and so does every child, unless told
    otherwise.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
