"""Commands in processes forked from one that has imported torch and transformers: the same, without those seconds.

A fork runs `python -m MODULE ARGUMENTS` with the environment, the directory and the outputs of a process of its own.
Tests of signals, of limits, of memory and of torchrun start real ones, with `tests.runs.execute`.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preloaded"])


def run_forked(
    arguments: Sequence[str], environments: list[dict[str, str]], cwd: Path, timeout_seconds: float
) -> subprocess.CompletedProcess:
    """Runs one process per environment. The first that fails ends the others and gives the exit code."""
    with tempfile.TemporaryDirectory() as outputs:
        out, err = (Path(outputs) / name for name in ("out", "err"))
        alive = [
            _SERVER.Process(target=_run_module, args=(list(arguments), environment, cwd, out, err))
            for environment in environments
        ]
        for process in alive:
            process.start()
        deadline, code = time.monotonic() + timeout_seconds, 0
        while alive:
            if not wait([process.sentinel for process in alive], timeout=deadline - time.monotonic()):
                for process in alive:
                    process.kill()
                raise subprocess.TimeoutExpired(list(arguments), timeout_seconds, stderr=err.read_text())
            code = code or next((process.exitcode for process in alive if process.exitcode), 0)
            alive = [process for process in alive if process.exitcode is None]
            for process in alive if code else ():
                process.terminate()
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())


def _run_module(arguments: list[str], environment: dict[str, str], cwd: Path, out: Path, err: Path) -> None:
    """In the fork: `python -m` of the arguments."""
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
