"""Commands in processes forked from one that has imported torch and transformers: the same,
without those seconds.

A fork runs `python -m MODULE ARGUMENTS` with the environment, the directory and the outputs of a
process of its own. Tests of signals, of limits, of memory and of torchrun start real ones, with
`tests.runs.execute`.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tests.interpreter import SERVER, interpreter


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
        self._processes = [
            SERVER.Process(
                target=_run_module,
                args=(self.arguments, environment, cwd, self._out, self._err, interpreter()),
            )
            for environment in environments
        ]
        for process in self._processes:
            process.start()

    def pid(self, rank: int) -> int:
        """Return the process id of one of them, in the order of the environments."""
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        """Return the exit code as far as it is known."""
        codes = [process.exitcode for process in self._processes]
        if self.returncode is None:
            self.returncode = next((code for code in codes if code), None if None in codes else 0)
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL to every process and wait until all are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return both outputs at the end of all processes. The first that fails ends the others."""
        deadline = time.monotonic() + timeout
        while alive := [process for process in self._processes if process.exitcode is None]:
            if not wait(
                [process.sentinel for process in alive], timeout=deadline - time.monotonic()
            ):
                self.kill()
                raise subprocess.TimeoutExpired(
                    self.arguments, timeout, stderr=self._err.read_text()
                )
            if self.poll():
                for process in alive:
                    process.terminate()
        self.poll()
        return self._out.read_text(), self._err.read_text()


def _run_module(
    arguments: list[str], environment: dict[str, str], cwd: Path, out: Path, err: Path, program: str
) -> None:
    """In the fork: `python -m` of the arguments; what that starts is forked too."""
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.executable = arguments, program
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
