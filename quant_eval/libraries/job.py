"""One model quantized by another project's library in its own process; files go both ways.

The library's module is started as `python -m quant_eval.libraries.MODULE JOB.json` and leaves in
`Job.out`: `weights.safetensors`, the dense values of every parameter it changed, and `report.json`,
written last.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from base.errors import UserError
from base.files import write_json
from base.frozen import Frozen
from quant_eval.specs import QuantSpec

WEIGHTS = "weights.safetensors"
REPORT = "report.json"
MODULES = {
    "gptqmodel": "run_gptqmodel",
    "gptaq": "run_gptqmodel",
    "awq": "run_llmcompressor",
}  # by method


class Job(Frozen):
    """The task of one process of a library."""

    hf_dir: Path
    spec: QuantSpec
    calibration: Path = Field(description="safetensors file; 'input_ids' int64 [N, L], unpadded")
    dtype: Literal["fp32", "bf16"] = Field(
        description="the model's while it is quantized, and that of the weights"
    )
    batch_size: int = Field(ge=1)
    threads: int = Field(ge=1)
    out: Path


class LayerReport(Frozen):
    """The library's own words on one linear."""

    name: str
    damping: float | None = Field(description="that was used; None: the method has none")
    objective: float | None = Field(
        description="the library's own figure, in its own unit; None: it gives none"
    )


class Report(Frozen):
    """The outcome of a job."""

    library: str
    version: str
    settings: dict[str, Any] = Field(description="every argument the library was given")
    layers: tuple[LayerReport, ...]


def process_environment(threads: int) -> dict[str, str]:
    """Return that of a process which finds this project from anywhere and asks no hub."""
    paths = [
        str(Path(__file__).resolve().parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return os.environ | settings | {"PYTHONPATH": os.pathsep.join(paths)}


def run_job(job: Job) -> Report:
    """Run the library on the job, in an empty directory of its own; weights are in `job.out`.

    Raises:
        UserError: the library failed, or did anything else than it was told; the reason is its
            process's last line.
    """
    job = job.model_copy(
        update={key: getattr(job, key).resolve() for key in ("hf_dir", "calibration", "out")}
    )
    job.out.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, REPORT):
        (job.out / name).unlink(missing_ok=True)
    path = job.out / "job.json"
    write_json(path, job.model_dump(mode="json"))
    module = f"quant_eval.libraries.{MODULES[job.spec.method]}"
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-m", module, str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=process_environment(job.threads),
            cwd=place,  # where a library leaves its logs
        )
    if done.returncode:
        raise UserError(f"spec {job.spec.name}: {_reason(module, done)}")
    return Report.model_validate(json.loads((job.out / REPORT).read_text()))


def run_process(quantize: Callable[[Job], None]) -> None:
    """Run a library's side: the job is in the file that the process is given."""
    try:
        quantize(Job.model_validate_json(Path(sys.argv[1]).read_text()))
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _reason(module: str, done: subprocess.CompletedProcess[str]) -> str:
    """Return why a process failed: its own line if it ended with one."""
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    if lines[-1].startswith("error: "):
        return lines[-1].removeprefix("error: ")
    if done.returncode == -signal.SIGKILL:
        return (
            f"{module} was killed, most likely for memory; give it more, or lower"
            " --calibration-sequences"
        )
    return f"{module} ended with exit code {done.returncode}: {lines[-1].strip()}"
