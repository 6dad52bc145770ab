"""Every check by name, and running them, each in a process of its own."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from tests.gpu import (
    casts,
    compiled,
    gptq,
    hessian,
    kernels,
    libraries,
    saved,
    training,
    transformer_engine,
)
from tests.gpu.figures import CheckedFigure, SkippedError, table
from tests.gpu.workbench import FORKS, Workbench


def checks(workbench: Workbench) -> dict[str, Callable[[Workbench], list[CheckedFigure]]]:
    """Every check by name, in order: what would spoil the others comes first."""
    entries: dict[str, Callable[[Workbench], list[CheckedFigure]]] = {
        "nccl": kernels.nccl,
        "rope": kernels.rope,
        "documents": kernels.documents,
        "sums": kernels.sums,
        "training, CPU and GPU": training.cpu_and_gpu,
        "DeepSpeed": training.deepspeed,
        "DeepSpeed, compiled layers": compiled.gradients,
        "DeepSpeed, kernels": compiled.kernels,
        "GPTQ, CPU and GPU": gptq.cpu_and_gpu,
        "GPTQ, CUDA graph": gptq.graph_and_plain,
        "GPTQ, bf16 Hessian": gptq.bf16_hessian,
        "casts, linear": casts.cast_linear,
        "casts, KV cache": casts.cache,
        "casts, grids": casts.grids,
        "Hessian, CPU and GPU": hessian.cpu_and_gpu,
        "Hessian, vectors on the host": hessian.vectors_on_the_host,
    }
    entries |= {
        f"speed, {name}": partial(training.speed, name=name) for name in workbench.sizes.timed
    }
    return entries | {
        "GPTQ, block": gptq.block_seconds,
        "Hessian, seconds": hessian.seconds,
        "saves": training.saves,
        "snapshots": training.snapshots,
        **{
            f"Transformer Engine, {precision}": partial(
                transformer_engine.training, precision=precision
            )
            for precision in transformer_engine.APART
        },
        **{
            f"Transformer Engine, a linear in {precision}": partial(
                transformer_engine.linear, precision=precision
            )
            for precision in transformer_engine.BLOCKS
        },
        "libraries": libraries.cpu_and_gpu,
        "saved checkpoints in vLLM": saved.in_vllm,
    }


def _run_one(name: str, workbench: Workbench, out: Path) -> None:
    """In its own process: writes the check's figures, a failed or skipped one without."""
    try:
        if workbench.device == "cuda":
            # What runs on the CPU beside it is not timed.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
        figures = checks(workbench)[name](workbench)
    except SkippedError as reason:
        figures = [CheckedFigure(name, None, note=str(reason), skipped=True)]
    except BaseException as error:  # noqa: BLE001  whatever it is, the other checks continue
        traceback.print_exc()
        figures = [
            CheckedFigure(
                name, None, note=f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            )
        ]
    out.write_text(json.dumps([figure._asdict() for figure in figures]))


def run(workbench: Workbench, names: Iterable[str], total_seconds: float) -> list[CheckedFigure]:
    """The figures of all checks; of one that takes longer than is left its name, failed."""
    ends_at = time.monotonic() + total_seconds
    figures: list[CheckedFigure] = []
    for number, name in enumerate(names):
        work = workbench.work / str(number)
        work.mkdir(parents=True)
        began_at, out = time.monotonic(), workbench.work / f"{number}.json"
        child = FORKS.Process(
            target=_run_one, args=(name, Workbench(workbench.device, workbench.sizes, work), out)
        )
        child.start()
        child.join(max(0.0, ends_at - began_at))
        if child.is_alive():
            child.kill()
            child.join()
        seconds = time.monotonic() - began_at
        if out.exists():
            new = [CheckedFigure(**figure) for figure in json.loads(out.read_text())]
        else:
            left = f"no figure after {seconds:.0f} s, exit code {child.exitcode}"
            new = [CheckedFigure(name, None, note=left)]
        # All are printed at the end, and here already, should the machine be taken away before.
        print(f"{name}: {seconds:.0f} s\n{table(new)}\n", file=sys.stderr, flush=True)
        figures += new
    return figures
