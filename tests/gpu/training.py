"""Training: losses against the CPU and other kernels, resuming, saves, times, memory."""

import re
import shutil
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_tools.formats.megatron_shards import MegatronWeights
from ckpt_tools.formats.weights import read_whole
from tests.gpu.figures import CheckedFigure, SkippedError
from tests.gpu.workbench import Workbench, make_run, random_tokens, train
from train.data.batches import Batch
from train.model.config import ModelConfig, parameter_shapes
from train.planning.flops import flops_per_token, peak_flops
from train.planning.memory import rank_memory
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.probe import ProbeConfig
from train.snapshot_memory import SnapshotMemory

ROUNDS = 6  # timed steps, after two that warm up


def losses(directory: Path) -> list[float]:
    """Loss of every step of a run, nats per token."""
    return [row["loss"] for row in read_metrics(RunDirectory(directory).metrics) if "loss" in row]


def apart(values: list[float], other: list[float]) -> float:
    """The largest difference of two runs' losses, nats per token."""
    return max(abs(a - b) for a, b in zip(values, other, strict=True))


def cpu_and_gpu(workbench: Workbench) -> list[CheckedFigure]:
    """The same run in fp32 on the CPU and on the GPU, then resumed there from its middle."""
    sizes = workbench.sizes
    steps = sizes.compared_steps
    for name in ("cpu", "gpu"):
        make_run(
            *(workbench.work / name, sizes.compared, sizes.compared_length),
            steps=steps,
            observe_every_steps=steps // 2,
            probe=ProbeConfig(every_steps=steps // 2, sequences=4, group_size=16),
        )
        train(
            workbench.work / name, "cpu" if name == "cpu" else workbench.device, "--deterministic"
        )
    again = workbench.work / "again"
    shutil.copytree(workbench.work / "gpu", again)
    directory = RunDirectory(again)
    shutil.rmtree(directory.checkpoint(steps))
    directory.status_json.unlink()
    train(again, workbench.device, "--deterministic", "--profile", f"{steps - 1}:{steps + 1}")
    assert {"cpu": 1, "cuda": 2}[workbench.device] == len(list(directory.profile.iterdir()))
    first, resumed = (
        _weights(workbench.work / name, steps, sizes.compared) for name in ("gpu", "again")
    )
    runs, middle = [workbench.work / name for name in ("cpu", "gpu")], steps // 2
    rounded = apart(*(_rounded_losses(run, middle) for run in runs))
    unit = "nats/token, largest difference"
    return [
        CheckedFigure(
            f"losses of {steps} steps in fp32, CPU against GPU",
            apart(*map(losses, runs)),
            unit,
            most=1e-3,
        ),
        # a weight midway between two points may take the other one
        CheckedFigure(
            f"losses with weights rounded at step {middle}, CPU against GPU",
            rounded,
            unit,
            most=1e-2,
        ),
        CheckedFigure(
            f"weights after resuming at step {middle}, against never stopped",
            max(float((first[name] - resumed[name]).abs().max()) for name in first),
            "largest difference",
            most=0.0,
        ),
    ]


def _rounded_losses(run: Path, step: int) -> list[float]:
    (row,) = (row for row in read_metrics(RunDirectory(run).metrics) if row["step"] == step)
    return [
        loss for name, loss in row.items() if re.fullmatch("quantization/.*/held_out_loss", name)
    ]


def _weights(run: Path, step: int, model: ModelConfig) -> dict[str, Tensor]:
    weights = MegatronWeights(RunDirectory(run).checkpoint(step), model)
    return {name: read_whole(weights, name) for name in weights.tensors}


def deepspeed(workbench: Workbench) -> list[CheckedFigure]:
    """The same run in bf16 by megatron-core and by DeepSpeed."""
    if not find_spec("deepspeed"):
        raise SkippedError("deepspeed is not installed")
    return [
        compared(
            workbench,
            "megatron-core against DeepSpeed in bf16",
            {"precision": "bf16", "engine": "megatron"},
            {"precision": "bf16", "engine": "deepspeed"},
            most=2e-2,
        )
    ]


def compared(workbench: Workbench, what: str, *each: dict[str, Any], most: float) -> CheckedFigure:
    """The losses of two runs that differ in these settings."""
    sizes = workbench.sizes
    runs = [workbench.work / str(number) for number in range(len(each))]
    for run, settings in zip(runs, each, strict=True):
        make_run(
            *(run, sizes.compared, sizes.compared_length), steps=sizes.compared_steps, **settings
        )
        train(run, workbench.device)
    return CheckedFigure(
        f"losses of {sizes.compared_steps} steps, {what}",
        apart(*map(losses, runs)),
        "nats/token, largest difference",
        most=most,
    )


def saves(workbench: Workbench) -> list[CheckedFigure]:
    """Seconds of the stall of an asynchronous save, and of the save itself.

    A save waits for the one before it, and the last for nothing but itself: of four, far enough
    apart, the second and third are those of a run in full swing. The first makes its memory.
    """
    sizes = workbench.sizes
    between = sizes.steps_between_saves
    run = make_run(
        workbench.work / "saves",
        sizes.saved,
        sizes.saved_length,
        steps=4 * between,
        precision="bf16",
        save_steps=tuple(range(between, 4 * between + 1, between)),
    )
    train(workbench.work / "saves", workbench.device)
    rows = [
        row
        for row in read_metrics(RunDirectory(workbench.work / "saves").metrics)
        if "save_stall_seconds" in row
    ]
    stall = max(row["save_stall_seconds"] for row in rows[1:3])
    whole = min(row["save_seconds"] for row in rows[1:3])
    parameters = _parameters_of(run.model)
    size = f"{parameters / 1e6:.0f}M parameters, {14 * parameters / 1e9:.2g} GB"
    note = "an asynchronous save is to hold training up for less than half of its own time"
    return [
        CheckedFigure(
            f"asynchronous save of {size}: stall", stall, "s", most=max(0.5 * whole, 0.5), note=note
        ),
        CheckedFigure(f"asynchronous save of {size}: until it is complete", whole, "s"),
        CheckedFigure(f"first save of {size}: stall", rows[0]["save_stall_seconds"], "s"),
    ]


def snapshots(workbench: Workbench) -> list[CheckedFigure]:
    """Two snapshots in a row, each of values that change once it is fenced off."""
    memory = SnapshotMemory(torch.device(workbench.device))
    elements = _parameters_of(workbench.sizes.saved)
    live = torch.arange(elements, dtype=torch.int32, device=workbench.device)
    waits, apart_by = [], 0.0
    copies = []
    for _ in range(2):
        began_at = time.perf_counter()
        copies.append(memory.copied([live]))
        memory.fence()
        waits.append(time.perf_counter() - began_at)
        live.add_(1)
    for index, copy in enumerate(copies):
        copy.wait()
        expected = torch.arange(elements, dtype=torch.int32) + index
        apart_by = max(apart_by, float((copy.tensors[0] - expected).abs().max()))
    size = f"{4 * elements / 1e9:.2g} GB"
    return [
        CheckedFigure(f"two snapshots of {size}", apart_by, "largest difference", most=0.0),
        CheckedFigure(f"snapshot of {size}: seconds of the host", waits[1], "s"),
    ]


def _parameters_of(model: ModelConfig) -> int:
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(model).values())


