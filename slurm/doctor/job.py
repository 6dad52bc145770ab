"""The doctor on the nodes of its job: `python -m slurm.doctor.job PLACE [node | traffic]`.

Without a second word it runs once, as the batch script's command, and starts the other two with
srun: `node` on every node, `traffic` on every rank. NCCL's bandwidth: not run on a GPU yet.
"""

import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from base.environment import environment
from base.errors import UserError
from base.files import take_lock, write_json
from base.gpus import check_fp32
from base.reading import read_json, read_model
from slurm import cluster
from slurm.doctor.software import differences_in_words, in_words
from slurm.doctor.visit import Check
from slurm.job import health
from slurm.job.rendezvous import torchrun_of_nodes
from slurm.site import Site
from slurm.submission.script import on_every_node, srun_prefix
from study.pipeline.step import torchrun

SRUN_SECONDS = 240
TRAFFIC_BYTES, REPEATS = 64 << 20, 5


def first(place: Path) -> Iterator[Check]:
    """Yield what is checked once; start what is checked on every node."""
    site = read_model(Site, place / "site.json")
    nodes = cluster.hostnames(os.environ["SLURM_JOB_NODELIST"])
    yield _slurm_from_here(place)
    everywhere = on_every_node(len(nodes))
    prefix, python = srun_prefix(site, "train", everywhere), site.measuring_python
    seconds, failure = _run([*prefix, "true"])
    yield Check("srun, image unpacked", failure, f"{seconds:.0f} s")
    health.write_clock(place)
    # A node that fails does not end the others: all are to be heard.
    each = srun_prefix(site, "train", ("--kill-on-bad-exit=0", *everywhere))
    seconds, failure = _run([*each, python, "-m", "slurm.doctor.job", str(place), "node"])
    reporting = [node for node in nodes if (place / f"checks-{node}.json").exists()]
    if len(reporting) < len(nodes):
        missing = ", ".join(set(nodes) - set(reporting))
        failure = f"no report of {missing}: root is not there, or {failure}"
    yield Check("root on every node", failure, ", ".join(reporting))
    ranks = site.resources_of("train").ranks
    launch = torchrun(ranks)
    if len(nodes) > 1:
        launch = torchrun_of_nodes(site.nccl.address, len(nodes), ranks, "doctor")
    launch = (python, *launch[1:], "-m", "slurm.doctor.job", str(place), "traffic")
    seconds, failure = _run([*prefix, *launch])
    figure = place / "traffic.json"
    detail = read_json(figure) if figure.exists() else "no figure"
    yield Check("all-reduce between all ranks", failure, f"{detail}, start {seconds:.0f} s")


def _slurm_from_here(place: Path) -> Check:
    try:
        cluster.check(place / "job.sh")
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
    errors = [line for line in process.stderr.splitlines() if line.strip()] or ["without a word"]
    return time.monotonic() - began_at, errors[-1][:200] if process.returncode else None


def node(place: Path) -> Iterator[Check]:
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
    yield _lock(place, name)
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    unfit = "; ".join(health.check_node(place, name, gpus))
    yield Check(f"clock, disk, memory and GPUs of {name}", unfit or None, f"{gpus} GPUs")
    free_gb = shutil.disk_usage(place).free / 1e9
    yield Check(f"disk from {name}", None, f"{free_gb:,.0f} GB free below root")


def _software(name: str) -> Iterator[Check]:
    """Yield which software this node has, a fact, and whether fp32 is fp32, a check."""
    here = environment()
    yield Check(f"software on {name}", None, in_words(here))
    yield Check(f"versions on {name}", None, differences_in_words(here))
    try:
        check_fp32()
        yield Check(f"fp32 on {name}", None)
    except UserError as error:
        yield Check(f"fp32 on {name}", str(error))


def _lock(place: Path, name: str) -> Check:
    """Check that a lock which the submitting machine holds is held for this node."""
    try:
        with (place / "lock").open("a") as lock:
            free = take_lock(lock)
    except (UserError, OSError) as error:
        return Check(f"locks on {name}", str(error))
    local = "a lock of the submitting machine is not seen; mount root with flock for all nodes"
    return Check(f"locks on {name}", local if free else None)


def traffic(place: Path) -> None:
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
        write_json(place / "traffic.json", words)
    dist.destroy_process_group()


def main() -> None:
    """Run one of the three."""
    place, which = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "first"
    if which == "traffic":
        traffic(place)
        return
    name = os.environ["SLURMD_NODENAME"] if which == "node" else "first"
    checks = list(node(place) if which == "node" else first(place))
    write_json(place / f"checks-{name}.json", checks)


if __name__ == "__main__":
    main()
