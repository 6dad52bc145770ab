"""The tables of checks, a row each, and running them, each in a process of its own.

A row states the seconds that its check is expected to take. They are estimates for an H200 or H100
with 16 cores, made of 6 s until a process has imported and reached its GPU, 10 s more until a
training makes steps (megatron-core 3, weights 1, compiling 6 where kernels are cached), 4 s for
torchrun, and what the sizes in `workbench` compute at 40% of the peak.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tests.gpu import (
    casts,
    compiled,
    gptq,
    hessian,
    kernels,
    killed,
    libraries,
    measured,
    perturbed,
    planes,
    saved,
    several,
    speed,
    training,
    transformer_engine,
)
from tests.gpu.figures import CheckedFigure, SkippedError, table
from tests.gpu.launch import kill
from tests.gpu.workbench import FORKS, Workbench

# A check may take so many times its estimate, and so many seconds more on a slow machine.
TIMES_EXPECTED, SLOWER_SECONDS = 3, 60


class Check(NamedTuple):
    """A row.

    Attributes:
        name: of the check, unique.
        measure: that returns its figures.
        seconds: it is expected to take.
    """

    name: str
    measure: Callable[[Workbench], list[CheckedFigure]]
    seconds: float


class Outcome(NamedTuple):
    """The figures of a check, and the seconds that it took."""

    check: Check
    seconds: float
    figures: list[CheckedFigure]


# The most valuable first: where time runs out, the last are not run. NCCL would spoil the others.
ON_ONE = (
    Check("nccl", kernels.nccl, 12),
    Check("training, CPU and GPU", training.cpu_and_gpu, 50),
    Check("speed, 190M", partial(speed.speed, shape="190M"), 30),
    Check("speed, 1B", partial(speed.speed, shape="1B"), 45),
    Check("rope", kernels.rope, 15),
    Check("norms", kernels.norms, 12),
    Check("documents", kernels.documents, 8),
    Check("sums", kernels.sums, 8),
    Check("loss", kernels.cross_entropy, 15),
    Check("training, tied embeddings", training.tied, 40),
    Check("training, CUDA graph", training.graphs, 40),
    Check("perturbations, CPU and GPU", perturbed.cpu_and_gpu, 30),
    Check("perturbations, 190M", perturbed.over_plain, 25),
    Check("DeepSpeed", training.deepspeed, 25),
    Check("DeepSpeed, compiled layers", compiled.gradients, 25),
    Check("DeepSpeed, kernels", compiled.kernels, 30),
    Check("saves", training.saves, 45),
    Check("snapshots", training.snapshots, 8),
    Check("GPTQ, CPU and GPU", gptq.cpu_and_gpu, 15),
    Check("GPTQ, CUDA graph", gptq.graph_and_plain, 10),
    Check("GPTQ, bf16 Hessian", gptq.bf16_hessian, 8),
    Check("GPTQ, block", gptq.seconds_of_block, 25),
    Check("Hessian, CPU and GPU", hessian.cpu_and_gpu, 20),
    Check("Hessian, vectors on the host", hessian.vectors_on_the_host, 12),
    Check("Hessian, seconds", hessian.seconds, 30),
    Check("planes", planes.cpu_and_gpu, 40),
    Check("casts, linear", casts.cast_linear, 7),
    Check("casts, KV cache", casts.cache, 8),
    Check("casts, grids", casts.grids, 10),
    *(
        Check(
            f"Transformer Engine, {precision}",
            partial(transformer_engine.training, precision=precision),
            25,
        )
        for precision in transformer_engine.APART
    ),
    *(
        Check(
            f"Transformer Engine, a linear in {precision}",
            partial(transformer_engine.linear, precision=precision),
            10,
        )
        for precision in transformer_engine.BLOCKS
    ),
    Check("libraries", libraries.cpu_and_gpu, 70),
    Check("saved checkpoints in vLLM", saved.in_vllm, 200),
)

ON_SEVERAL = (
    Check("collectives", several.sums, 15),
    Check("on one GPU", several.alone, 30),
    *(
        Check(f"{kind} parallel", partial(several.against_one, kind=kind, runs=several.PLAIN), 42)
        for kind in several.KINDS
    ),
    Check("state at other layouts", killed.reloaded, 25),
    Check("rank killed", killed.killed, 75),
    Check("rank hangs", killed.hung, 40),
    Check("collective times out", killed.unjoined, 20),
    Check("ZeRO-2", partial(several.against_one, kind="data", runs=several.OF_ZERO), 42),
    Check("GPTQ on ranks", measured.quantized, 25),
    Check("curvature, FSDP", measured.curvature, 25),
    Check(
        "Muon, data parallel", partial(several.against_one, kind="data", runs=several.OF_MUON), 20
    ),
    Check(
        "Muon, tensor parallel",
        partial(several.against_one, kind="tensor", runs=several.OF_MUON),
        20,
    ),
    Check(
        "Transformer Engine, tensor parallel",
        partial(several.against_one, kind="tensor", runs=several.OF_TRANSFORMER_ENGINE),
        45,
    ),
    *(
        Check(f"speed, 1B, {kind} parallel", partial(speed.on_all_gpus, shape="1B", kind=kind), 45)
        for kind in ("data", "tensor")
    ),
)

# With an older tree: its steps beside those of this one.
BESIDE_BASE = (
    Check("before and after, 190M", partial(speed.before_and_after, shape="190M"), 60),
    Check("before and after, 1B", partial(speed.before_and_after, shape="1B"), 90),
)


def table_of(workbench: Workbench) -> list[Check]:
    """Return the rows that are for these GPUs."""
    rows = ON_ONE if workbench.gpus == 1 else ON_SEVERAL
    return [*BESIDE_BASE, *rows] if workbench.base else list(rows)


def _run_one(check: Check, workbench: Workbench, out: Path) -> None:
    """In its own process: writes the check's figures, a failed or skipped one without."""
    try:
        if workbench.device == "cuda":
            # What runs on the CPU beside it is not timed.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
        figures = check.measure(workbench)
    except SkippedError as reason:
        figures = [CheckedFigure(check.name, None, note=str(reason), absent="skipped")]
    except BaseException as error:  # noqa: BLE001  whatever it is, the other checks continue
        traceback.print_exc()
        words = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        figures = [CheckedFigure(check.name, None, note=words)]
    out.write_text(json.dumps([figure._asdict() for figure in figures]))


