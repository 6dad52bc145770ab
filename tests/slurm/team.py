"""Users of a lab beside root, without a change of the machine.

The daemons of the lab, and all that the users run, are in a mount namespace whose lists of users and
groups name them. Where the interpreter is below a directory that is closed to others, such as
/root, that directory shows the interpreter alone there.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.interpreter import interpreter
from tests.runs import PROJECT
from tests.slurm.lab import Lab
from tests.waiting import HANG_SECONDS

GROUP = "quantteam"
GROUP_ID = 64_100
MEMBERS = {"alice": 64_101, "bob": 64_102}
OUTSIDER = {"carol": 64_103}
USERS = MEMBERS | OUTSIDER
START = """
set -e
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/group" /etc/group
"""


@dataclass(frozen=True)
class TeamLab(Lab):
    """A lab with the users above, each of whom has a home beside its directory."""

    def start(self) -> None:
        """Start as a lab does, in a namespace of its own."""
        base = self.directory.parent
        base.chmod(0o755)
        for user, number in USERS.items():
            (base / user).mkdir()
            os.chown(base / user, number, number)
        homes = [
            (f"{user}:x:{number}", f"{base / user}:/bin/bash") for user, number in USERS.items()
        ]
        users = "".join(f"{name}:{name.split(':')[-1]}::{home}\n" for name, home in homes)
        groups = "".join(f"{user}:x:{number}:\n" for user, number in USERS.items())
        groups += f"{GROUP}:x:{GROUP_ID}:{','.join(MEMBERS)}\n"
        (base / "passwd").write_text(Path("/etc/passwd").read_text() + users)
        (base / "group").write_text(Path("/etc/group").read_text() + groups)

        script = START + "\n".join(_opened(base)) + '\nshift; exec "$@"'
        words = ["unshare", "--mount", "bash", "-c", script, "start", str(base)]
        lab = [sys.executable, "-m", "tests.slurm.lab", "start", str(self.directory)]
        size = ["--nodes", str(self.nodes), "--cpus", str(self.cpus)]
        settings = [f"--set={key}={value}" for key, value in self.extra_conf.items()]
        subprocess.run(
            [*words, *lab, *size, *settings, *["--accounting"] * self.accounting],
            cwd=PROJECT,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=HANG_SECONDS,
        )
        program = Path(interpreter())  # made for root alone
        program.parent.chmod(0o711)
        program.chmod(0o755)

    def as_user(
        self, user: str, *words: str, umask: int = 0o022, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Return a command of a user, ended, with both outputs."""
        number = USERS[user]
        groups = f"{number},{GROUP_ID}" if user in MEMBERS else str(number)
        controller = (self.directory / "run/slurmctld.pid").read_text().strip()
        inside = ["nsenter", f"--mount=/proc/{controller}/ns/mnt"]
        identity = ["setpriv", f"--reuid={number}", f"--regid={number}", f"--groups={groups}"]
        environment = os.environ | {"SLURM_CONF": str(self.conf), "USER": user, "LOGNAME": user}
        environment |= {"HOME": str(self.directory.parent / user), **variables}
        return subprocess.run(
            [*inside, *identity, "env", "-C", str(PROJECT), *words],
            env=environment,
            umask=umask,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )

    def python(
        self, user: str, *words: str, umask: int = 0o022, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Return a command of the project, by a user, ended."""
        return self.as_user(user, interpreter(), *words, umask=umask, **variables)


def _opened(base: Path) -> list[str]:
    """Return the lines that show others what they need of directories that are closed to them."""
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), PROJECT}
    closed = {path: _closed(path) for path in needed}
    aside = [(path, base / f"open{number}") for number, path in enumerate(needed) if closed[path]]
    return [
        *(f"mkdir {place}; mount --rbind '{path}' {place}" for path, place in aside),
        *(f"mount -t tmpfs -o mode=755 tmpfs '{path}'" for path in {*closed.values()} if path),
        *(f"mkdir -p '{path}'; mount --rbind {place} '{path}'" for path, place in aside),
    ]


def _closed(path: Path) -> Path | None:
    """Return the first directory on the way to a path that others cannot pass."""
    ways = (parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001)
    return next(ways, None)
