"""Training: losses against the CPU's and against other kernels', resuming, saves, step times and
memory.
"""

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
from tests.gpu.figures import Figure, SkippedError
from tests.gpu.place import Place, make_run, random_tokens, train
from train.data.batches import Batch
from train.model.config import ModelConfig
from train.model.families import parameter_shapes
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


def cpu_and_gpu(place: Place) -> list[Figure]:
    """The same run in fp32 on the CPU and on the GPU, then resumed there from its middle."""
    sizes = place.sizes
    steps = sizes.compared_steps
    for name in ("cpu", "gpu"):
        make_run(
            *(place.work / name, sizes.compared, sizes.compared_length),
            steps=steps,
            observe_every_steps=steps // 2,
            probe=ProbeConfig(every_steps=steps // 2, sequences=4, group_size=16),
        )
        train(place.work / name, "cpu" if name == "cpu" else place.device, "--deterministic")
    again = place.work / "again"
    shutil.copytree(place.work / "gpu", again)
    directory = RunDirectory(again)
    shutil.rmtree(directory.checkpoint(steps))
    directory.status_json.unlink()
    train(again, place.device, "--deterministic", "--profile", f"{steps - 1}:{steps + 1}")
    assert {"cpu": 1, "cuda": 2}[place.device] == len(list(directory.profile.iterdir()))
    first, resumed = (
        _weights(place.work / name, steps, sizes.compared) for name in ("gpu", "again")
    )
    difference = max(float((first[name] - resumed[name]).abs().max()) for name in first)
    return [
        Figure(
            f"losses of {steps} steps in fp32, CPU against GPU",
            apart(losses(place.work / "cpu"), losses(place.work / "gpu")),
            "nats/token, largest difference",
            most=1e-3,
        ),
        Figure(
            f"losses with weights rounded at step {steps // 2}, CPU against GPU",
            apart(*(_rounded_losses(place.work / name, steps // 2) for name in ("cpu", "gpu"))),
            "nats/token, largest difference",
            most=1e-2,  # a weight midway between two points may take the other one
        ),
        Figure(
            f"weights after resuming at step {steps // 2}, against never stopped",
            difference,
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


def deepspeed(place: Place) -> list[Figure]:
    """The same run in bf16 by megatron-core and by DeepSpeed."""
    if not find_spec("deepspeed"):
        raise SkippedError("deepspeed is not installed")
    return [
        compared(
            place,
            "megatron-core against DeepSpeed in bf16",
            {"precision": "bf16", "engine": "megatron"},
            {"precision": "bf16", "engine": "deepspeed"},
            most=2e-2,
        )
    ]


def compared(place: Place, what: str, *each: dict[str, Any], most: float) -> Figure:
    """The losses of two runs that differ in these settings."""
    sizes = place.sizes
    runs = [place.work / str(number) for number in range(len(each))]
    for run, settings in zip(runs, each, strict=True):
        make_run(
            *(run, sizes.compared, sizes.compared_length), steps=sizes.compared_steps, **settings
        )
        train(run, place.device)
    return Figure(
        f"losses of {sizes.compared_steps} steps, {what}",
        apart(*map(losses, runs)),
        "nats/token, largest difference",
        most=most,
    )


def saves(place: Place) -> list[Figure]:
    """Seconds of the stall of an asynchronous save, and of the save itself.

    A save waits for the one before it, and the last for nothing but itself: of four, far enough
    apart, the second and third are those of a run in full swing. The first makes its memory.
    """
    sizes = place.sizes
    between = sizes.steps_between_saves
    run = make_run(
        place.work / "saves",
        sizes.saved,
        sizes.saved_length,
        steps=4 * between,
        precision="bf16",
        save_steps=tuple(range(between, 4 * between + 1, between)),
    )
    train(place.work / "saves", place.device)
    rows = [
        row
        for row in read_metrics(RunDirectory(place.work / "saves").metrics)
        if "save_stall_seconds" in row
    ]
    stall = max(row["save_stall_seconds"] for row in rows[1:3])
    whole = min(row["save_seconds"] for row in rows[1:3])
    parameters = _parameters_of(run.model)
    size = f"{parameters / 1e6:.0f}M parameters, {14 * parameters / 1e9:.2g} GB"
    note = "an asynchronous save is to hold training up for less than half of its own time"
    return [
        Figure(
            f"asynchronous save of {size}: stall", stall, "s", most=max(0.5 * whole, 0.5), note=note
        ),
        Figure(f"asynchronous save of {size}: until it is complete", whole, "s"),
        Figure(f"first save of {size}: stall", rows[0]["save_stall_seconds"], "s"),
    ]


def snapshots(place: Place) -> list[Figure]:
    """Two snapshots in a row, each of values that change once it is fenced off."""
    memory = SnapshotMemory(torch.device(place.device))
    elements = _parameters_of(place.sizes.saved)
    live = torch.arange(elements, dtype=torch.int32, device=place.device)
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
        Figure(f"two snapshots of {size}", apart_by, "largest difference", most=0.0),
        Figure(f"snapshot of {size}: seconds of the host", waits[1], "s"),
    ]


def _parameters_of(model: ModelConfig) -> int:
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(model).values())


def speed(place: Place, name: str) -> list[Figure]:
    """Step time, MFU and peak memory of a shape in bf16 on one GPU, torch's kernels, against the
    planner.
    """
    model, micro = place.sizes.timed[name]
    batch_size, length = micro * place.sizes.timed_micro, place.sizes.timed_length
    run = make_run(
        place.work / name,
        model,
        length,
        steps=2,
        precision="bf16",
        batch_size=batch_size,
        micro_batch_size=micro,
    )
    seconds, cross_entropy = _timed_steps(run, batch_size, length)
    flops = flops_per_token(model, length) * batch_size * length
    kind = torch.cuda.get_device_name() if place.device == "cuda" else ""
    peak, planned = peak_flops(kind), rank_memory(run, 1).bytes
    shape = f"{name}, {batch_size} x {length} tokens"
    figures = [
        Figure(
            f"{shape}: loss of random tokens", cross_entropy, "nats/token", least=1.0, most=20.0
        ),
        Figure(f"{shape}: step", seconds, "s"),
        Figure(f"{shape}: tokens", batch_size * length / seconds, "tokens/s"),
    ]
    if peak:
        note = "model FLOPs over the dense bf16 peak; below the limit the GPU waits for its host"
        figures.append(
            Figure(f"{shape}: MFU", flops / seconds / peak, "of the peak", least=0.15, note=note)
        )
    if memory := place.peak_memory():
        note = f"planned {planned / 1e9:.1f} GB, of which 4 GB for what the allocator does not see"
        figures.append(Figure(f"{shape}: peak memory", memory / 1e9, "GB"))
        figures.append(
            Figure(
                f"{shape}: peak memory over the planned",
                memory / planned,
                "",
                least=0.5,
                most=1.0,
                note=note,
            )
        )
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
        result = engine.train_step(
            batch, 1e-4, lambda _: True
        )  # whose figures are read: it waits for the GPU
        seconds.append(time.perf_counter() - began_at)
        first = first if index else result.loss
    engine.close()
    return statistics.median(seconds[2:]), first
