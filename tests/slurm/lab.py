"""A SLURM cluster on one machine for the tests: munged, slurmctld and a slurmd for each node, in
one directory, and with accounting MariaDB and slurmdbd.

Every node is a PID, mount and UTS namespace: it has its own host name and process numbers, and dies
as one. Nodes share the file system, but not what is mounted on it after they started. GPUs are
links to /dev/null. Needs root; no systemd, no cgroups, nothing written outside the directory. By
hand:

    python -m tests.slurm.lab start DIR [--nodes N] [--cpus N] [--memory MIB] [--gpus N]
        [--accounting] [--set MaxArraySize=5]
    python -m tests.slurm.lab status|stop DIR
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm import accounting
from tests.slurm.accounting import Accounting
from tests.slurm.daemons import Daemon, free_ports
from tests.waiting import HANG_SECONDS, wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter", *accounting.NEEDED)
PACKAGES = "slurm-wlm munge slurm-client slurmdbd slurm-wlm-mysql-plugin mariadb-server"
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
# All have every node. A job of `urgent` preempts those of the others, each in its own way.
PARTITIONS = {
    "train": "Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=0",
    "grace": "PriorityTier=10 PreemptMode=REQUEUE GraceTime=15",
    "spot": "PriorityTier=10 PreemptMode=CANCEL GraceTime=15",
    "urgent": "PriorityTier=100 PreemptMode=OFF",
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
            return f"{program} is not installed (apt-get install {PACKAGES})"
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
        accounting: keeps accounts and enforces limits, as most sites do; the start then takes 4 s,
            not 0.2 s.
    """

    directory: Path
    nodes: int = 4
    cpus: int = 16
    memory_mib: int = 16_000
    gpus: int = 8
    extra_conf: Mapping[str, str] = field(default_factory=dict)
    accounting: bool = False

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
        if self.accounting:
            self._accounting.start()
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
            self._daemon(pid_file.stem).end(signal.SIGTERM if soft else signal.SIGKILL)

    def kill_node(self, node: int, *, orphans: bool = False) -> None:
        """The node is lost: all its processes are gone, or with `orphans` only slurmd, while its
        steps continue unseen.
        """
        if orphans:
            slurmd = (self.directory / f"run/slurmd-node{node}.inside").read_text().strip()
            self.inside(node, "kill", "-KILL", slurmd)
        else:
            self._daemon(f"node{node}").end()

    def start_node(self, node: int) -> None:
        """Brings a lost node back and waits until SLURM uses it again; its orphans, if it has
        any, are still there.
        """
        self._start_slurmd(node)
        wait_until(
            lambda: self.node_states(node) in (["idle"], ["allocated"], ["mixed"]),
            f"node{node} back",
        )

    def restart_controller(self) -> None:
        """Ends slurmctld and starts it again, as for a new slurm.conf; jobs continue meanwhile."""
        self._daemon("slurmctld").end(signal.SIGTERM)
        self.command("slurmctld", "-f", str(self.conf))
        self.node_states()  # answered when it is up: SLURM's commands try again

    def stop_accounting(self) -> None:
        """Takes slurmdbd down, as for maintenance; slurmctld keeps for it what happens."""
        self._daemon("slurmdbd").end(signal.SIGTERM)

    def start_accounting(self) -> None:
        """Brings slurmdbd back; slurmctld finds it again within 20 s."""
        self._accounting.start_slurmdbd()

    def limit_submissions(self, count: int) -> None:
        """Lets each user have so many jobs and elements in the queue; -1 lifts the limit."""
        self._accounting.limit_submissions(count)

    def node_states(self, *nodes: int) -> list[str]:
        """Return the states of these nodes, or of all, in order: idle, mixed, allocated, down*."""
        chosen = [f"node{node}" for node in nodes or range(1, self.nodes + 1)]
        shown = dict(
            line.split()
            for line in self.command("sinfo", "-h", "-N", "-p", "train", "-o", "%N %T").splitlines()
        )
        return [shown[name] for name in chosen]

    def inside(self, node: int, *arguments: str) -> str:
        """Return the output of a command on the node, outside of any job, such as `pkill -f NAME`."""
        init = (self.directory / f"run/node{node}.pid").read_text().strip()
        return self.command("nsenter", f"--target={init}", *NAMESPACES, *arguments)

    def command(self, *arguments: str) -> str:
        """Return the output of a command with this cluster's SLURM_CONF.

        Raises RuntimeError if it fails; its stderr is in log/commands.log.
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

    @property
    def _accounting(self) -> Accounting:
        return Accounting(self.directory, self.command)

    def _daemon(self, name: str) -> Daemon:
        return Daemon(self.directory, name)

    def _start_slurmd(self, node: int) -> None:
        """Starts the node's slurmd, and its namespaces before where they are gone."""
        name = f"node{node}"
        if not self._daemon(name).number():
            init = ["bash", "-c", NODE_INIT, "node", str(self.directory), name]
            with (self.directory / f"log/{name}.log").open("a") as log:
                launch = ["setsid", "--fork", "unshare", *NAMESPACES, "--fork", *init]
                subprocess.run(launch, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
            wait_until(self._daemon(name).number, f"namespaces of {name}")
        # slurmd raises its limit of core dumps to what it may, and jobs inherit it: a killed rank
        # would leave one.
        start = 'ulimit -c 0; exec slurmd -f "$0" -N "$1"'
        self.inside(node, "bash", "-c", start, str(self.conf), name)

    def _write_configuration(self) -> None:
        names, log, run = f"node[1-{self.nodes}]", self.directory / "log", self.directory / "run"
        port = free_ports(self.nodes + 2)  # slurmctld, the nodes, slurmdbd
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
        if self.accounting:
            places |= self._accounting.write_configuration(port + self.nodes + 1)
        lines = [
            f"{key}={value}" for key, value in (SETTINGS | places | dict(self.extra_conf)).items()
        ]
        size = f"CPUs={self.cpus} RealMemory={self.memory_mib} Gres=gpu:h200:{self.gpus}"
        for node in range(1, self.nodes + 1):
            lines.append(
                f"NodeName=node{node} NodeAddr=127.0.0.{10 + node} Port={port + node} {size}"
            )
        limits = f"Nodes={names} MaxTime=30-00:00:00 DefaultTime=10"
        lines += [f"PartitionName={name} {limits} {own}" for name, own in PARTITIONS.items()]
        etc, dev = self.directory / "etc", self.directory / "dev"
        self.conf.write_text("\n".join(lines) + "\n")
        for gpu in range(self.gpus):
            (dev / f"nvidia{gpu}").symlink_to("/dev/null")
        gpus = f"NodeName={names} Name=gpu Type=h200 File={dev}/nvidia[0-{self.gpus - 1}]\n"
        (etc / "gres.conf").write_text(gpus)
        (etc / "cgroup.conf").write_text("CgroupAutomount=no\n")
        nodes = "".join(f"127.0.0.{10 + node} node{node}\n" for node in range(1, self.nodes + 1))
        (etc / "hosts").write_text(Path("/etc/hosts").read_text() + nodes)


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
    commands.choices["start"].add_argument("--accounting", action="store_true")
    given = parser.parse_args()
    lab = Lab(given.directory)
    if given.command == "start":
        if reason := missing():
            sys.exit(f"error: {reason}")
        settings = dict(setting.split("=", 1) for setting in given.set)
        size = (given.nodes, given.cpus, given.memory, given.gpus)
        Lab(given.directory, *size, settings, given.accounting).start()
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
