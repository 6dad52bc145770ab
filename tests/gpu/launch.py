"""Commands of the project on ranks, by the words with which a study starts them."""

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

import psutil

from base import CHECKOUT
from study.step import Machine, resolve, torchrun


class Started(Protocol):
    """A command that runs on its ranks; `tests.forked.Forked` is another."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        ...

    def kill(self) -> None:
        """Send SIGKILL to every process of it, and wait until all are gone."""
        ...

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return both outputs at its end; subprocess.TimeoutExpired after so many seconds."""
        ...


def start(
    ranks: int, *words: str, tree: Path = CHECKOUT, variables: dict[str, str] | None = None
) -> "Launched":
    """Start `python -m WORDS` of a tree of this project on ranks of this machine."""
    machine = Machine(torchrun(ranks)) if ranks > 1 else Machine()
    command = resolve(("{launch}", "-m", *words), tree, machine)
    return Launched(command, tree, variables or {})


class Launched:
    """A running command with all the processes that it starts."""

    def __init__(self, command: list[str], tree: Path, variables: dict[str, str]) -> None:
        # The tree comes first: what is imported has to be of it, and packages of a bundle may be
        # named relative to the directory of this process.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(tree), *(str(Path(path).absolute()) for path in paths if path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables
        self._outputs = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._outputs.name) / name for name in ("out", "err"))
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=out, stderr=err
            )

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL to every process of it, and wait until all are gone."""
        kill(self._process.pid)
        self._process.wait()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return both outputs at its end; subprocess.TimeoutExpired after so many seconds."""
        self._process.wait(timeout)
        return self._out.read_text(), self._err.read_text()


def succeed(started: Started, seconds: float) -> str:
    """Wait for a command, and return what it printed; RuntimeError if it fails or takes longer."""
    try:
        out, err = started.communicate(seconds)
    except subprocess.TimeoutExpired:
        started.kill()
        raise RuntimeError(f"a command did not end within {seconds:.0f} s") from None
    if code := started.poll():
        raise RuntimeError(f"a command ended with exit code {code}: {err[-2000:]}")
    return out


def kill(pid: int) -> None:
    """Send SIGKILL to a process and to all that it started, in whatever sessions they are."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.send_signal(signal.SIGSTOP)  # or it might start another meanwhile
        family = [process, *process.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family[1:], timeout=10)
