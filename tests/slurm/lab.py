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
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import HANG_SECONDS, wait_until

# Below the directory: a longer name of a Unix socket has jobs fail at their launch.
LONGEST_SOCKET = "/spool/node10/node10_10000.4294967291"
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
    """The process `name` of the lab in `directory`, by the number in run/NAME.pid."""

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
            command_line = _command_line(Path(f"/proc/{number}"))
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
        log = self.directory / f"log/{self.name}.out"
        assert self.number(), f"{self.name} ended: {log.read_text()[-2000:]}"

    def end(self, sent: signal.Signals = signal.SIGKILL) -> None:
        """End it with this signal, and with SIGKILL if it takes too long."""
        end = time.monotonic() + SOFT_SECONDS
        while number := self.number():
            with suppress(ProcessLookupError):
                os.kill(number, sent if time.monotonic() < end else signal.SIGKILL)
            time.sleep(0.05)
        self.pid_file.unlink(missing_ok=True)


def _command_line(process: Path) -> bytes:
    """Return the command line of a process in /proc; empty for one that has ended."""
    while not (words := (process / "cmdline").read_bytes()):
        state = (process / "stat").read_text().rpartition(") ")[2][0]
        # Empty also while `exec` exchanges the program: that is at work or waits for the disk.
        if state not in "RD":
            break
    return words


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


# Small, and nothing of it has to survive the machine; slurmdbd asks for the wait of 900 s.
DATABASE = """
    --no-defaults --user=root --skip-networking --skip-name-resolve
    --innodb-buffer-pool-size=16M --innodb-log-file-size=4M --innodb-autoextend-increment=1
    --innodb-flush-method=nosync --skip-innodb-doublewrite --sync-frm=0
    --innodb-lock-wait-timeout=900 --skip-innodb-use-native-aio
"""
ACCOUNTS = """\
Cluster - 'lab'
Parent - 'root'
Account - 'research'
Parent - 'research'
User - 'root':DefaultAccount='research'
"""  # every association has the QOS `normal`


@dataclass(frozen=True)
class Accounting:
    """The accounts of the lab in `directory`: MariaDB, slurmdbd and a QOS with limits.

    As production sites keep them. MariaDB listens on a socket there, on no port, and lets in none
    but the system's root. `command` runs the lab's commands.
    """

    directory: Path
    command: Callable[..., str]

    def write_configuration(self, port: int) -> dict[str, str]:
        """Write slurmdbd.conf, and return what slurm.conf has to say of it."""
        munge = f"{self.directory}/run/munge.sock"
        settings = {
            "DbdHost": "localhost",
            "DbdPort": str(port),
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={munge}",
            "PidFile": f"{self.directory}/run/slurmdbd.own",  # `Daemon` has its own
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost",
            "StorageUser": "root",
            "StorageLoc": "accounts",
        }
        conf = self.directory / "etc/slurmdbd.conf"  # slurmdbd looks for it beside SLURM_CONF
        conf.touch(mode=0o600)
        conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        return {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "localhost",
            "AccountingStoragePort": str(port),
            "AccountingStoragePass": munge,
            "AccountingStorageEnforce": "associations,limits,qos",
        }

    def start(self) -> None:
        """Start both, with the cluster, its account and the user root; munged has to run."""
        data = self.directory / "database"
        options = [*DATABASE.split(), f"--datadir={data}"]
        self.command("mariadb-install-db", *options, "--skip-test-db")
        # A database is a directory. A slurmdbd that has to create it ends, with Connector/C 3.4.10.
        (data / "accounts").mkdir()
        database = Daemon(self.directory, "mariadbd")
        database.start("mariadbd", *options, f"--socket={self._socket}")
        database.wait_until_ready(self._database_listens)

        self.start_slurmdbd()
        accounts = self.directory / "etc/accounts"
        accounts.write_text(ACCOUNTS)
        self._sacctmgr("load", f"file={accounts}")  # one call for each takes longer

    def start_slurmdbd(self) -> None:
        """Start slurmdbd and wait until it answers."""
        variables = {
            "SLURM_CONF": str(self.directory / "etc/slurm.conf"),
            # The only way to tell it: slurmdbd.conf has no option for the database's socket.
            "MYSQL_UNIX_PORT": self._socket,
        }
        slurmdbd = Daemon(self.directory, "slurmdbd")
        slurmdbd.start("slurmdbd", "-D", **variables)
        slurmdbd.wait_until_ready(self._slurmdbd_answers)

    def limit_submissions(self, count: int) -> None:
        """Set how many jobs a user may have; slurmctld knows of it when this returns."""
        limit = f"MaxSubmitJobsPerUser={count}"
        self._sacctmgr("modify", "qos", "normal", "set", limit)

    def _sacctmgr(self, *arguments: str) -> str:
        return self.command("sacctmgr", "--immediate", *arguments)

    @property
    def _socket(self) -> str:
        return f"{self.directory}/run/mariadbd.sock"

    def _database_listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(self._socket) == 0

    def _slurmdbd_answers(self) -> bool:
        try:
            return bool(self._sacctmgr("show", "qos"))
        except RuntimeError:
            return False


