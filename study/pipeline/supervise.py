"""Run one command and leave no process of it: `python -I -S supervise.py COMMAND...`.

Standard input is a socket whose other end the runner holds. When that end closes - the runner
finished, was interrupted or killed with SIGKILL - every descendant of the command is ended. The
command's exit status is sent there.
torchrun starts its workers in sessions of their own, so killing the runner's process group would
leave them training; as the reaper of orphans (PR_SET_CHILD_SUBREAPER) this process finds them all.
It runs by path and imports the standard library alone, so that starting it costs milliseconds.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# between the interrupt, which lets a command remove what it wrote aside, and SIGKILL
GRACE_SECONDS = 3.0


def descendants() -> list[int]:
    """Return the living processes below this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Fields come after the last ")": the name of a process may hold spaces and brackets.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    pids, pending = [], [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        pids += below
        pending += below
    return pids


def send(signal_number: int) -> bool:
    """Signal every descendant; return whether there was one."""
    pids = descendants()
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue
    return bool(pids)


def end_descendants() -> None:
    """Interrupt all descendants, then kill those that are left."""
    deadline = time.monotonic() + GRACE_SECONDS
    # SIGINT raises KeyboardInterrupt in Python: a command cleans up what it wrote aside.
    alive = send(signal.SIGINT)
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = bool(descendants())
    # Until none is left: a process may fork between the listing and the signal.
    while send(signal.SIGKILL):
        time.sleep(0.01)


def supervise(run: Callable[[], object]) -> None:
    """Call `run` in a fork, and send the runner the status it ends with.

    Of a signal the status is 128 + its number.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = os.fork()
    if command == 0:
        # should the supervising process itself be killed, the command goes with it
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Without a copy of the leash, which the command would hold open after the supervisor died.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run()
        sys.exit()
    # 0 is readable when the runner closes its end, the pidfd when the command has ended.
    exited = os.pidfd_open(command)
    ready, _, _ = select.select([0, exited], [], [])
    if exited not in ready:
        end_descendants()
    status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    # What the command left at work, such as workers in sessions of their own.
    end_descendants()
    with suppress(OSError):  # the runner is gone
        os.write(0, bytes([status if status >= 0 else 128 - status]))


if __name__ == "__main__":
    supervise(lambda: os.execvp(sys.argv[1], sys.argv[1:]))  # noqa: S606  the words, no shell
