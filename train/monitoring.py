"""Speed and memory of a run, step times of every rank, and traces by torch.profiler."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from base.errors import UserError
from train.distributed import gathered, numbers_on_rank_zero
from train.planning.flops import peak_flops, training_flops
from train.run.config import RunConfig

RANKS_EVERY_STEPS = 50
PRODUCT_ROWS, PRODUCTS = 4096, 50  # 0.14 TFLOP each, 67 MB
MEMORY_EVENTS = 100_000  # newest allocations and frees that a snapshot of memory holds


def peak_memory_bytes() -> int:
    """Return the peak of this rank: allocated on its GPU, or resident (RSS) on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def speed_of(run: RunConfig, step: int, seconds: float) -> dict[str, float]:
    """Return the speed of update `step`, which took `seconds`; per GPU, and MFU, with GPUs.

    MFU is against the peak in bf16, whatever the precision. Tokens are those of the data, however
    often an update passes over them; FLOPs are those of all passes.
    """
    tokens = run.batch_size_at(step) * run.data.sequence_length / seconds
    flops = training_flops(run, step - 1, step) / seconds
    speed = {"tokens_per_second": tokens, "model_flops_per_second": flops}
    if torch.cuda.is_available():
        gpus, peak = dist.get_world_size(), peak_flops(torch.cuda.get_device_name())
        speed["tokens_per_second_per_gpu"] = tokens / gpus
        if peak:
            speed["mfu"] = flops / (gpus * peak)
    return speed


def product_seconds() -> float:
    """Return the seconds of a fixed product of matrices in bf16 on this rank's GPU."""
    # No constant, whose product takes less power, and no random numbers of training.
    numbers = torch.arange(PRODUCT_ROWS**2, dtype=torch.float32, device="cuda")
    factor = numbers.sin().view(PRODUCT_ROWS, PRODUCT_ROWS).bfloat16()
    _ = factor @ factor  # the first one also loads the kernel
    torch.cuda.synchronize()  # nothing else is at work: no collective, no copy
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(PRODUCTS):
        _ = factor @ factor
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / PRODUCTS


class RankClock:
    """The clock of a rank's steps; every few steps it writes a line per rank to ranks.jsonl.

    All ranks wait for the slowest, so their steps take the same time. A slow rank shows by what it
    does alone. On a CPU that is the time its process is busy. On a GPU the process spins while it
    waits, and events around forward and backward would hold the waits of their collectives; there
    each rank times a fixed product once per report, 15 ms on an H100.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._hosts = gathered(socket.gethostname())
        self._seconds: list[float] = []
        self._busy: list[float] = []
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """Begin a step."""
        self._started = (time.perf_counter(), time.process_time())

    def stop(self) -> float:
        """End a step; return its seconds."""
        self._seconds.append(time.perf_counter() - self._started[0])
        self._busy.append(time.process_time() - self._started[1])
        return self._seconds[-1]

    def report(self, step: int) -> None:
        """Write a line for every rank on the steps since the last report. Every rank calls."""
        if not self._seconds:
            return
        median, slow = np.percentile(self._seconds, (50, 95)).tolist()
        steps = len(self._seconds)  # the same on every rank
        figures = {
            "step_seconds_p50": median,
            "step_seconds_p95": slow,
            "step_seconds_max": max(self._seconds),
        }
        if torch.cuda.is_available():
            figures["product_seconds"] = product_seconds()
        else:
            figures["busy_seconds_p50"] = float(np.median(self._busy))
        self._seconds, self._busy = [], []

        lines = []
        for rank, row in enumerate(numbers_on_rank_zero(list(figures.values()))):
            line = {"step": step, "attempt": self._attempt, "rank": rank}
            line |= {"host": self._hosts[rank], "steps": steps}
            lines.append(json.dumps(line | dict(zip(figures, row, strict=True))) + "\n")
        if lines:  # on rank 0
            with self._path.open("a") as file:
                file.writelines(lines)


class Profile:
    """The trace of some steps of rank 0, and on CUDA a snapshot of its memory.

    The trace opens in ui.perfetto.dev, the snapshot in pytorch.org/memory_viz. Other ranks do
    nothing here.
    """

    def __init__(self, steps: range, directory: Path) -> None:
        self._steps, self._directory = steps, directory

    def check(self, resumed_step: int, total_steps: int) -> None:
        """Raise UserError if this attempt does not make all of the steps."""
        if self._steps and not resumed_step < self._steps[0] <= self._steps[-1] <= total_steps:
            raise UserError(
                f"--profile {self._steps.start}:{self._steps.stop}: this start makes steps"
                f" {resumed_step + 1} to {total_steps}; give steps among them"
            )

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record the block, which makes this step, if it is one of the steps."""
        recorded = self._steps and dist.get_rank() == 0
        if recorded and step == self._steps[0]:
            self._begin()
        yield
        if recorded and step == self._steps[-1]:
            self._end()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def _end(self) -> None:
        self._profiler.stop()
        self._directory.mkdir(exist_ok=True)
        name = f"steps{self._steps[0]}-{self._steps[-1]}"
        self._profiler.export_chrome_trace(str(self._directory / f"{name}.json.gz"))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._directory / f"{name}-memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
