"""Studies on the kernel's NFS: faults of mounts and servers lose nothing, and no lock stays."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import nfs
from tests.nfs import LEASE_SECONDS, PROJECT, Client, Server, serving
from tests.nfs_study import NAME, digest
from tests.waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.stress
AWAY_SECONDS = 120.0
# Attributes and names that are not there are believed for a minute.
HARD = "vers=4.2,hard,actimeo=60,lookupcache=all"
SOFT = "vers=4.2,soft,timeo=10,retrans=1,actimeo=60,lookupcache=all"
NOBODY = 65534
STAND_IN = '#!/bin/sh\nexec {} -m tests.nfs_study step "$0" "$@"\n'
# Holds the lock of a file, and says so.
HOLD = """
import sys, time
from pathlib import Path
from base.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(scope="module", autouse=True)
def kernel_nfs() -> None:
    """Skips where no NFS server and client can run."""
    if reason := nfs.missing():
        pytest.skip(f"no NFS here: {reason}")  # a kernel cannot be installed as a package can


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    """The interpreter of steps that only read and write."""
    path = tmp_path_factory.mktemp("interpreter") / "python"
    path.write_text(STAND_IN.format(sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, stand_in) -> str:
    """The digest of all that the study's steps write on a local disk."""
    root = tmp_path_factory.mktemp("local")
    command = [sys.executable, "-m", "tests.nfs_study", str(root)]
    subprocess.run(command, cwd=PROJECT, env=os.environ | {"STAND_IN": str(stand_in)}, check=True)
    return digest(root / NAME)


class Study:
    """A study on a server, run by one command after another, each on some node.

    Attributes:
        codes: exit codes of the commands.
        lines: their last lines.
    """

    def __init__(self, server: Server, stand_in: Path, log: Path) -> None:
        self._server, self._stand_in, self._log = server, stand_in, log
        self.codes, self.lines = list[int](), list[str]()
        self._process: subprocess.Popen | None = None

    @property
    def directory(self) -> Path:
        """The study as the server sees it, whatever clients have cached."""
        return self._server.disk / "runs" / NAME

    def start(self, node: Client) -> None:
        """Start the command on a node."""
        variables = {"STAND_IN": str(self._stand_in), "PYTHONPATH": str(PROJECT)}
        words = (sys.executable, "-m", "tests.nfs_study", node.directory / "runs")
        self._process = node.start(*words, log=self._log, **variables)

    def kill(self) -> None:
        """Kill the command, which may wait for a server that is away."""
        assert self._process
        os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Return the exit code of the command: 0, or another one after one line."""
        assert self._process
        self.codes.append(self._process.wait(HANG_SECONDS))
        words = self._log.read_text()
        self.lines.append(words.splitlines()[-1])
        print(f"exit code {self.codes[-1]}: {self.lines[-1]}", flush=True)
        assert "Traceback" not in words, words[-3000:]
        assert self.codes[-1] == 0 or "error: " in self.lines[-1]
        return self.codes[-1]

    def run(self, node: Client) -> int:
        """Return the exit code of a whole command on a node."""
        self.start(node)
        return self.end()

    def until(self, name: str) -> None:
        """Wait until a file of the study is there, or a command has ended before."""
        wait_until(
            lambda: (self.directory / name).exists() or self.has_ended(), f"{name} of the study"
        )

    def has_ended(self) -> bool:
        """Return whether the command has ended."""
        return self._process is not None and self._process.poll() is not None

    def check(self, undisturbed: str) -> None:
        """Check that no step has ended in a traceback and that all bytes are as undisturbed."""
        for log in self.directory.glob("logs/*.log"):
            assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
        assert digest(self.directory) == undisturbed


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    """A server that lets root be root."""
    with serving(tmp_path / "server") as server:
        yield server


@pytest.fixture
def study(server, stand_in, tmp_path) -> Study:
    """The study on that server, not begun yet."""
    return Study(server, stand_in, tmp_path / "log")


RUN = "lr3e-3"


def test_a_lost_node_gives_its_locks_up(server, tmp_path):
    """Its processes live and its cable is cut: no process's end frees the lock."""
    first, second = server.client(HARD), server.client(HARD)
    log = tmp_path / "log"
    hold = (sys.executable, "-c", HOLD)
    holder = first.start(*hold, first.directory / "lock", 10_000, log=log)
    wait_until(lambda: "locked" in log.read_text(), "the lock", holder)
    first.cut()
    lost_at = time.monotonic()
    second.run(*hold, second.directory / "lock", 0)
    waited = time.monotonic() - lost_at
    print(f"lock of a lost node: free after {waited:.0f} s, lease {LEASE_SECONDS} s", flush=True)
    assert waited > LEASE_SECONDS / 2
    first.connect()
    holder.kill()


def test_hard_mounts_wait_for_their_server(server, study, undisturbed):
    node = server.client(HARD)
    study.start(node)
    study.until(f"{RUN}/metrics.jsonl")
    server.stop()
    time.sleep(AWAY_SECONDS)
    server.begin()
    study.until(f"{RUN}/checkpoints/step00000048/checkpoint.json")
    server.stop()  # and up again at once, so locks are claimed again
    server.begin()
    assert study.end() == 0, "nothing noticed"
    assert study.codes == [0]
    study.check(undisturbed)


def test_a_runner_on_a_lost_node_is_followed_by_one_on_another(server, study, undisturbed):
    first, second = server.client(HARD), server.client(HARD)
    study.start(first)
    study.until(f"{RUN}/metrics.jsonl")
    first.cut()
    study.kill()
    lost_at = time.monotonic()
    while study.run(second):
        assert time.monotonic() < lost_at + HANG_SECONDS
        assert "another 'study run' works on" in study.lines[-1]
    first.connect()
    study.check(undisturbed)


def test_soft_mounts_end_in_a_line_and_lose_nothing(server, study, undisturbed):
    """Calls that open or lock wait for an NFS 4 server all the same, others fail in seconds."""
    node = server.client(SOFT)
    study.start(node)
    study.until(f"{RUN}/metrics.jsonl")
    server.stop()
    time.sleep(AWAY_SECONDS)
    server.begin()
    study.end()
    node.mount(SOFT)  # writes to files of before fail for as long as the mount stays
    while study.codes[-1]:
        study.run(node)
        assert len(study.codes) < 5, study.lines
    study.check(undisturbed)


def test_an_export_of_another_number_is_said_in_a_line(server, study, undisturbed):
    """Files that are open, or known by a handle, are stale."""
    node = server.client(HARD)
    study.start(node)
    study.until(f"{RUN}/metrics.jsonl")
    server.publish(fsid=2)
    assert study.end() != 0
    node.mount(HARD)
    assert study.run(node) == 0
    study.check(undisturbed)


def test_root_squash_a_quota_and_a_full_disk_are_said_in_a_line(tmp_path, stand_in, undisturbed):
    with serving(tmp_path / "server", "root_squash") as server:
        study = Study(server, stand_in, tmp_path / "log")
        node = server.client(HARD)
        assert study.run(node) == 2
        assert "Permission denied" in study.lines[-1]

        os.chown(server.disk, NOBODY, NOBODY)
        server.limit(NOBODY, kib=1000)
        assert study.run(node) != 0
        assert "quota" in study.lines[-1].lower()

        server.limit(NOBODY, kib=0)
        free = shutil.disk_usage(server.disk).free
        filler = server.disk / "filler"
        filler.write_bytes(bytes(free - 400_000))
        assert study.run(node) != 0
        # The log is on the same disk, and may not have taken the line either.
        words = ("No space left", "its error is not in the log; look at space")
        assert any(word in study.lines[-1] for word in words)

        filler.unlink()
        assert study.run(node) == 0
        study.check(undisturbed)
