"""A SLURM cluster on one machine for the tests: munged, slurmctld and a slurmd for each node, in
one directory.

Every node is a PID, mount and UTS namespace: it has its own host name and process numbers, and dies
as one. Nodes share the file system, but not what is mounted on it after they started. GPUs are
links to /dev/null. Needs root; no systemd, no cgroups, nothing written outside the directory. By
hand:

    python -m tests.slurm.lab start DIR [--nodes N] [--cpus N] [--memory MIB] [--gpus N] [--set
    MaxArraySize=5] python -m tests.slurm.lab status|stop DIR
"""

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import HANG_SECONDS, wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")
PORTS = range(10_000, 32_000)  # below those that the kernel hands out to clients
NAMESPACES = ("--pid", "--mount", "--uts")
SETTINGS = {
    "ClusterName": "lab",
    "SlurmctldHost": "localhost(127.0.0.1)",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "MpiDefault": "none",
    "SwitchType": "switch/none",
    "PropagateResourceLimits": "NONE",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU_Memory",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=1,requeue_delay=1",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "EnforcePartLimits": "ALL",
    "MaxArraySize": "6001",
    "SlurmdTimeout": "10",
    "SlurmctldTimeout": "10",
    "KillWait": "5",
    "MinJobAge": "3600",
    "ReturnToService": "2",
    "SlurmdParameters": "config_overrides",
    "GresTypes": "gpu",
}
# A node's first process. The number it has outside is read before /proc becomes the node's own;
# bash reaps orphans.
NODE_INIT = """
set -e
directory=$1 name=$2
read -r outside _ < /proc/self/stat
mount -t proc proc /proc
mount --bind "$directory/etc/hosts" /etc/hosts
hostname "$name"
echo "$outside" > "$directory/run/$name.new"
mv "$directory/run/$name.new" "$directory/run/$name.pid"
while :; do sleep 3600 & wait $! || true; done
"""


def missing() -> str | None:
    """Why no lab can run here, or None."""
    if os.geteuid() != 0:
        return "its daemons need root"
    for program in NEEDED:
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install slurm-wlm munge slurm-client)"
    namespaces = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True
    )
    return (
        None
        if namespaces.returncode == 0
        else "this machine lets nobody make namespaces (a privileged container does)"
    )


