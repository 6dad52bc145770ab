"""Health of a node: `python -m slurm.job.health OUT_DIR`, once per node by srun.

Every check is a figure and its limit; all of them go to OUT_DIR/NODE.json. The exit code says
nothing of the node's health: a bad one must not end the check of the others.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from base.cli import run_command
from base.files import fsync_path, write_json

CLOCK_JSON = ".clock.json"  # no node is called so
CLOCK_SECONDS = 5.0
JUMP_SECONDS = 1.0
WRITE_BYTES, WRITE_SECONDS = 2**20, 10.0
NVIDIA_SMI_SECONDS = 60.0  # a GPU that has fallen off the bus lets it hang
MATRIX = 2048  # rows of the product that each GPU computes
FREE_SHARE = 0.9  # of a GPU's memory: what an orphan of another job holds is missing


@dataclass(frozen=True)
class Check:
    """One figure of a node. `least`: the limit is a lower one."""

    name: str
    figure: float
    limit: float
    unit: str
    least: bool = False
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Return whether the figure keeps its limit."""
        return self.figure >= self.limit if self.least else self.figure <= self.limit

    @property
    def reason(self) -> str:
        """Return what is wrong, if it does not."""
        side = "at least" if self.least else "at most"
        figure = f"{self.figure:.6g} {self.unit}".rstrip()
        return f"{self.name} {figure}, {side} {self.limit:.6g} expected{self.detail}"


def write_clock(out_dir: Path) -> None:
    """Write the time that no node's clock may be before; on the batch host, just before srun."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_json(out_dir / CLOCK_JSON, {"time": time.time()})


def _clock_of(out_dir: Path) -> float | None:
    try:
        return float(json.loads((out_dir / CLOCK_JSON).read_text())["time"])
    except FileNotFoundError:
        return None


def check_shared(out_dir: Path, node: str, free_gb: float) -> list[Check]:
    """Check the shared filesystem: free space, and a file written, synced and read back."""
    free = shutil.disk_usage(out_dir).free / 1e9
    path, content = out_dir / f".{node}.probe", os.urandom(WRITE_BYTES)
    begin = time.monotonic()
    path.write_bytes(content)
    fsync_path(path)
    wrong = path.read_bytes() != content
    seconds = time.monotonic() - begin
    path.unlink()
    return [
        Check("free space", free, free_gb, "GB", least=True),
        Check("1 MiB written, synced and read in", seconds, WRITE_SECONDS, "s"),
        Check("files that read otherwise than written:", wrong, 0, ""),
    ]


def check_clock(out_dir: Path) -> list[Check]:
    """Check that this clock is not behind the batch host's; `read_reports` bounds the rest."""
    written = _clock_of(out_dir)
    if written is None:
        return [
            Check(
                "clock files of the batch host seen:",
                0,
                1,
                "",
                True,
                f" in {out_dir}; is it really shared?",
            )
        ]
    return [Check("clock behind the batch host's by", written - time.time(), CLOCK_SECONDS, "s")]


def check_memory(memory_gb: float) -> Check:
    """Check the memory that the kernel could give to a process now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return Check(
        "free memory",
        int(lines["MemAvailable"].split()[0]) * 1024 / 1e9,
        memory_gb,
        "GB",
        least=True,
    )


def _listed_gpus() -> Check | None:
    """Check that nvidia-smi, where there is one, neither fails nor hangs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        listed = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS
        )
        detail = (
            "" if listed.returncode == 0 else f": {(listed.stdout + listed.stderr).strip()[:200]}"
        )
    except subprocess.TimeoutExpired:
        detail = f": no answer within {NVIDIA_SMI_SECONDS:.0f} s"
    return Check("failures of nvidia-smi -L:", bool(detail), 0, "", detail=detail)


def check_gpus(gpus: int) -> list[Check]:
    """Check the GPUs that this task sees: free memory and a known product of matrices.

    Without GPUs expected, torch is not imported. Not run on a GPU yet.
    """
    if gpus == 0:
        return []
    listed = _listed_gpus()
    if listed and not listed.passed:  # torch would hang as well
        return [listed]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    detail = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    import torch

    count = torch.cuda.device_count()
    checks = [Check("GPUs seen:", count, gpus, "", least=True, detail=detail)]
    for index in range(count):
        device = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(device)
        checks.append(
            Check(f"GPU {index}: free share of memory", free / total, FREE_SHARE, "", least=True)
        )
        ones = torch.ones(MATRIX, MATRIX, device=device)
        wrong = int(
            (ones @ ones != MATRIX).sum()
        )  # exact at any precision of the product: powers of two
        checks.append(Check(f"GPU {index}: wrong elements of a product", wrong, 0, ""))
    return checks


def check_node(
    out_dir: Path, node: str, *, gpus: int, free_gb: float, memory_gb: float
) -> list[Check]:
    """Make all checks of this node."""
    wall, steady = time.time(), time.monotonic()
    checks = [
        *check_clock(out_dir),
        *check_shared(out_dir, node, free_gb),
        check_memory(memory_gb),
        *check_gpus(gpus),
    ]
    jump = abs((time.time() - wall) - (time.monotonic() - steady))
    return [*checks, Check("clock jumped while it was looked at, by", jump, JUMP_SECONDS, "s")]


def read_reports(out_dir: Path, nodes: list[str]) -> dict[str, str]:
    """Return the reason by node of all that are unfit or left no report; after srun."""
    bad, now, started = {}, time.time(), _clock_of(out_dir)
    for node in nodes:
        try:
            report = json.loads((out_dir / f"{node}.json").read_text())
        except FileNotFoundError:
            bad[node] = (
                f"no report in {out_dir}: the check did not start there, hangs, or does not see"
                " that directory"
            )
            continue
        reasons = list(report["reasons"])
        if report["time"] > now + CLOCK_SECONDS:
            reasons.append(
                f"clock ahead of the batch host's by more than {report['time'] - now:.0f} s"
            )
        if started is not None and report["started"] != started:
            reasons.append("the report is of an earlier check")
        if reasons:
            bad[node] = "; ".join(reasons)
    return bad


def _main(
    out_dir: Annotated[
        Path, typer.Argument(help="Directory below the shared root, the same for all nodes.")
    ],
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that a task on this node was given.")] = 0,
    free_gb: Annotated[
        float, typer.Option(min=0, help="Free space that the shared root must have.")
    ] = 1.0,
    memory_gb: Annotated[
        float, typer.Option(min=0, help="Free memory that the node must have.")
    ] = 1.0,
) -> None:
    """Check this node and write OUT_DIR/NODE.json.

    Example: srun --ntasks-per-node=1 python -m slurm.job.health STUDY/slurm/health/123_4.0 --gpus 8
    """
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    started = _clock_of(out_dir)
    checks = check_node(out_dir, node, gpus=gpus, free_gb=free_gb, memory_gb=memory_gb)
    reasons = [check.reason for check in checks if not check.passed]
    report = {
        "node": node,
        "healthy": not reasons,
        "reasons": reasons,
        "time": time.time(),
        "started": started,
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
    }
    write_json(out_dir / f"{node}.json", report)
    print(f"{node}: {'; '.join(reasons) or 'healthy'}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(_main)
    run_command(app, "slurm.job.health")
