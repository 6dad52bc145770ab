"""The end of a command in a fork of a process that has its imports."""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

NOT_WRITTEN = 120  # what the interpreter ends with if its output does not take the rest


def run_and_leave(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end the process as the interpreter would, but without freeing anything.

    To free what a fork shares with its parent copies it first, page by page: 0.9 s of a core where
    torch is imported, more than most commands of a small study compute.
    """
    code = _exit_code(program)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or NOT_WRITTEN
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _exit_code(program: Callable[[], object]) -> int:
    """Run a program; return what the interpreter would end with, -2 for an interrupt."""
    try:
        program()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 255
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001  whatever it is, as the interpreter does
        traceback.print_exc()
        return 1
    return 0