NEEDED = (
    *("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter"),
    *("mariadb-install-db", "mariadbd", "slurmdbd", "sacctmgr"),
)
PACKAGES = "slurm-wlm munge slurm-client slurmdbd slurm-wlm-mysql-plugin mariadb-server"
NAMESPACES = ("--pid", "--mount", "--uts")
SETTINGS = """
    ClusterName=lab SlurmctldHost=localhost(127.0.0.1) SlurmUser=root SlurmdUser=root
    AuthType=auth/munge CredType=cred/munge ProctrackType=proctrack/linuxproc TaskPlugin=task/none
    JobAcctGatherType=jobacct_gather/none AccountingStorageType=accounting_storage/none
    MpiDefault=none SwitchType=switch/none PropagateResourceLimits=NONE
    SelectType=select/cons_tres SelectTypeParameters=CR_CPU_Memory SchedulerType=sched/backfill
    SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1,requeue_delay=1
    PreemptType=preempt/partition_prio PreemptMode=REQUEUE EnforcePartLimits=ALL MaxArraySize=6001
    SlurmdTimeout=10 SlurmctldTimeout=10 KillWait=5 MinJobAge=3600 ReturnToService=2
    SlurmdParameters=config_overrides GresTypes=gpu
"""
# All have every node. A job of `urgent` preempts those of the others, each in its own way.
PARTITIONS = {
    "train": "Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=0",
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
    if namespaces.returncode:
        return "this machine lets nobody make namespaces (a privileged container does)"
    return None


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
        """Return when every node is idle; TimeoutError otherwise, logs in `directory`/log."""
        if len(f"{self.directory}{LONGEST_SOCKET}") > 107:
            raise ValueError(f"{self.directory} is too long for Unix sockets below it")
        for name in ("etc", "log", "run", "state", "spool", "dev"):
            (self.directory / name).mkdir(parents=True)
        self._write_configuration()
        key, run = self.directory / "etc/munge.key", self.directory / "run"
        key.touch(mode=0o600)
        key.write_bytes(random.randbytes(128))
        munged = ["munged", f"--key-file={key}", f"--socket={run}/munge.sock"]
        munged += [f"--pid-file={run}/munged.pid", f"--seed-file={run}/munge.seed"]
        munged += [f"--log-file={self.directory}/log/munged.log", "--num-threads=2"]
        self.command(*munged, "--force")  # also below a directory that others may write to
        if self.accounting:
            self._accounting.start()
        self.command("slurmctld", "-f", str(self.conf))
        for node in range(1, self.nodes + 1):
            self._start_slurmd(node)
        idle = ["idle"] * self.nodes
        wait_until(lambda: self.node_states() == idle, f"all nodes of {self.directory} idle")

    def stop(self) -> None:
        """Ends every process of the cluster and of its jobs; nothing happens where none is left."""
        for pid_file in sorted((self.directory / "run").glob("*.pid")):
            soft = pid_file.stem in ("slurmctld", "munged")  # they remove what they left elsewhere
            self._daemon(pid_file.stem).end(signal.SIGTERM if soft else signal.SIGKILL)

    def kill_node(self, node: int, *, orphans: bool = False) -> None:
        """The node is lost: all its processes, or with `orphans` slurmd alone; steps go on."""
        if orphans:
            slurmd = (self.directory / f"run/slurmd-node{node}.inside").read_text().strip()
            self.inside(node, "kill", "-KILL", slurmd)
        else:
            self._daemon(f"node{node}").end()

    def start_node(self, node: int) -> None:
        """Brings a lost node back, orphans and all, and waits until SLURM uses it again."""
        self._start_slurmd(node)
        usable = (["idle"], ["allocated"], ["mixed"])
        wait_until(lambda: self.node_states(node) in usable, f"node{node} back")

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
        lines = self.command("sinfo", "-h", "-N", "-p", "train", "-o", "%N %T").splitlines()
        shown = dict(line.split() for line in lines)
        return [shown[f"node{node}"] for node in nodes or range(1, self.nodes + 1)]

    def inside(self, node: int, *arguments: str) -> str:
        """Return the output of a command on the node, outside of any job, such as `pkill -f NAME`."""
        init = (self.directory / f"run/node{node}.pid").read_text().strip()
        return self.command("nsenter", f"--target={init}", *NAMESPACES, *arguments)

    def command(self, *arguments: str) -> str:
        """Return the output of a command with this cluster's SLURM_CONF.

        Raises RuntimeError, with the end of its stderr, if it fails.
        """
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        # a daemon would hold a pipe open
        with (self.directory / "log/commands.log").open("a+") as log:
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
            ended = subprocess.run(arguments, **streams, env=environment, timeout=HANG_SECONDS)
        if ended.returncode:
            said = Path(log.name).read_text(errors="replace")[-2000:] + ended.stdout[-2000:]
            raise RuntimeError(f"{' '.join(arguments)}: exit code {ended.returncode}\n{said}")
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
        settings = {
            "SlurmctldPort": str(port),
            # by default a requeued job waits two minutes
            "AuthInfo": f"socket={run}/munge.sock,cred_expire=5",
            "StateSaveLocation": f"{self.directory}/state",
            "SlurmdSpoolDir": f"{self.directory}/spool/%n",
            "SlurmctldPidFile": f"{run}/slurmctld.pid",
            # its number inside the node: stop() must not take it
            "SlurmdPidFile": f"{run}/slurmd-%n.inside",
            "SlurmctldLogFile": f"{log}/slurmctld.log",
            "SlurmdLogFile": f"{log}/slurmd-%n.log",
            "DefMemPerCPU": str(self.memory_mib // self.cpus),
        }
        if self.accounting:
            settings |= self._accounting.write_configuration(port + self.nodes + 1)
        usual = dict(setting.split("=", 1) for setting in SETTINGS.split())
        settings = usual | settings | dict(self.extra_conf)
        lines = [f"{key}={value}" for key, value in settings.items()]
        size = f"CPUs={self.cpus} RealMemory={self.memory_mib} Gres=gpu:h200:{self.gpus}"
        lines += [
            f"NodeName=node{node} NodeAddr=127.0.0.{10 + node} Port={port + node} {size}"
            for node in range(1, self.nodes + 1)
        ]
        limits = f"Nodes={names} MaxTime=30-00:00:00 DefaultTime=10"
        lines += [f"PartitionName={name} {limits} {rules}" for name, rules in PARTITIONS.items()]
        etc, dev = self.directory / "etc", self.directory / "dev"
        self.conf.write_text("\n".join(lines) + "\n")
        for gpu in range(self.gpus):
            (dev / f"nvidia{gpu}").symlink_to("/dev/null")
        gpus = f"NodeName={names} Name=gpu Type=h200 File={dev}/nvidia[0-{self.gpus - 1}]\n"
        (etc / "gres.conf").write_text(gpus)
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
