"""A filesystem of the tests' own, by FUSE, that is as slow, stale and faulty as a test wants it.

It keeps its files in a directory. Each mount of that is a process of its own, with its own caches,
as each node has of a filesystem that they share. It emulates

- close-to-open: another mount sees what was written after its close or fsync, and only once it
  opens the file again; names that are there or not, attributes and listings are cached for some
  seconds;
- writes that fail at close or fsync, with a part of what was written lost, and are said once;
- operations that fail, each by a rate of its own or once, before or after they were done;
- files that are removed while open: hidden as .nfs... in their mount, stale in others if wanted;
- locks of files and ranges, seen by all mounts, by one alone, or refused; those of a mount whose
  process died are kept for a lease;
- delays, a mount that answers nothing for a while, and one that is gone.

It is not a network: there are no timeouts, no two names for a server, no identities that change, no
mmap that writes and no loss of power, and names are as case-sensitive as those of its directory. It needs /dev/fuse and
root, and neither libfuse nor a package: it speaks the kernel's protocol.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.faulty_filesystem.behaviour import Behaviour, Fault, Locks

__all__ = ["Behaviour", "Fault", "Locks", "Mount", "missing", "mounted"]


def missing() -> str | None:
    """Return why nothing can be mounted here, and what to do; None if it can."""
    if os.geteuid() != 0:
        return "only root may mount; run as root"
    if not Path("/dev/fuse").exists():
        return "no /dev/fuse; run 'modprobe fuse', in a container give it --device /dev/fuse"
    return None


class Mount:
    """One mount, served by a process of its own."""

    def __init__(
        self, backing: Path, path: Path, behaviour: Behaviour, lease_seconds: float
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        backing.mkdir(parents=True, exist_ok=True)
        self.path = path
        words = (str(backing), str(path), behaviour.to_json(), str(lease_seconds))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faulty_filesystem.server", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._keeper: int = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"nobody serves {self.path}"
        return json.loads(line)

    def _ask(self, method: str, argument: object = None) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([method, argument]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def behave(self, behaviour: Behaviour) -> None:
        """Change how it behaves from now on; its kind of locks stays."""
        self._ask("behave", behaviour.to_json())

    def injected(self) -> dict[str, int]:
        """Return how many faults struck, by 'OPERATION ERROR'."""
        return dict(self._ask("injected"))

    def operations(self) -> dict[str, int]:
        """Return how many operations there were, by name."""
        return dict(self._ask("counts"))

    def hang(self, seconds: float) -> None:
        """Answer nothing for a while."""
        self._ask("hang", seconds)

    def kill(self) -> None:
        """End the process as a node ends that loses its power."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Unmount; nobody keeps its locks any more."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()
        self._process.wait()
        with suppress(ProcessLookupError):
            os.kill(self._keeper, signal.SIGKILL)


@contextmanager
def mounted(
    backing: Path, path: Path, behaviour: Behaviour | None = None, lease_seconds: float = 0.0
) -> Iterator[Mount]:
    """Mount a directory at `path` until the end of the block.

    Args:
        backing: where the files are.
        path: a directory, which is made if need be.
        behaviour: none for a filesystem without faults and caches.
        lease_seconds: how long the locks of a mount that was killed are kept.
    """
    mount = Mount(backing, path, behaviour or Behaviour(), lease_seconds)
    try:
        yield mount
    finally:
        mount.close()
