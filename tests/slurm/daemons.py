"""The long-lived processes of a lab, each by the number in run/NAME.pid of the lab's directory."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

PORTS = range(10_000, 32_000)  # below those that the kernel hands out to clients
SOFT_SECONDS = 5  # how long a process may take to end by itself
# The number is written before the program starts, and its name holds the directory: from its first
# moment it is known as the lab's own.
LAUNCH = """
set -e
directory=$1 name=$2
shift 2
echo $$ > "$directory/run/$name.new"
mv "$directory/run/$name.new" "$directory/run/$name.pid"
exec -a "$directory/$name" "$@"
"""


@dataclass(frozen=True)
class Daemon:
    """The process `name` of the lab in `directory`, whether it runs or not."""

    directory: Path
    name: str

    @property
    def pid_file(self) -> Path:
        """The file that holds its number."""
        return self.directory / f"run/{self.name}.pid"

    def number(self) -> int | None:
        """Return its process number, or None if it does not run."""
        try:
            number = int(self.pid_file.read_text())
            command_line = Path(f"/proc/{number}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None  # never started, ended, or ending: some empty their file first

        # Another process may have got the number later.
        return number if str(self.directory).encode() in command_line else None

    def start(self, *command: str, **variables: str) -> None:
        """Start a program that stays in the foreground; it writes to log/NAME.out."""
        launch = ["setsid", "--fork", "bash", "-c", LAUNCH, "launch", str(self.directory)]
        with (self.directory / f"log/{self.name}.out").open("a") as log:
            subprocess.run(
                [*launch, self.name, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | variables,
                check=True,
            )
        wait_until(self.pid_file.exists, f"process of {self.name}")

    def wait_until_ready(self, ready: Callable[[], object]) -> None:
        """Return once it is ready; raise AssertionError if it ends before."""

        def ready_or_ended() -> object:
            return ready() or self.number() is None

        wait_until(ready_or_ended, f"{self.name} ready")
        assert self.number(), f"{self.name} ended; read {self.directory}/log/{self.name}.out"

    def end(self, sent: signal.Signals = signal.SIGKILL) -> None:
        """End it with this signal, and with SIGKILL if it takes too long."""
        end = time.monotonic() + SOFT_SECONDS
        while number := self.number():
            with suppress(ProcessLookupError):
                os.kill(number, sent if time.monotonic() < end else signal.SIGKILL)
            time.sleep(0.05)
        self.pid_file.unlink(missing_ok=True)


def free_ports(count: int) -> int:
    """Return the first of `count` neighbouring ports that nobody listens on."""
    while True:
        first = random.SystemRandom().randrange(PORTS.start, PORTS.stop - count)
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    listener = taken.enter_context(socket.socket())
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind(("", port))
            except OSError:
                continue
            return first