@dataclass(frozen=True)
class Lab:
    """The cluster of `directory`; whoever names the same directory speaks of the same cluster.

    Attributes:
        nodes: node1 to nodeN, at 127.0.0.11 and up.
        memory_mib: a node's RealMemory; nothing enforces what a job uses of it.
        extra_conf: settings of slurm.conf that are added or replaced, such as `{"MaxArraySize":
            "11"}`.
    """

    directory: Path
    nodes: int = 4
    cpus: int = 16
    memory_mib: int = 16_000
    gpus: int = 8
    extra_conf: Mapping[str, str] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        """The file that SLURM_CONF has to name for every command of SLURM."""
        return self.directory / "etc/slurm.conf"

    def start(self) -> None:
        """Returns when every node is idle. Raises TimeoutError, with the logs in
        `directory`/log.
        """
        for name in ("etc", "log", "run", "state", "spool", "dev"):
            (self.directory / name).mkdir(parents=True)
        self._write_configuration()
        key, run = self.directory / "etc/munge.key", self.directory / "run"
        key.touch(mode=0o600)
        key.write_bytes(random.randbytes(128))
        munged = [
            "munged",
            f"--key-file={key}",
            f"--socket={run}/munge.sock",
            f"--pid-file={run}/munged.pid",
        ]
        munged += [
            f"--log-file={self.directory}/log/munged.log",
            f"--seed-file={run}/munge.seed",
            "--num-threads=2",
        ]
        self.command(*munged, "--force")  # also below a directory that others may write to
        self.command("slurmctld", "-f", str(self.conf))
        for node in range(1, self.nodes + 1):
            self._start_slurmd(node)
        wait_until(
            lambda: self.node_states() == ["idle"] * self.nodes,
            f"all nodes of {self.directory} idle",
        )

    def stop(self) -> None:
        """Ends every process of the cluster and of its jobs; nothing happens where none is left."""
        for pid_file in sorted((self.directory / "run").glob("*.pid")):
            soft = pid_file.stem in ("slurmctld", "munged")  # they remove what they left elsewhere
            self._end(pid_file, signal.SIGTERM if soft else signal.SIGKILL)

    def kill_node(self, node: int, *, orphans: bool = False) -> None:
        """The node is lost: all its processes are gone, or with `orphans` only slurmd, while its
        steps go on unseen.
        """
        if orphans:
            slurmd = (self.directory / f"run/slurmd-node{node}.inside").read_text().strip()
            self.inside(node, "kill", "-KILL", slurmd)
        else:
            self._end(self.directory / f"run/node{node}.pid", signal.SIGKILL)

    def start_node(self, node: int) -> None:
        """Brings a lost node back and waits until SLURM uses it again; its orphans, if it has
        any, are still there.
        """
        self._start_slurmd(node)
        wait_until(
            lambda: self.node_states(node) in (["idle"], ["allocated"], ["mixed"]),
            f"node{node} back",
        )

    def node_states(self, *nodes: int) -> list[str]:
        """What SLURM says of these nodes, or of all, in order: idle, mixed, allocated, down*,
        ...
        """
        chosen = [f"node{node}" for node in nodes or range(1, self.nodes + 1)]
        shown = dict(
            line.split()
            for line in self.command("sinfo", "-h", "-N", "-p", "train", "-o", "%N %T").splitlines()
        )
        return [shown[name] for name in chosen]

    def inside(self, node: int, *arguments: str) -> str:
        """What a command prints that runs on the node, outside of any job, such as `pkill -KILL
        -f worker`.
        """
        init = (self.directory / f"run/node{node}.pid").read_text().strip()
        return self.command("nsenter", f"--target={init}", *NAMESPACES, *arguments)

    def command(self, *arguments: str) -> str:
        """What a command prints, with this cluster's SLURM_CONF. Raises RuntimeError, stderr in
        log/commands.log.
        """
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        with (self.directory / "log/commands.log").open(
            "a+"
        ) as log:  # a daemon would hold a pipe open
            ended = subprocess.run(
                arguments,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                timeout=HANG_SECONDS,
            )
        if ended.returncode:
            raise RuntimeError(
                f"{' '.join(arguments)}: exit code {ended.returncode}; read {log.name}"
            )
        return ended.stdout

    def _start_slurmd(self, node: int) -> None:
        """Starts the node's slurmd, and its namespaces before where they are gone."""
        name = f"node{node}"
        pid_file = self.directory / f"run/{name}.pid"
        if not self._is_ours(pid_file):
            init = ["bash", "-c", NODE_INIT, "node", str(self.directory), name]
            with (self.directory / f"log/{name}.log").open("a") as log:
                launch = ["setsid", "--fork", "unshare", *NAMESPACES, "--fork", *init]
                subprocess.run(launch, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
            wait_until(pid_file.exists, f"namespaces of {name}")
        # slurmd raises its limit of core dumps to what it may, and jobs inherit it: a killed rank
        # would leave one.
        start = 'ulimit -c 0; exec slurmd -f "$0" -N "$1"'
        self.inside(node, "bash", "-c", start, str(self.conf), name)

    def _is_ours(self, pid_file: Path) -> bool:
        """Whether the process that the file names still runs, and is not another with a number
        used again.
        """
        if not pid_file.exists():
            return False
        command_line = Path(f"/proc/{pid_file.read_text().strip()}/cmdline")
        try:
            return str(self.directory).encode() in command_line.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _end(self, pid_file: Path, sent: signal.Signals) -> None:
        end = time.monotonic() + 5
        while self._is_ours(pid_file):
            os.kill(int(pid_file.read_text()), sent if time.monotonic() < end else signal.SIGKILL)
            time.sleep(0.05)
        pid_file.unlink(missing_ok=True)

    def _write_configuration(self) -> None:
        names, log, run = f"node[1-{self.nodes}]", self.directory / "log", self.directory / "run"
        port = free_ports(self.nodes + 1)
        places = {
            "SlurmctldPort": str(port),
            "AuthInfo": (
                f"socket={run}/munge.sock,cred_expire=5"
            ),  # by default a requeued job waits two minutes
            "StateSaveLocation": f"{self.directory}/state",
            "SlurmdSpoolDir": f"{self.directory}/spool/%n",
            "SlurmctldPidFile": f"{run}/slurmctld.pid",
            "SlurmdPidFile": (
                f"{run}/slurmd-%n.inside"
            ),  # its number inside the node: stop() must not take it
            "SlurmctldLogFile": f"{log}/slurmctld.log",
            "SlurmdLogFile": f"{log}/slurmd-%n.log",
            "DefMemPerCPU": str(self.memory_mib // self.cpus),
        }
        lines = [
            f"{key}={value}" for key, value in (SETTINGS | places | dict(self.extra_conf)).items()
        ]
        size = f"CPUs={self.cpus} RealMemory={self.memory_mib} Gres=gpu:h200:{self.gpus}"
        for node in range(1, self.nodes + 1):
            lines.append(
                f"NodeName=node{node} NodeAddr=127.0.0.{10 + node} Port={port + node} {size}"
            )
        limits = f"Nodes={names} MaxTime=30-00:00:00 DefaultTime=10"
        lines.append(
            f"PartitionName=train {limits} Default=YES PriorityTier=10 PreemptMode=REQUEUE"
            " GraceTime=0"
        )
        lines.append(f"PartitionName=urgent {limits} PriorityTier=100 PreemptMode=OFF")
        etc, dev = self.directory / "etc", self.directory / "dev"
        self.conf.write_text("\n".join(lines) + "\n")
        for gpu in range(self.gpus):
            (dev / f"nvidia{gpu}").symlink_to("/dev/null")
        gpus = f"NodeName={names} Name=gpu Type=h200 File={dev}/nvidia[0-{self.gpus - 1}]\n"
        (etc / "gres.conf").write_text(gpus)
        (etc / "cgroup.conf").write_text("CgroupAutomount=no\n")
        nodes = "".join(f"127.0.0.{10 + node} node{node}\n" for node in range(1, self.nodes + 1))
        (etc / "hosts").write_text(Path("/etc/hosts").read_text() + nodes)


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that nobody listens on."""
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


@contextmanager
def running(lab: Lab) -> Iterator[Lab]:
    """Starts the cluster and ends it with the block, or with this process, `kill -9` included."""
    guard = [sys.executable, "-m", "tests.slurm.lab", "guard", str(lab.directory)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        guard, stdin=subprocess.PIPE, cwd=root, start_new_session=True
    ) as process:
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()
            process.communicate()


def main() -> None:
    """The commands named on top of this file."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.lab")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("start", "stop", "status", "guard"):
        commands.add_parser(name).add_argument("directory", type=lambda text: Path(text).resolve())
    for option, default in {"nodes": 4, "cpus": 16, "memory": 16_000, "gpus": 8}.items():
        commands.choices["start"].add_argument(f"--{option}", type=int, default=default)
    commands.choices["start"].add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE"
    )
    given = parser.parse_args()
    lab = Lab(given.directory)
    if given.command == "start":
        if reason := missing():
            sys.exit(f"error: {reason}")
        settings = dict(setting.split("=", 1) for setting in given.set)
        Lab(given.directory, given.nodes, given.cpus, given.memory, given.gpus, settings).start()
        print(f"export SLURM_CONF={lab.conf}")
    elif given.command == "status":
        print(f"export SLURM_CONF={lab.conf}")
        print(lab.command("sinfo", "-N", "-l") + lab.command("squeue", "-t", "all"))
    else:
        if given.command == "guard":
            sys.stdin.read()  # ends when the process that holds the other end does, however it ends
        lab.stop()


if __name__ == "__main__":
    main()