def speed(workbench: Workbench, name: str) -> list[CheckedFigure]:
    """Step time, MFU and peak memory of a shape in bf16 on one GPU, against the planner."""
    model, micro = workbench.sizes.timed[name]
    batch_size, length = micro * workbench.sizes.timed_micro, workbench.sizes.timed_length
    run = make_run(
        workbench.work / name,
        model,
        length,
        steps=2,
        precision="bf16",
        batch_size=batch_size,
        micro_batch_size=micro,
    )
    seconds, cross_entropy = _timed_steps(run, batch_size, length)
    flops = flops_per_token(model, length) * batch_size * length
    kind = torch.cuda.get_device_name() if workbench.device == "cuda" else ""
    peak, planned = peak_flops(kind), rank_memory(run, 1).bytes
    shape = f"{name}, {batch_size} x {length} tokens"
    figures = [
        CheckedFigure(
            f"{shape}: loss of random tokens", cross_entropy, "nats/token", least=1.0, most=20.0
        ),
        CheckedFigure(f"{shape}: step", seconds, "s"),
        CheckedFigure(f"{shape}: tokens", batch_size * length / seconds, "tokens/s"),
    ]
    if peak:
        note = "model FLOPs over the dense bf16 peak; below the limit the GPU waits for its host"
        share = flops / seconds / peak
        figures.append(CheckedFigure(f"{shape}: MFU", share, "of the peak", least=0.15, note=note))
    if memory := workbench.peak_memory():
        note = f"planned {planned / 1e9:.1f} GB, of which 4 GB for what the allocator does not see"
        name_of_ratio = f"{shape}: peak memory over the planned"
        figures += [
            CheckedFigure(f"{shape}: peak memory", memory / 1e9, "GB"),
            CheckedFigure(name_of_ratio, memory / planned, "", least=0.5, most=1.0, note=note),
        ]
    return figures


def _timed_steps(run: RunConfig, batch_size: int, length: int) -> tuple[float, float]:
    """Median seconds of an update, and the loss of the first."""
    from train.distributed import start
    from train.engines import build_engine

    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).mul_(0.02)

    def initial(name: str) -> Tensor:
        """Random numbers that repeat: a billion of the run's own take some ten seconds."""
        shape = torch.Size(parameter_shapes(run.model)[name])
        if "norm" in name:
            return torch.ones(shape)
        return tile.repeat(-(-shape.numel() // len(tile)))[: shape.numel()].view(shape)

    engine = build_engine(run, start())
    engine.start_from(initial)
    batch = Batch.of(random_tokens(batch_size, length + 1, run.model.vocab_size))
    batch = batch.of_replica(engine.replica)
    seconds, first = [], 0.0
    for index in range(ROUNDS + 2):
        began_at = time.perf_counter()
        # whose figures are read: it waits for the GPU
        result = engine.train_step(batch, 1e-4, lambda _: True)
        seconds.append(time.perf_counter() - began_at)
        first = first if index else result.loss
    engine.close()
    return statistics.median(seconds[2:]), first