def run(workbench: Workbench, checks: Iterable[Check], total_seconds: float) -> list[Outcome]:
    """Return the outcome of every check, NOT RUN for those without time left.

    A check that is expected to take longer than is left is not started, and a shorter one that
    comes later may be.
    """
    ends_at = time.monotonic() + total_seconds
    outcomes = []
    for number, check in enumerate(checks):
        began_at = time.monotonic()
        figures = _measured(check, workbench, number, ends_at - began_at)
        outcomes.append(Outcome(check, time.monotonic() - began_at, figures))
        # All are printed at the end, and here already, should the machine be taken away before.
        words = f"{check.name}: {outcomes[-1].seconds:.0f} s\n{table(figures)}\n"
        print(words, file=sys.stderr, flush=True)
    return outcomes


def _measured(
    check: Check, workbench: Workbench, number: int, seconds_left: float
) -> list[CheckedFigure]:
    """Return the figures of a check; in their place its name, failed or not run."""
    if check.seconds > seconds_left:
        reason = f"{max(0, seconds_left):.0f} s were left, and it takes about {check.seconds:.0f}"
        return [CheckedFigure(check.name, None, note=reason, absent="NOT RUN")]

    out, bench = workbench.work / f"{number}.json", workbench.at(str(number))
    child = FORKS.Process(target=_run_one, args=(check, bench, out))
    child.start()
    assert child.pid
    most = TIMES_EXPECTED * check.seconds + SLOWER_SECONDS
    child.join(min(most, seconds_left))
    was_ended = child.is_alive()
    if was_ended:
        kill(child.pid)
        child.join()

    if out.exists():
        return [CheckedFigure(**figure) for figure in json.loads(out.read_text())]
    if was_ended and seconds_left < most:
        reason = f"cut off after {seconds_left:.0f} s, when the time of all checks was over"
        return [CheckedFigure(check.name, None, note=reason, absent="NOT RUN")]
    reason = f"no figure within {most:.0f} s" if was_ended else "no figure"
    return [CheckedFigure(check.name, None, note=f"{reason}, exit code {child.exitcode}")]
