"""One model quantized by another project's library in its own process.

Job and result are files. The library's module is started as `python -m quant_eval.libraries.MODULE
JOB.json`, or in a fork where that is as good, and leaves in `Job.out`: `weights.safetensors`, the
dense values of every parameter it changed, and `report.json`, written last.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, PlainSerializer
from safetensors.torch import save_file
from torch import Tensor

from base.errors import UserError
from base.files import write_json
from base.frozen import Frozen
from base.ranks import Ranks
from base.reading import read_model
from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.weights import DTYPES
from quant_eval.draws import Draw, save_draw
from quant_eval.model.streamed import StreamedModel
from quant_eval.quantizer import QuantSpec
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec

WEIGHTS = "weights.safetensors"
REPORT = "report.json"


class Job(Frozen):
    """The task of one process of a library."""

    hf_dir: Path
    spec: Annotated[
        QuantSpec,
        BeforeValidator(lambda spec: parse_spec(spec) if isinstance(spec, str) else spec),
        PlainSerializer(lambda spec: spec.name, return_type=str),
    ]
    calibration: Path = Field(description="file of `draws.save_draw`")
    dtype: Literal["fp32", "bf16"] = Field(
        description="the model's while it is quantized, and that of the weights"
    )
    device: Literal["cpu", "cuda"] = Field(description="cuda: the first GPU that is visible")
    batch_size: int = Field(ge=1)
    threads: int = Field(ge=1)
    out: Path


class Report(Frozen):
    """The outcome of a job."""

    library: str
    version: str
    settings: dict[str, Any] = Field(description="every argument the library was given")


OpenModel = Callable[[], AbstractContextManager[tuple[StreamedModel, Report]]]


def library_model(
    hf_dir: Path,
    spec: QuantSpec,
    draw: Draw | None,
    compute: ComputeSettings,
    work: Path,
    ranks: Ranks,
) -> OpenModel | None:
    """Return the function that opens the model as a library quantizes it, None for own methods.

    The library runs on rank 0 when it is opened. Its weights are in `work`, a directory that all
    ranks see, until it is closed.
    """
    if spec.module is None:
        return None
    assert draw is not None  # all of these methods are calibrated
    job = Job(
        hf_dir=hf_dir,
        spec=spec,
        calibration=work / "calibration.safetensors",
        dtype=compute.dtype,
        device=compute.device,
        batch_size=compute.batch_size,
        threads=torch.get_num_threads(),
        out=work / "out",
    )
    return partial(_quantized_model, job, draw, ranks)


@contextmanager
def _quantized_model(job: Job, draw: Draw, ranks: Ranks) -> Iterator[tuple[StreamedModel, Report]]:
    work = job.out.parent
    try:
        if ranks.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            torch.cuda.empty_cache()  # what an earlier pass freed is for the library's process
            save_draw(job.calibration, draw)
            run_job(job)
        # The files are complete when rank 0 arrives here.
        ranks.wait()
        report = read_model(Report, job.out / REPORT)
        weights = HFWeights(job.hf_dir)
        # What the library changed comes from its file, all else from the original.
        weights.tensors |= read_header(job.out / WEIGHTS)
        yield StreamedModel(job.hf_dir, weights, DTYPES[job.dtype], ranks.device), report
        # All ranks have read the weights before rank 0 removes them.
        ranks.wait()
    finally:
        if ranks.rank == 0:
            shutil.rmtree(work, ignore_errors=True)


def process_environment(threads: int, device: str = "cpu") -> dict[str, str]:
    """Return the environment of a process that finds this project and asks no hub.

    Libraries take a GPU where they see one: on the CPU every GPU is hidden.
    """
    paths = [
        str(Path(__file__).resolve().parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | _settings(threads, device) | {"PYTHONPATH": os.pathsep.join(paths)}


def _settings(threads: int, device: str) -> dict[str, str]:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | hidden


def run_job(job: Job) -> Report:
    """Run the library on the job, in an empty directory of its own.

    The weights are in `job.out`. UserError, with its process's error line, if the library failed or
    did not do what the job says.
    """
    # Absolute paths, since the library works in another directory.
    job = job.model_copy(
        update={key: getattr(job, key).resolve() for key in ("hf_dir", "calibration", "out")}
    )
    job.out.mkdir(parents=True, exist_ok=True)
    # What an earlier job left must not pass for the outcome of this one.
    for name in (WEIGHTS, REPORT):
        (job.out / name).unlink(missing_ok=True)
    path = job.out / "job.json"
    write_json(path, job.model_dump(mode="json"))
    module = f"quant_eval.libraries.{job.spec.module}"
    with tempfile.TemporaryDirectory() as directory:
        if _may_fork(job):
            process = _fork(module, path, directory)
        else:
            process = subprocess.run(
                [sys.executable, "-m", module, str(path)],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env=process_environment(job.threads, job.device),
                cwd=directory,  # where a library leaves its logs
            )
    if process.returncode:
        raise UserError(f"spec {job.spec.name}: {_reason(module, process)}")
    return read_model(Report, job.out / REPORT)


def _may_fork(job: Job) -> bool:
    """Return whether a fork of this process is as good for a job as a new interpreter.

    It saves the seconds that importing torch and transformers takes. But CUDA and threads, such as
    OpenMP's, do not survive a fork, and libraries read the environment as they are imported.
    """
    has_environment = _settings(job.threads, job.device).items() <= os.environ.items()
    threads = len(list(Path("/proc/self/task").iterdir()))
    return job.device == "cpu" and has_environment and threads == 1


def _fork(module: str, path: Path, directory: str) -> "subprocess.CompletedProcess[str]":
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = multiprocessing.get_context("fork").Process(
            target=_become, args=(module, path, directory, stderr.fileno())
        )
        process.start()
        try:
            process.join()
        finally:  # also when interrupted
            process.kill()
            process.join()
        stderr.seek(0)
        assert process.exitcode is not None
        return subprocess.CompletedProcess([module], process.exitcode, stderr=stderr.read())


def _become(module: str, path: Path, directory: str, stderr: int) -> None:
    # As `subprocess.run` gives it in a new interpreter: stdout unread, stderr for the error line.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr, 2)
    os.chdir(directory)
    sys.argv[1:] = [str(path)]
    with torch.enable_grad():  # as in a new interpreter; the walk is without
        runpy.run_module(module, run_name="__main__")


def write_report(
    job: Job, weights: dict[str, Tensor], library: str, version: str, settings: dict[str, Any]
) -> None:
    """Write the outcome of a job where `run_job` looks for it.

    UserError if the library did not compute on the job's device.
    """
    on_gpu = torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() > 0
    used = "cuda" if on_gpu else "cpu"
    if used != job.device:
        raise UserError(f"{library} computed on {used}, not on {job.device}; give --device {used}")
    save_file(weights, job.out / WEIGHTS)
    settings = settings | {"threads": job.threads, "device": used}
    report = Report(library=library, version=version, settings=settings)
    write_json(job.out / REPORT, report.model_dump(mode="json"))


def run_process(quantize: Callable[[Job], None]) -> None:
    """Run a library on the job in the file that the command line names."""
    try:
        quantize(read_model(Job, Path(sys.argv[1])))
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _reason(module: str, process: subprocess.CompletedProcess[str]) -> str:
    """Return why a process failed: its own line if it left one.

    It need not be the last: a library's own processes may warn when they end.
    """
    lines = [line for line in process.stderr.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1].removeprefix("error: ")
    if process.returncode == -signal.SIGKILL:
        return (
            f"{module} was killed, most likely for memory; give it more, or lower"
            " --calibration-sequences"
        )
    return f"{module} ended with exit code {process.returncode}: {lines[-1].strip()}"
