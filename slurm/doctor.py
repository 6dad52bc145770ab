"""The doctor: checks on the submitting machine, then a small job that checks the nodes.

The job runs `python -m slurm.doctor DIRECTORY`, once, as the batch script's command. With srun it
starts the same with a second word: `node` on every node, `traffic` on every rank. NCCL's bandwidth:
not run on a GPU yet.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from base.environment import environment
from base.environment_in_words import differences_in_words, in_words
from base.errors import UserError
from base.files import take_lock, write_json
from base.gpus import check_fp32
from base.grouping import grouped
from base.processor import kind_of
from base.reading import read_json, read_model
from base.sharing import make_root
from slurm import cluster
from slurm.job import health
from slurm.job.rendezvous import torchrun_of_nodes
from slurm.site import KINDS, Site
from slurm.submission.script import allocation_options, forget, on_every_node, preamble, srun_prefix
from slurm.submission.submit import check_start
from study.step import torchrun

POLL_SECONDS = 2.0
JOB_MINUTES = 10
FIRST_JSON = "checks-first.json"  # of the batch script; no node is called so
NODES = 2  # at most; what holds between two holds between all
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
NEEDS = """\
what a site has to allow:
  - root on a filesystem that all nodes and this machine see, with flock across them
  - sbatch and squeue on compute nodes; else keep 'status NAME --watch 60' running here
  - srun inside a batch job, and --signal before the time limit
  - connections between the nodes of a job, at any port
  - for preempted jobs: PreemptMode=REQUEUE; after CANCEL they come back by 'status --watch' alone
  - interpreter, project and image readable on every node; no network is needed there"""
PROCESSOR = "processor of"  # begins the name of the check that names a node's
ONE_KIND = "other CPUs and GPUs round otherwise: let `constraint` in the site file choose one kind"
KINDS_SHOWN = 4
SRUN_SECONDS = 240
# What srun adds to the error of a task: that it, and therefore the step, has ended.
ENDS = re.compile(r"srun: .*(Exited with|Terminat|Killed|aborted)|slurmstepd.*\*\*\*|Try ")
TRAFFIC_BYTES, REPEATS = 64 << 20, 5


class Check(NamedTuple):
    """A check of the cluster: its name, its problem if it failed, and what was seen."""

    name: str
    problem: str | None  # and what to do; None: passed
    detail: str = ""
    warns: bool = False  # the detail is to be known before a study, and stops none

    def __str__(self) -> str:
        """Return the line that is printed: ok, warn or FAIL, the name, the problem or detail."""
        if self.problem:
            return f"FAIL {self.name}: {self.problem}"
        return f"{'warn' if self.warns else 'ok  '} {self.name}{self.detail and f': {self.detail}'}"


def lines_of(checks: list[Check], *, whole: bool) -> list[str]:
    """Return the verdict, problems and warnings, then the checks that passed or their number."""
    failed = sum(check.problem is not None for check in checks)
    verdict = f"{failed} problem{'s' * (failed > 1)}; correct before submitting a study"
    ordered = sorted(checks, key=lambda check: (not check.problem, not check.warns))
    shown = [check for check in ordered if whole or check.problem or check.warns]
    more = f"ok   {len(checks) - len(shown)} more checks; --all lists them, and what a site needs"
    return [verdict if failed else "ready", *map(str, shown), NEEDS if whole else more]


def visit(site: Site, wait_seconds: int) -> Iterator[Check]:
    """Yield check after check; those of nodes from one job, which is cancelled if it never starts.

    Raises:
        UserError: the root cannot be used, or SLURM refuses the job.
    """
    yield from checks_here(site)
    make_root(site.root, site.group)
    directory = Path(tempfile.mkdtemp(prefix=".doctor-", dir=site.root))
    try:
        with (directory / "lock").open("a") as lock:
            take_lock(lock)  # which the job must not get
            yield from _job(site, directory, wait_seconds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def checks_here(site: Site) -> Iterator[Check]:
    """Yield the checks of the submitting machine."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    problem = f"{', '.join(missing)} not on PATH; use a login node" if missing else None
    yield Check("SLURM's commands", problem)
    try:
        check_start(site)
        yield Check("interpreter and project", None, f"{site.python}, {site.project}")
    except UserError as error:
        yield Check("interpreter and project", str(error))
    yield Check("options of srun", None, srun_options_in_words(site))
    if missing:
        return
    yield Check("array size", None, f"MaxArraySize {cluster.max_array_size()}")
    lines = cluster.partitions(site.resources_of("train").partition).values()
    cancels = any("PreemptMode=CANCEL" in line for line in lines)
    warning = "CANCEL: preempted jobs need 'status --watch'" if cancels else ""
    yield Check("preemption", None, warning, cancels)
    yield from _kinds_of_nodes(site)


