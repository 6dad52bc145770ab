"""Training: losses against the CPU and other kernels, resuming, saves."""

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
from tests.gpu.figures import CheckedFigure, SkippedError, apart
from tests.gpu.workbench import Workbench, begin, make_run, train
from train.model.config import Llama3Scaling, ModelConfig, parameter_shapes
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.probe import ProbeConfig
from train.snapshot_memory import SnapshotMemory


def losses(directory: Path) -> list[float]:
    """Loss of every step of a run, nats per token."""
    return [row["loss"] for row in read_metrics(RunDirectory(directory).metrics) if "loss" in row]


def cpu_and_gpu(workbench: Workbench) -> list[CheckedFigure]:
    """The same run in fp32 on the CPU and on the GPU, then resumed there from its middle."""
    sizes = workbench.sizes
    steps = sizes.compared_steps
    trainings = []
    for name, device in (("cpu", "cpu"), ("gpu", workbench.device)):
        make_run(
            *(workbench.work / name, sizes.compared, sizes.compared_length),
            steps=steps,
            observe_every_steps=steps // 2,
            probe=ProbeConfig(every_steps=steps // 2, sequences=4, group_size=16),
        )
        trainings.append(begin(workbench.work / name, device, "--deterministic"))
    for training in trainings:
        training.finish()
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


def tied(workbench: Workbench) -> list[CheckedFigure]:
    """A model whose head is its embedding, with Llama 3's rotary scaling, on CPU and GPU."""
    sizes, runs = workbench.sizes, list[Path]()
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    changes = {"tie_word_embeddings": True, "rope_scaling": scaling}
    model = sizes.compared.model_copy(update=changes)
    for name in ("cpu", workbench.device):
        runs.append(workbench.work / f"tied-{len(runs)}")
        make_run(runs[-1], model, sizes.compared_length, steps=sizes.compared_steps)
        train(runs[-1], name, "--deterministic")
    return [
        CheckedFigure(
            f"losses of {sizes.compared_steps} steps of a tied model in fp32, CPU against GPU",
            apart(*map(losses, runs)),
            "nats/token, largest difference",
            most=1e-3,
        )
    ]


def _rounded_losses(run: Path, step: int) -> list[float]:
    (row,) = (row for row in read_metrics(RunDirectory(run).metrics) if row["step"] == step)
    return [
        loss for name, loss in row.items() if re.fullmatch("quantization/.*/held_out_loss", name)
    ]


def _weights(run: Path, step: int, model: ModelConfig) -> dict[str, Tensor]:
    weights = MegatronWeights(RunDirectory(run).checkpoint(step), model)
    return {name: read_whole(weights, name) for name in weights.tensors}


def graphs(workbench: Workbench) -> list[CheckedFigure]:
    """The same run in bf16 with a CUDA graph of the microbatch and without: weights and time."""
    if workbench.device == "cpu":
        raise SkippedError("CUDA graphs need a GPU")
    sizes = workbench.sizes
    steps = sizes.compared_steps
    weights, seconds = [], []
    for graphs in (False, True):
        run = workbench.work / str(graphs)
        make_run(
            *(run, sizes.compared, sizes.compared_length),
            steps=steps,
            precision="bf16",
            micro_batch_size=1,
            cuda_graphs=graphs,
        )
        train(run, workbench.device, "--deterministic")
        weights.append(_weights(run, steps, sizes.compared))
        rows = read_metrics(RunDirectory(run).metrics)
        speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        seconds.append(8 * sizes.compared_length / statistics.median(speeds[steps // 2 :]))
    plain, replayed = weights
    difference = max(float((plain[name] - replayed[name]).abs().max()) for name in plain)
    what = "CUDA graph of a microbatch"
    return [
        CheckedFigure(
            f"{what}: weights after {steps} steps, against none",
            difference,
            "largest difference",
            most=0.0,
        ),
        CheckedFigure(f"{what}: step without over step with", seconds[0] / seconds[1], "x"),
    ]


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
    trainings = []
    for run, settings in zip(runs, each, strict=True):
        make_run(
            *(run, sizes.compared, sizes.compared_length), steps=sizes.compared_steps, **settings
        )
        trainings.append(begin(run, workbench.device))
    for training in trainings:
        training.finish()
    return CheckedFigure(
        f"losses of {sizes.compared_steps} steps, {what}",
        apart(*map(losses, runs)),
        "nats/token, largest difference",
        most=most,
    )


def saves(workbench: Workbench) -> list[CheckedFigure]:
    """Seconds of the stall of an asynchronous save, and of the save itself.

    A save waits for the one before it, and the last for nothing but itself: of three, far enough
    apart, the second is that of a run in full swing. The first makes its memory.
    """
    sizes = workbench.sizes
    between = sizes.steps_between_saves
    run = make_run(
        workbench.work / "saves",
        sizes.saved,
        sizes.saved_length,
        steps=3 * between,
        precision="bf16",
        batch_size=sizes.saved_batch,
        save_steps=tuple(range(between, 3 * between + 1, between)),
    )
    train(workbench.work / "saves", workbench.device)
    first, second, _ = (
        row
        for row in read_metrics(RunDirectory(workbench.work / "saves").metrics)
        if "save_stall_seconds" in row
    )
    stall, whole = second["save_stall_seconds"], second["save_seconds"]
    parameters = _parameters_of(run.model)
    size = f"{parameters / 1e6:.0f}M parameters, {14 * parameters / 1e9:.2g} GB"
    note = "an asynchronous save is to hold training up for less than half of its own time"
    return [
        CheckedFigure(
            f"asynchronous save of {size}: stall", stall, "s", most=max(0.5 * whole, 0.5), note=note
        ),
        CheckedFigure(f"asynchronous save of {size}: until it is complete", whole, "s"),
        CheckedFigure(f"first save of {size}: stall", first["save_stall_seconds"], "s"),
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
