"""The doctor: checks on the submitting machine, then a small job that checks the nodes."""

import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from base.errors import UserError
from base.files import take_lock, write_json
from base.reading import read_json
from slurm import cluster
from slurm.site import Site
from slurm.submission.script import allocation_options, preamble
from slurm.submission.submit import check_start

POLL_SECONDS = 2.0
JOB_MINUTES = 10
NODES = 2  # at most; what holds between two holds between all
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
NEEDS = """\
what a site has to allow:
  - root on a filesystem that all nodes and this machine see, with flock across them
  - sbatch, squeue and scontrol on compute nodes; else keep 'status NAME --watch 60' running here
  - srun inside a batch job, and --signal before the time limit
  - connections between the nodes of a job, at any port
  - for preempted jobs: PreemptMode=REQUEUE; after CANCEL they come back by 'status --watch' alone
  - interpreter, project and image readable on every node; no network is needed there"""


class Check(NamedTuple):
    """One check."""

    name: str
    problem: str | None  # and what to do; None: passed
    detail: str = ""

    def __str__(self) -> str:
        """Return its line."""
        if self.problem:
            return f"FAIL {self.name}: {self.problem}"
        return f"ok   {self.name}{self.detail and f': {self.detail}'}"


def visit(site: Site, wait_seconds: int) -> Iterator[Check]:
    """Yield check after check; those of nodes from one job, which is cancelled if it never starts.

    Raises:
        UserError: the root cannot be used, or SLURM refuses the job.
    """
    yield from checks_here(site)
    site.root.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".doctor-", dir=site.root))
    try:
        with (place / "lock").open("a") as lock:
            take_lock(lock)  # which the job must not get
            yield from _job(site, place, wait_seconds)
    finally:
        shutil.rmtree(place, ignore_errors=True)


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
    if missing:
        return
    yield Check("array size", None, f"MaxArraySize {cluster.max_array_size()}")
    partition = site.resources_of("train").partition
    cancels = partition and "PreemptMode=CANCEL" in cluster.partition(partition)
    yield Check(
        "preemption", None, "CANCEL: preempted jobs need 'status --watch'" if cancels else ""
    )


def _job(site: Site, place: Path, wait_seconds: int) -> Iterator[Check]:
    """Yield what the job finds."""
    script, log = place / "job.sh", place / "job.log"
    nodes = min(NODES, site.resources_of("train").nodes)
    options = allocation_options(site, "train", nodes=nodes)
    options += ["--job-name=quantdyn.doctor", f"--output={log}", f"--time={JOB_MINUTES}"]
    site_json = place / "site.json"
    write_json(site_json, site.model_dump(mode="json"))
    command = shlex.join([str(site.python), "-m", "slurm.doctor.job", str(place)])
    lines = [f"#SBATCH {option}" for option in options]
    script.write_text("\n".join(["#!/bin/bash", *lines, "", preamble(site, "train"), command, ""]))
    job = str(cluster.submit(script, "0", f"quantdyn:{place.name}")) + "_0"
    try:
        state = _wait(job, place, wait_seconds)
    finally:
        cluster.cancel([job])
    if state:
        yield Check("a job on nodes", state)
        return
    for path in sorted(place.glob("checks-*.json")):
        for values in read_json(path):
            yield Check(*values)
    if not (place / "checks-first.json").exists():
        tail = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else ["no log"]
        yield Check("a job on nodes", f"it ended early: {' | '.join(tail)}")


def _wait(job: str, place: Path, seconds: int) -> str | None:
    """Return why the job has not ended in time, if it has not."""
    deadline = time.monotonic() + seconds
    while True:
        state = cluster.states([job]).get(job)
        if state is None or state.has_ended or (place / "checks-first.json").exists():
            return None
        if time.monotonic() > deadline:
            expected = f"; SLURM expects it to start at {state.starts}" if state.starts else ""
            return (
                f"{state.state}, {state.reason} after {seconds} s{expected}; give --wait more, or"
                " other resources in [resources.train]"
            )
        time.sleep(POLL_SECONDS)