def _kinds_of_nodes(site: Site) -> Iterator[Check]:
    """Yield a warning for each partition of the site with nodes that differ, by what SLURM knows.

    Of a constraint only names joined by & are followed: else all nodes of the partition count.
    """
    resources = map(site.resources_of, KINDS)
    for partition, constraint in dict.fromkeys(
        (own.partition, own.constraint) for own in resources
    ):
        nodes = cluster.nodes_in(partition)
        features = set(constraint.split("&")) if constraint else set()
        fitting = [node for node in nodes if features <= _features(node)]
        kinds = grouped(fitting or nodes, _kind_of_node)
        if len(kinds) > 1:
            each = [f"{len(same)} of {kind}" for kind, same in kinds.items()]
            more = f"; and {len(each) - KINDS_SHOWN} more kinds" if len(each) > KINDS_SHOWN else ""
            words = "; ".join(each[:KINDS_SHOWN]) + more
            name = f"nodes of {partition or 'the default partition'}"
            yield Check(name, None, f"{words}; {ONE_KIND}", warns=True)


def _features(node: dict[str, str]) -> set[str]:
    return set(node.get("AvailableFeatures", "").split(",")) - {"", "(null)"}


def _kind_of_node(node: dict[str, str]) -> str:
    """Return in words the kind of a node: CPUs, types of GPUs and features."""
    cores = f"{node['Sockets']} x {node['CoresPerSocket']} cores"
    gpus = re.findall(r"gpu:[A-Za-z][\w.-]*", node.get("Gres", ""))
    return " ".join((node["Arch"], cores, *gpus, *sorted(_features(node))))


def srun_options_in_words(site: Site) -> str:
    """Return the site's own options of srun, by the kinds of jobs that have them."""
    kinds_by_options = grouped(
        KINDS, lambda kind: " ".join(site.resources_of(kind).srun_options or ("none",))
    )
    if len(kinds_by_options) == 1:
        return next(iter(kinds_by_options))
    return "; ".join(f"{', '.join(kinds)}: {words}" for words, kinds in kinds_by_options.items())


def _job(site: Site, directory: Path, wait_seconds: int) -> Iterator[Check]:
    """Yield what the job finds."""
    script, log = directory / "job.sh", directory / "job.log"
    nodes = min(NODES, site.resources_of("train").nodes)
    options = allocation_options(site, "train", nodes=nodes)
    options += ["--job-name=quantdyn.doctor", f"--output={log}", f"--time={JOB_MINUTES}"]
    site_json = directory / "site.json"
    write_json(site_json, site.model_dump(mode="json"))
    command = shlex.join([str(site.python), "-m", "slurm.doctor", str(directory)])
    lines = [f"#SBATCH {option}" for option in options]
    script.write_text("\n".join(["#!/bin/bash", *lines, "", preamble(site, "train"), command, ""]))
    # An array of one element, since `cluster` asks about elements, as JOB_INDEX.
    job = str(cluster.submit(script, "0", f"quantdyn:{directory.name}")) + "_0"
    try:
        state = _wait(job, directory, wait_seconds)
    finally:
        cluster.cancel([job])
    if state:
        yield Check("a job on nodes", state)
        return
    paths = sorted(directory.glob("checks-*.json"))
    checks = [Check(*values) for path in paths for values in read_json(path)]
    yield from checks
    kinds = {check.detail for check in checks if check.name.startswith(PROCESSOR)}
    if len(kinds) > 1:
        yield Check("kinds of processors", None, f"these nodes differ; {ONE_KIND}", warns=True)
    if not (directory / FIRST_JSON).exists():
        tail = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else ["no log"]
        yield Check("a job on nodes", f"it ended early: {' | '.join(tail)}")


def _wait(job: str, directory: Path, seconds: int) -> str | None:
    """Return why the job has not ended in time, if it has not."""
    deadline = time.monotonic() + seconds
    while True:
        state = cluster.states([job]).get(job)
        # The report may be there before SLURM says that the job has ended.
        if state is None or state.has_ended or (directory / FIRST_JSON).exists():
            return None
        if time.monotonic() > deadline:
            # Still waiting: what SLURM itself expects helps to choose --wait.
            expected = f"; SLURM expects it to start at {state.starts}" if state.starts else ""
            return (
                f"{state.state}, {state.reason} after {seconds} s{expected}; give --wait more, or"
                " other resources in [resources.train]"
            )
        time.sleep(POLL_SECONDS)


