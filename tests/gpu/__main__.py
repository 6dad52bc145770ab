"""`python -m tests.gpu`: all checks on the GPU of this machine, one process each, at most 8
minutes.

Prints the table of figures and writes gpu_report.json; exit code 1 if a figure is outside its
limit. Where there is no GPU it says so, and is done.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.gpu.figures import Figure, SkippedError, table
from tests.gpu.place import FORKS, FULL, Place

TOTAL_SECONDS = 480
PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "triton", "numpy")
PROBE = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def checks(place: Place) -> dict[str, Callable[[Place], list[Figure]]]:
    """Every check by name, in the order in which they run: what would spoil the others comes
    first.
    """
    from tests.gpu import casts, gptq, hessian, kernels, libraries, saved, training

    entries: dict[str, Callable[[Place], list[Figure]]] = {
        "nccl": kernels.nccl,
        "rope": kernels.rope,
        "documents": kernels.documents,
        "training, CPU and GPU": training.cpu_and_gpu,
        "GPTQ, CPU and GPU": gptq.cpu_and_gpu,
        "GPTQ, CUDA graph": gptq.graph_and_plain,
        "GPTQ, bf16 Hessian": gptq.bf16_hessian,
        "casts, linear": casts.cast_linear,
        "casts, KV cache": casts.cache,
        "casts, grids": casts.grids,
        "Hessian, CPU and GPU": hessian.cpu_and_gpu,
        "Hessian, vectors on the host": hessian.vectors_on_the_host,
    }
    entries |= {f"speed, {name}": partial(training.speed, name=name) for name in place.sizes.timed}
    return entries | {
        "GPTQ, block": gptq.block_seconds,
        "Hessian, seconds": hessian.seconds,
        "saves": training.saves,
        "snapshots": training.snapshots,
        "Transformer Engine": training.other_kernels,
        "fp8": training.fp8,
        "libraries": libraries.cpu_and_gpu,
        "saved checkpoints in vLLM": saved.in_vllm,
    }


def _run_one(name: str, place: Place, out: Path) -> None:
    """In a process of its own: writes the check's figures, a failed or skipped one where it has
    none.
    """
    try:
        if place.device == "cuda":
            torch.set_num_threads(
                max(1, (os.cpu_count() or 1) // 2)
            )  # what runs on the CPU beside it is not timed
        figures = checks(place)[name](place)
    except SkippedError as reason:
        figures = [Figure(name, None, note=str(reason), skipped=True)]
    except BaseException as error:  # noqa: BLE001  whatever it is, the other checks continue
        traceback.print_exc()
        figures = [
            Figure(
                name, None, note=f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            )
        ]
    out.write_text(json.dumps([figure._asdict() for figure in figures]))


def run(place: Place, names: Iterable[str], total_seconds: float) -> list[Figure]:
    """The figures of all checks; those of a check that takes longer than is left are its name,
    failed.
    """
    ends_at = time.monotonic() + total_seconds
    figures: list[Figure] = []
    for number, name in enumerate(names):
        work = place.work / str(number)
        work.mkdir(parents=True)
        began_at, out = time.monotonic(), place.work / f"{number}.json"
        child = FORKS.Process(
            target=_run_one, args=(name, Place(place.device, place.sizes, work), out)
        )
        child.start()
        child.join(max(0.0, ends_at - began_at))
        if child.is_alive():
            child.kill()
            child.join()
        if out.exists():
            figures += [Figure(**figure) for figure in json.loads(out.read_text())]
        else:
            left = (
                f"no figure after {time.monotonic() - began_at:.0f} s, exit code {child.exitcode}"
            )
            figures.append(Figure(name, None, note=left))
        print(f"{name}: {time.monotonic() - began_at:.0f} s", file=sys.stderr, flush=True)
    return figures


def machine(gpu: str) -> dict[str, Any]:
    """Return the machine that the figures were measured on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "packages": versions,
        "cpus": os.cpu_count(),
    }


def main() -> int:
    """Runs all checks where there is a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_report.json"), help="where the figures are written"
    )
    parser.add_argument("--only", default="", help="names of checks that hold this text")
    arguments = parser.parse_args()
    gpu = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not gpu:
        print("skipped as a whole: torch sees no GPU here, so nothing of tests/gpu was run")
        return 0
    FORKS.set_forkserver_preload(["torch", "transformers.models.olmo2.modeling_olmo2"])
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        place = Place("cuda", FULL, Path(work))
        names = [name for name in checks(place) if arguments.only in name]
        figures = run(place, names, TOTAL_SECONDS)
    seconds = time.monotonic() - began_at
    report = {
        "machine": machine(gpu),
        "seconds": seconds,
        "figures": [figure.described() for figure in figures],
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(figures))
    failed = sum(figure.verdict == "FAILED" for figure in figures)
    print(f"{len(figures)} figures on {gpu} in {seconds:.0f} s, {failed} failed -> {arguments.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
