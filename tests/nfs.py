"""A kernel NFS server and its clients on one machine, for the tests: each with a network of its own.

The server exports an ext4 filesystem with quotas from a file. A client is a mount and UTS namespace
whose mount has its own connection, so its own caches, locks and lease, and whose cable can be cut.
Needs root and a kernel with both; `tests/nfs_machine.sh` makes a machine that has them.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

PROJECT = Path(__file__).parents[1]
NEEDED = (
    "rpc.nfsd",
    "rpc.mountd",
    "nfsdcld",
    "exportfs",
    "mount.nfs",
    "mkfs.ext4",
    "setquota",
    "ip",
)
LEASE_SECONDS = 15  # of 90 by default: what a server waits for a client that it does not hear
SIZE_MIB = 400
SERVER = """
set -e
directory=$1
ip link set lo up
mount --make-rprivate /
mount -t tmpfs tmpfs /var/lib/nfs
mkdir -p /var/lib/nfs/nfsdcld /var/lib/nfs/rpc_pipefs
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
mount -t tmpfs tmpfs "$directory/root"
mkdir "$directory/root/disk"
mount -o loop,usrquota "$directory/image" "$directory/root/disk"
nfsdcld --storagedir=/var/lib/nfs/nfsdcld --pipefsdir=/var/lib/nfs/rpc_pipefs
rpc.mountd --no-nfs-version 3
echo {lease} >/proc/fs/nfsd/nfsv4leasetime
echo {lease} >/proc/fs/nfsd/nfsv4gracetime
"""


def missing() -> str | None:
    """Why no NFS server and client can run here, or None."""
    if os.geteuid() != 0:
        return "a kernel NFS server needs root"
    for program in NEEDED:
        if shutil.which(program) is None:
            return f"no {program} (apt-get install nfs-kernel-server e2fsprogs quota iproute2)"
    kernel = Path("/proc/filesystems").read_text().split()
    if not {"nfs4", "nfsd"}.issubset(kernel):
        return (
            "this kernel has no NFS server and client (modprobe nfsv4 nfsd; where it has no such"
            " modules: tests/nfs_machine.sh)"
        )
    return None


def _run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def _namespaces(*kinds: str) -> subprocess.Popen:
    """Return a process that keeps namespaces of these kinds."""
    held = subprocess.Popen(["unshare", *(f"--{kind}" for kind in kinds), "sleep", "infinity"])
    last = {"net": "net", "mount": "mnt", "uts": "uts"}[kinds[-1]]
    own, ours = (Path(f"/proc/{who}/ns/{last}") for who in (held.pid, "self"))
    wait_until(
        lambda: own.readlink() != ours.readlink() and _program(held) == "sleep", "namespaces"
    )
    return held


def _program(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text().strip()


@dataclass
class Client:
    """A node of the name `node1` and up, with a mount of its own; `directory` is that mount."""

    name: str
    held: subprocess.Popen
    directory: Path
    server: "Server"

    def words(self, *words: object) -> list[str]:
        """Return the command that runs another one on this node."""
        inside = ["nsenter", f"--target={self.held.pid}", "--mount", "--uts", "env", "-C", PROJECT]
        return [str(word) for word in (*inside, *words)]

    def start(self, *words: object, log: Path, **variables: str) -> subprocess.Popen:
        """Start a command on this node in a process group of its own, its words added to a log."""
        with log.open("a") as output:
            return subprocess.Popen(
                self.words(*words),
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def run(self, *words: object) -> str:
        """Return the output of a command on this node, which has to succeed."""
        return _run(*self.words(*words))

    def mount(self, options: str) -> None:
        """Mount the export anew with these options, in place of what was mounted."""
        inside = ["nsenter", f"--target={self.held.pid}", "--net", "--mount", "--uts"]
        subprocess.run(
            [*inside, "umount", "--lazy", str(self.directory)], stderr=subprocess.DEVNULL
        )
        source = f"{self.server.address(self)}:/disk"
        _run(*inside, "mount", "-t", "nfs4", "-o", options, source, self.directory)

    def cut(self) -> None:
        """Take the cable away: neither side hears the other, and no packet is answered."""
        self.server.inside("ip", "link", "set", self.name, "down")

    def connect(self) -> None:
        """Bring the cable back."""
        self.server.inside("ip", "link", "set", self.name, "up")


class Server:
    """The server; `disk` is what it exports, as it sees it itself."""

    def __init__(self, directory: Path, options: str = "no_root_squash") -> None:
        """Start it with an empty filesystem."""
        self._directory, self._options, self._clients = directory, options, list[Client]()
        self._root = directory / "root"
        self._root.mkdir(parents=True)
        with (directory / "image").open("wb") as image:
            image.truncate(SIZE_MIB << 20)
        _run("mkfs.ext4", "-q", "-O", "quota", "-m", "0", directory / "image")
        self._held = _namespaces("net", "mount")
        self.disk = Path(f"/proc/{self._held.pid}/root{self._root}/disk")
        self.inside("bash", "-c", SERVER.format(lease=LEASE_SECONDS), "server", directory)
        self.publish()
        self.begin()

    def inside(self, *words: object) -> str:
        """Return the output of a command where the server is."""
        return _run("nsenter", f"--target={self._held.pid}", "--net", "--mount", *words)

    def publish(self, fsid: int = 1) -> None:
        """Export its filesystem, also again with another number: handles of before are stale."""
        self.inside("exportfs", "-ua")
        # A root of its own: not every filesystem of the path to the disk can be exported.
        for number, path in ((0, self._root), (fsid, self._root / "disk")):
            options = f"rw,sync,no_subtree_check,fsid={number},{self._options}"
            self.inside("exportfs", "-o", options, f"*:{path}")

    def begin(self) -> None:
        """Serve; locks of before are to be claimed again within the grace period."""
        self.inside("rpc.nfsd", "--no-nfs-version", "3", "8")

    def limit(self, user: int, kib: int) -> None:
        """Let a user have so much of the disk; 0 lifts the limit."""
        self.inside("setquota", "-u", user, kib, kib, 0, 0, self._root / "disk")

    def stop(self) -> None:
        """Serve no more: who connects is refused."""
        self.inside("rpc.nfsd", "0")

    def client(self, options: str) -> Client:
        """Return another node that has mounted the export."""
        number = len(self._clients) + 1
        held = _namespaces("net", "mount", "uts")
        client = Client(f"node{number}", held, self._directory.parent / "nfs", self)
        client.directory.mkdir(exist_ok=True)
        inside = ["nsenter", f"--target={held.pid}", "--net", "--mount", "--uts"]
        _run(*inside, "hostname", client.name)
        _run(*inside, "mount", "--make-rprivate", "/")
        ends = ("ip", "link", "add", client.name, "netns", self._held.pid)
        _run(*ends, "type", "veth", "peer", "name", "server", "netns", held.pid)
        self.inside("ip", "address", "add", f"{self.address(client)}/24", "dev", client.name)
        self.inside("ip", "link", "set", client.name, "up")
        _run(*inside, "ip", "address", "add", f"10.77.{number}.2/24", "dev", "server")
        _run(*inside, "ip", "link", "set", "server", "up")
        self._clients.append(client)
        client.mount(options)
        return client

    def address(self, client: Client) -> str:
        """Return where a client finds the server."""
        return f"10.77.{client.name.removeprefix('node')}.1"

    def end(self) -> None:
        """End all of it."""
        for client in self._clients:
            inside = ["nsenter", f"--target={client.held.pid}", "--mount"]
            subprocess.run([*inside, "umount", "--force", "--lazy", str(client.directory)])
            client.held.kill()
            client.held.wait()
        with_server = ["nsenter", f"--target={self._held.pid}", "--net", "--mount"]
        for words in (["rpc.nfsd", "0"], ["exportfs", "-ua"]):
            subprocess.run([*with_server, *words])
        ours = Path(f"/proc/{self._held.pid}/ns/net").readlink()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                theirs = (process / "ns/net").readlink()
            except OSError:  # it has ended
                continue
            if theirs == ours:
                os.kill(int(process.name), 9)
        self._held.wait()


@contextmanager
def serving(directory: Path, options: str = "no_root_squash") -> Iterator[Server]:
    """Run a server for a block."""
    server = Server(directory, options)
    try:
        yield server
    finally:
        server.end()