def first(directory: Path) -> Iterator[Check]:
    """Yield what is checked once; start what is checked on every node."""
    site = read_model(Site, directory / "site.json")
    nodes = cluster.expand(os.environ["SLURM_JOB_NODELIST"])
    yield _slurm_from_here(directory)
    everywhere = on_every_node(len(nodes))
    prefix, python = srun_prefix(site, "train", everywhere), site.measuring_python
    seconds, failure = _run([*prefix, "true"])
    yield Check("srun, image unpacked", failure, f"{seconds:.0f} s")
    health.write_clock(directory)
    # A node that fails does not end the others: all are to be heard.
    each = srun_prefix(site, "train", ("--kill-on-bad-exit=0", *everywhere))
    seconds, failure = _run([*each, python, "-m", "slurm.doctor", str(directory), "node"])
    reporting = [node for node in nodes if (directory / f"checks-{node}.json").exists()]
    if missing := [node for node in nodes if node not in reporting]:
        failure = f"no report of {', '.join(missing)}: root is not there, or {failure}"
    yield Check("root on every node", failure, ", ".join(reporting))
    ranks = site.resources_of("train").ranks
    launch = torchrun(ranks)
    if len(nodes) > 1:
        launch = torchrun_of_nodes(site.nccl.address, len(nodes), ranks, "doctor")
    launch = (python, *launch[1:], "-m", "slurm.doctor", str(directory), "traffic")
    seconds, failure = _run([*prefix, *launch])
    # Written by rank 0 alone, at the end: without it there was no all-reduce.
    figure = directory / "traffic.json"
    detail = read_json(figure) if figure.exists() else "no figure"
    yield Check("all-reduce between all ranks", failure, f"{detail}, start {seconds:.0f} s")
    _run(["bash", "-c", forget(site)])


def _slurm_from_here(directory: Path) -> Check:
    try:
        cluster.check(directory / "job.sh")
        cluster.states([f"{os.environ['SLURM_JOB_ID']}_0"])
    except UserError as error:
        return Check("sbatch and squeue from a node", f"{error}: keep 'status --watch' running")
    return Check("sbatch and squeue from a node", None)


def _run(command: list[str]) -> tuple[float, str | None]:
    """Return the seconds of a command, and what it said last if it failed."""
    began_at = time.monotonic()
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SRUN_SECONDS
        )
    except subprocess.TimeoutExpired:
        return SRUN_SECONDS, f"no end within {SRUN_SECONDS} s"
    print(process.stdout, process.stderr, flush=True)
    lines = [line for line in process.stderr.splitlines() if line.strip()] or ["without a word"]
    errors = [line for line in lines if not ENDS.match(line)] or lines
    return time.monotonic() - began_at, errors[-1][:200] if process.returncode else None


def node(directory: Path) -> Iterator[Check]:
    """Yield the checks of this node."""
    name = os.environ["SLURMD_NODENAME"]
    began_at = time.monotonic()
    try:
        for module in ("torch", "transformers", "mlflow"):
            importlib.import_module(module)
        problem = None
    except ImportError as error:
        problem = f"{error}; install the project there, or correct python or the image"
    yield Check(f"imports on {name}", problem, f"{time.monotonic() - began_at:.0f} s")
    if not problem:
        yield from _software(name)
    yield _lock(directory, name)
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    unfit = "; ".join(health.check_node(directory, name, gpus))
    yield Check(f"clock, disk, memory and GPUs of {name}", unfit or None, f"{gpus} GPUs")
    free_gb = shutil.disk_usage(directory).free / 1e9
    yield Check(f"disk from {name}", None, f"{free_gb:,.0f} GB free below root")


def _software(name: str) -> Iterator[Check]:
    """Yield which software this node has, a fact, and whether fp32 is fp32, a check."""
    here = environment()
    yield Check(f"{PROCESSOR} {name}", None, kind_of(here) or "")
    yield Check(f"software on {name}", None, in_words(here))
    yield Check(f"versions on {name}", None, differences_in_words(here))
    try:
        check_fp32()
        yield Check(f"fp32 on {name}", None)
    except UserError as error:
        yield Check(f"fp32 on {name}", str(error))


def _lock(directory: Path, name: str) -> Check:
    """Check that a lock which the submitting machine holds is held for this node."""
    try:
        with (directory / "lock").open("a") as lock:
            free = take_lock(lock)
    except (UserError, OSError) as error:
        return Check(f"locks on {name}", str(error))
    local = "a lock of the submitting machine is not seen; mount root with flock for all nodes"
    return Check(f"locks on {name}", local if free else None)


def traffic(directory: Path) -> None:
    """Measure an all-reduce over all ranks; rank 0 writes the figure."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    numbers = torch.ones(TRAFFIC_BYTES // 4, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(numbers)  # connects
    began_at = time.monotonic()
    for _ in range(REPEATS):
        dist.all_reduce(numbers)
    if on_gpu:
        torch.cuda.synchronize()
    seconds, ranks = (time.monotonic() - began_at) / REPEATS, dist.get_world_size()
    # Of a ring, each rank sends and receives that share of the bytes twice.
    bandwidth = 2 * (ranks - 1) / ranks * TRAFFIC_BYTES / seconds / 1e9
    if dist.get_rank() == 0:
        words = f"{bandwidth:.2f} GB/s a rank over {ranks} ranks by {dist.get_backend()}"
        write_json(directory / "traffic.json", words)
    dist.destroy_process_group()


def main() -> None:
    """Write the checks of the job or of this node, or measure the traffic between all ranks."""
    directory = Path(sys.argv[1])
    match sys.argv[2:]:
        case ["traffic"]:
            traffic(directory)
        case ["node"]:
            name = os.environ["SLURMD_NODENAME"]
            write_json(directory / f"checks-{name}.json", list(node(directory)))
        case _:
            write_json(directory / FIRST_JSON, list(first(directory)))


if __name__ == "__main__":
    main()
