"""Commands in processes forked from one that has imported torch and transformers: the same,
without those seconds.

A fork runs `python -m MODULE ARGUMENTS` with the environment, the directory and the outputs of a
process of its own. Tests of signals, of limits, of memory and of torchrun start real ones, with
`tests.runs.execute`.
"""

import os
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from tests.interpreter import fork

NOTHING = os.open(os.devnull, os.O_RDONLY)


class Forked:
    """Running processes, one per environment, and their outputs, which they share.

    Args:
        beside: anything that has to live as long as the processes.

    Attributes:
        returncode: that of the first process that failed, 0 when all have ended well, None before;
            see `poll`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environments: list[dict[str, str]],
        cwd: Path,
        beside: object = None,
    ) -> None:
        self.arguments, self._beside = list(arguments), beside
        self.returncode: int | None = None
        self._outputs = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._outputs.name) / name for name in ("out", "err"))
        with self._out.open("ab") as out, self._err.open("ab") as err:
            files = {0: NOTHING, 1: out.fileno(), 2: err.fileno()}
            self._processes = [
                _Process(["-m", *arguments], environment, cwd, files)
                for environment in environments
            ]

    def pid(self, rank: int) -> int:
        """Return the process id of one of them, in the order of the environments."""
        return self._processes[rank].pid

    def poll(self) -> int | None:
        """Return the exit code as far as it is known."""
        codes = [process.poll() for process in self._processes]
        if self.returncode is None:
            self.returncode = next((code for code in codes if code), None if None in codes else 0)
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL to every process and wait until all are gone."""
        self._send(signal.SIGKILL)
        while alive := self._alive():
            wait([process.ended for process in alive])

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return both outputs at the end of all processes. The first that fails ends the others."""
        deadline = time.monotonic() + timeout
        while alive := self._alive():
            if not wait([process.ended for process in alive], timeout=deadline - time.monotonic()):
                self.kill()
                raise subprocess.TimeoutExpired(
                    self.arguments, timeout, stderr=self._err.read_text()
                )
            if self.poll():
                self._send(signal.SIGTERM)
        self.poll()
        return self._out.read_text(), self._err.read_text()

    def _alive(self) -> list["_Process"]:
        return [process for process in self._processes if process.poll() is None]

    def _send(self, number: int) -> None:
        for process in self._alive():
            with suppress(ConnectionError):
                process.ended.send(bytes([number]))


class _Process:
    """One fork.

    Attributes:
        pid: its process id.
        ended: a socket that can be read once it has ended, and that sends it signals.
    """

    def __init__(
        self, arguments: list[str], environment: dict[str, str], cwd: Path, files: dict[int, int]
    ) -> None:
        self.ended, self.pid = fork(arguments, environment, cwd, files)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self._code is None and wait([self.ended], timeout=0):
            (status,) = struct.unpack("i", self.ended.recv(4))
            self._code = os.waitstatus_to_exitcode(status)
            self.ended.close()
        return self._code
