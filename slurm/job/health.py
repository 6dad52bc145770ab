"""Health of a node: `python -m slurm.job.health OUT_DIR`, once per node by srun.

What is wrong goes to OUT_DIR/NODE.json. The exit code says nothing of the node's health: a bad one
must not end the check of the others.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from base.cli import run_command
from base.files import fsync_path, write_json
from base.frozen import Frozen
from base.reading import read_model

CLOCK_JSON = ".clock.json"  # no node is called so
CLOCK_SECONDS = 5.0
WRITE_BYTES, WRITE_SECONDS = 2**20, 60.0  # slow is no reason to lose a node, hanging is
MEMORY_GB = 1.0  # that the kernel could give to a process
NVIDIA_SMI_SECONDS = 60.0  # a GPU that has fallen off the bus lets it hang
MATRIX = 2048  # rows of the product that each GPU computes
FREE_SHARE = 0.9  # of a GPU's memory: what an orphan of another job holds is missing


class _Report(Frozen):
    """The health of a node, by the check on it."""

    node: str
    reasons: tuple[str, ...]
    time: float
    started: float | None  # the clock of the batch host as the node read it


def write_clock(out_dir: Path) -> None:
    """Write the time that no node's clock may be before; on the batch host, just before srun."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_json(out_dir / CLOCK_JSON, {"time": time.time()})


def _clock_of(out_dir: Path) -> float | None:
    try:
        return read_model(dict[str, float], out_dir / CLOCK_JSON)["time"]
    except FileNotFoundError:
        return None


def check_shared(out_dir: Path, node: str) -> Iterator[str]:
    """Check the shared filesystem by a file that is written, synced and read back."""
    path, content = out_dir / f".{node}.probe", os.urandom(WRITE_BYTES)
    begin = time.monotonic()
    # Synced, since the page cache of this node alone would take it and read it back.
    path.write_bytes(content)
    fsync_path(path)
    if path.read_bytes() != content:
        yield f"a file in {out_dir} does not read as it was written"
    seconds = time.monotonic() - begin
    if seconds > WRITE_SECONDS:
        yield f"1 MiB was written, synced and read in {seconds:.0f} s"
    path.unlink()


def check_clock(out_dir: Path) -> Iterator[str]:
    """Check that this clock is not behind the batch host's; `read_reports` bounds the rest."""
    clock = _clock_of(out_dir)
    if clock is None:
        yield f"no clock of the batch host in {out_dir}; is it really shared?"
    elif clock - time.time() > CLOCK_SECONDS:
        yield f"clock behind the batch host's by {clock - time.time():.0f} s"


def check_memory() -> Iterator[str]:
    """Check the memory that the kernel could give to a process now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024 / 1e9
    if free < MEMORY_GB:
        yield f"free memory {free:.1f} GB, at least {MEMORY_GB:.0f} expected"


def _refusal_of_nvidia_smi() -> str | None:
    """Return what nvidia-smi, where there is one, says if it fails or hangs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        process = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"nvidia-smi -L: no answer within {NVIDIA_SMI_SECONDS:.0f} s"
    message = (process.stdout + process.stderr).strip()
    return f"nvidia-smi -L: {message:.200}" if process.returncode else None


def check_gpus(gpus: int) -> Iterator[str]:
    """Check the GPUs that this task sees: free memory and a known product of matrices.

    Without GPUs expected, torch is not imported. Not run on a GPU yet.
    """
    if gpus == 0:
        return
    refusal = _refusal_of_nvidia_smi()
    if refusal:  # torch would hang as well
        yield refusal
        return
    import torch

    count = torch.cuda.device_count()
    if count < gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield f"GPUs seen: {count}, at least {gpus} expected (CUDA_VISIBLE_DEVICES={visible})"
    for index in range(count):
        device = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(device)
        if free < FREE_SHARE * total:
            yield f"GPU {index}: only {free / total:.0%} of its memory are free"
        ones = torch.ones(MATRIX, MATRIX, device=device)
        # Exact at any precision of the product: powers of two.
        wrong = int((ones @ ones != MATRIX).sum())
        if wrong:
            yield f"GPU {index}: {wrong} wrong elements of a product"


def check_node(out_dir: Path, node: str, gpus: int) -> list[str]:
    """Return what is wrong with this node."""
    checks = (check_clock(out_dir), check_shared(out_dir, node), check_memory(), check_gpus(gpus))
    return list(chain(*checks))


def read_reports(out_dir: Path, nodes: list[str]) -> dict[str, str]:
    """Return the reason by node of all that are unfit or left no report; after srun."""
    # All reports are written by `now`: one with a later time has a clock that is ahead.
    bad, now, clock = {}, time.time(), _clock_of(out_dir)
    for node in nodes:
        try:
            report = read_model(_Report, out_dir / f"{node}.json")
        except FileNotFoundError:
            bad[node] = (
                f"no report in {out_dir}: the check did not start there, hangs, or does not see"
                " that directory"
            )
            continue
        reasons, ahead = list(report.reasons), report.time - now
        if ahead > CLOCK_SECONDS:
            reasons.append(f"clock ahead of the batch host's by more than {ahead:.0f} s")
        # Attempts of one start share the directory; each check begins with another clock.
        if clock is not None and report.started != clock:
            reasons.append("the report is of an earlier check")
        if reasons:
            bad[node] = "; ".join(reasons)
    return bad


def _main(
    out_dir: Annotated[
        Path, typer.Argument(help="Directory below the shared root, the same for all nodes.")
    ],
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that a task on this node was given.")] = 0,
) -> None:
    """Check this node and write OUT_DIR/NODE.json.

    Example: srun --ntasks-per-node=1 python -m slurm.job.health STUDY/slurm/health/123_4.0 --gpus 8
    """
    # `read_reports` looks for the name in SLURM, which the hostname need not be.
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    clock = _clock_of(out_dir)
    reasons = check_node(out_dir, node, gpus)
    report = {"node": node, "reasons": reasons, "time": time.time(), "started": clock}
    write_json(out_dir / f"{node}.json", report)
    print(f"{node}: {'; '.join(reasons) or 'healthy'}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(_main)
    run_command(app, "slurm.job.health")
