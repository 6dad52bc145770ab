"""The processes of a runner: each command below a `supervise.py`, in a new interpreter or a fork.

The runner holds a leash of each command, a socket: closed, it ends the command and its descendants.
Forks are those of `warm.py`; a command for GPUs, or one that reads the hub, has another environment
and an interpreter of its own.
"""

import json
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from study.pipeline import supervise, warm


class Process:
    """A process at work, whose exit status is sent to its leash.

    Attributes:
        leash: readable as soon as it has ended.
    """

    def __init__(
        self, leash: socket.socket, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        """Hold the leash of a process, and the process itself unless another one started it."""
        self.leash, self._process = leash, process

    def end(self) -> None:
        """Have the command ended, with all its descendants."""
        # Only this direction closes: the exit status still comes back through the other.
        self.leash.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the process, and it alone."""
        if self._process:
            self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Return the exit status once it has ended, 128 + number for a signal."""
        sent = b""
        with self.leash, suppress(ConnectionResetError):  # killed with a request unread
            sent = self.leash.recv(1)
        if self._process:
            self._process.wait()
        # Without a byte the supervisor was killed before it could send a status.
        return sent[0] if sent else 128 + signal.SIGKILL


class Processes:
    """The starter of commands, each in the environment that it is given."""

    def __init__(self, directory: Path, lock_fd: int) -> None:
        """Start commands in a directory; they inherit `lock_fd`."""
        self.directory, self.lock_fd = directory, lock_fd
        self._server: Process | None = None
        self._is_ready = False
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            self._server.kill()

    def warm_up(self, environment: dict[str, str]) -> None:
        """Start the process whose forks are the commands of `warm` in this environment."""
        if not self._server:
            self._environment = environment
            command = [sys.executable, "-m", warm.__name__]
            self._server = self._new(command, subprocess.DEVNULL, environment)

    def is_warm(self) -> bool:
        """Return whether the process that forks has its imports and is alive.

        Before that a new interpreter is no slower.
        """
        # Looked at without waiting: the imports take seconds, and steps can start meanwhile.
        if self._server and select.select([self._server.leash], [], [], 0)[0]:
            self._is_ready = False  # it ended, unless it says that it is ready
            with suppress(ConnectionResetError):
                self._is_ready = self._server.leash.recv(len(warm.READY)) == warm.READY
        return self._is_ready

    def start(self, command: list[str], output: IO[bytes], environment: dict[str, str]) -> Process:
        """Start a command that writes to `output`."""
        # A fork keeps the environment of the warm process, so it has to be the same one.
        fork = command[:2] == [sys.executable, "-m"] and command[2] in warm.COMMANDS
        if self._server and fork and environment == self._environment and self.is_warm():
            # SEQPACKET keeps packets apart: a request arrives whole, together with its descriptors.
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                request = json.dumps(command).encode()
                socket.send_fds(self._server.leash, [request], [theirs.fileno(), output.fileno()])
            return Process(ours)
        # -I -S skip site-packages, which supervise.py does not need: it starts sooner.
        supervised = [sys.executable, "-I", "-S", str(supervise.__file__), *command]
        return self._new(supervised, output, environment)

    def _new(
        self, command: list[str], output: IO[bytes] | int, environment: dict[str, str]
    ) -> Process:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        # Our copy closes after the start: only then does a dead supervisor read as end-of-file.
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.directory,
                pass_fds=[self.lock_fd],
                start_new_session=True,  # Ctrl-C reaches the runner alone, which ends them
            )
        return Process(ours, process)
