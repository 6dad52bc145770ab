"""What a run says about itself beside its losses: speed, memory, norms, and which rank is slow."""

import json
import math
import resource
import socket
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from train.config import RunConfig
from train.distributed import gathered
from train.engine import WeightShard
from train.flops import flops_per_token, peak_flops

RANKS_EVERY_STEPS = 50


def peak_memory_bytes() -> int:
    """The most this rank has held: allocated on its GPU, or resident (RSS) where it trains on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


class Speedometer:
    """Tokens and floating-point operations per second."""

    def __init__(self, run: RunConfig) -> None:
        self._tokens, self._gpus = run.tokens_per_step, dist.get_world_size() if torch.cuda.is_available() else 0
        self._flops_per_token = flops_per_token(run.model, run.data.sequence_length)
        self._peak = peak_flops(torch.cuda.get_device_name()) if self._gpus else None

    def figures(self, seconds: float) -> dict[str, float]:
        """Of one step of so many seconds; per GPU where there are, model FLOPs utilization where their peak is known.

        The utilization is against the peak in bf16, whatever the precision.
        """
        tokens = self._tokens / seconds
        flops = tokens * self._flops_per_token
        found = {"tokens_per_second": tokens, "model_flops_per_second": flops}
        if self._gpus:
            found["tokens_per_second_per_gpu"] = tokens / self._gpus
        if self._peak:
            found["mfu"] = flops / (self._gpus * self._peak)
        return found


class Norms:
    """L2 norms of weights and of one update, for decayed and undecayed weights apart. Every rank calls every method."""

    def __init__(self, shards: list[WeightShard]) -> None:
        self._before = [shard.weights.clone() for shard in shards]

    def figures(self, shards: list[WeightShard]) -> dict[str, float]:
        """weight_norm/... after an update, and update_norm/... since this was made."""
        squares = {"decayed": [0.0, 0.0], "undecayed": [0.0, 0.0]}
        for shard, before in zip(shards, self._before, strict=True):
            if shard.counted:
                sums = squares["decayed" if shard.decayed else "undecayed"]
                sums[0] += _square(shard.weights)
                sums[1] += _square(shard.weights - before)
        found = {}
        parts = gathered(squares)
        for group in squares:
            for index, name in enumerate(("weight_norm", "update_norm")):
                found[f"{name}/{group}"] = math.sqrt(math.fsum(part[group][index] for part in parts))
        return found


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


class RankClock:
    """Times every step of this rank; now and then a line per rank in ranks.jsonl, by which stragglers show.

    All ranks wait for the slowest, so their steps take alike: it is the one whose own process is busy for longest.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._seconds: list[float] = []
        self._busy: list[float] = []
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """A step begins."""
        self._started = (time.perf_counter(), time.process_time())

    def stop(self) -> float:
        """A step has ended; its seconds."""
        self._seconds.append(time.perf_counter() - self._started[0])
        self._busy.append(time.process_time() - self._started[1])
        return self._seconds[-1]

    def report(self, step: int) -> None:
        """Writes a line for every rank on the steps since the last report. Every rank calls."""
        if not self._seconds:
            return
        median, slow = np.percentile(self._seconds, (50, 95)).tolist()
        own = {
            "host": socket.gethostname(),
            "steps": len(self._seconds),
            "step_seconds_p50": median,
            "step_seconds_p95": slow,
            "step_seconds_max": max(self._seconds),
            "busy_seconds_p50": float(np.median(self._busy)),
        }
        self._seconds, self._busy = [], []
        lines = [
            json.dumps({"step": step, "attempt": self._attempt, "rank": rank, **row}) + "\n"
            for rank, row in enumerate(gathered(own))
        ]
        if dist.get_rank() == 0:
            with self._path.open("a") as file:
                file.writelines(lines)
