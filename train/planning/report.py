"""The needs of runs, printed before they start: `python -m train plan`. GB are 10^9 bytes."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from base.errors import UserError
from train.planning.communication import communication_words
from train.planning.flops import GPUS, GpuKind, flops_per_token
from train.planning.memory import (
    RankMemory,
    checkpoint_bytes,
    parameter_count,
    rank_memory,
    snapshot_bytes,
)
from train.planning.plan import Layout, fit, fitting_layouts, in_words
from train.planning.speed import EXPECTED, FAST, SLOW, Roofline, gpu_hours
from train.run.config import RunConfig
from train.run.schedules import first_step, perturbed_in_words

SHOWN_LAYOUTS = 8


def print_plans(runs: Sequence[RunConfig], *, nodes: int, gpus_per_node: int, gpu: str) -> None:
    """Print time, disk, memory and layouts that fit of every run, and the sums."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    kind, gpus = GPUS[gpu], nodes * gpus_per_node
    console.print(
        f"{gpus} GPUs: {nodes} x {gpus_per_node} {gpu}, {_gigabytes(kind.memory_bytes)} and"
        f" {kind.peak_flops / 1e12:,.0f} TFLOP/s in bf16 each. All figures are estimates."
    )
    fitted = []
    for run in runs:
        flops = flops_per_token(run.model, run.data.sequence_length)
        console.print(
            f"\n{run.name}: {parameter_count(run):,} parameters, {flops / 1e9:.1f} GFLOP per token"
        )
        best = fit(run, gpus, gpus_per_node=gpus_per_node, gpu=kind)
        if best:
            fitted.append((best, gpus))
            console.print(_time(best, gpus, gpus_per_node, kind))
        console.print(_disk(run))

        # The layout of its run.json, which need not divide these GPUs.
        try:
            console.print(_memory_table(rank_memory(run, gpus), kind.memory_bytes))
            if words := communication_words(run, gpus):
                console.print(f"  communication: {words}")
            host = snapshot_bytes(run, gpus)
            console.print(f"  host memory of a rank for the copies of a save: {_gigabytes(host)}")
            if run.probe:
                cost = run.probe.cost(run.batch_size, run.data_parallel_size(gpus))
                console.print(f"  probe of quantization: {cost:.3%} of the time, by FLOPs")
        except UserError as error:
            console.print(f"  memory: batch and layout do not divide: {error}")

        # All layouts that fit, with larger micro batches than the run's, too.
        largest = run.model_copy(update={"micro_batch_size": math.gcd(*run.batch_sizes)})
        layouts = fitting_layouts(largest, gpus, gpus_per_node=gpus_per_node, gpu=kind)
        if layouts:
            console.print(_layout_table(layouts))
        else:
            console.print(f"  no layout of {gpus} {gpu} fits; give more GPUs or larger ones")

    if len(runs) > 1:
        hours = gpu_hours(fitted, gpus_per_node=gpus_per_node, gpu=kind)
        disk = sum(checkpoint_bytes(run).kept for run in runs)
        if left := len(runs) - len(fitted):
            console.print(
                f"\n{left} of {len(runs)} runs fit no layout; their time is not in the sum"
            )
        console.print(
            f"\nin sum: {hours} GPU-hours, {hours.expected / gpus / 24:.2f} days one after another,"
            f" {_gigabytes(disk)} of checkpoints"
        )


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def _time(run: RunConfig, gpus: int, gpus_per_node: int, gpu: GpuKind) -> str:
    """Return what training takes in words: in the layout that the run gets."""
    machine = gpus, gpus_per_node, gpu
    expected, fast, slow = (Roofline(run, *machine, rates) for rates in (EXPECTED, FAST, SLOW))
    hours = gpu_hours([(run, gpus)], gpus_per_node=gpus_per_node, gpu=gpu)
    tokens = run.total_tokens - run.tokens_at(first_step(run))  # a branch trains on fewer
    speed = run.tokens_per_step / expected.seconds / gpus
    return (
        f"  time: {tokens:,} tokens at {speed:,.0f} tokens/s/GPU, MFU {expected.mfu:.0%}"
        f" ({slow.mfu:.0%} to {fast.mfu:.0%}): {hours} GPU-hours,"
        f" {hours.expected / gpus / 24:.2f} days\n"
        f"    by {in_words(run)}, micro batch {run.micro_batch_size}, recompute {run.recompute}"
        f"{_perturbed(expected)}"
    )


def _perturbed(speed: Roofline) -> str:
    """Return what a perturbation adds to the steps that have it, on a line of its own."""
    words = perturbed_in_words(speed.run)
    share = speed.perturbed_seconds / speed.seconds
    return f"\n    {words}, which take {share:.3g} times as long" if words else ""


def _disk(run: RunConfig) -> str:
    disk = checkpoint_bytes(run)
    return (
        f"  disk: {disk.full} checkpoints of {_gigabytes(disk.full_each)},"
        f" {disk.weights + disk.averages} of weights or averages, {_gigabytes(disk.weights_each)}:"
        f" {_gigabytes(disk.kept)}, and {_gigabytes(disk.rotated)} of restart checkpoints until"
        " the end"
    )


def _memory_table(memory: RankMemory, gpu_bytes: int) -> Table:
    verdict = "fits" if memory.bytes <= gpu_bytes else "DOES NOT FIT"
    title = f"  memory of a GPU, pipeline stage {memory.stage}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_footer=True)
    table.add_column("component", footer=f"of {_gigabytes(gpu_bytes)}: {verdict}")
    table.add_column("bytes", justify="right", footer=_gigabytes(memory.bytes))
    for name, count in memory.components.items():
        table.add_row(name, _gigabytes(count))
    return table


def _layout_table(layouts: list[Layout]) -> Table:
    title = "  layouts that fit by the estimate, the fastest first"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("replica")
    for heading in ("micro batch", "recompute", "memory", "MFU"):
        table.add_column(heading, justify="right")
    for run, memory, speed in layouts[:SHOWN_LAYOUTS]:
        settings = str(run.micro_batch_size), run.recompute
        table.add_row(in_words(run), *settings, _gigabytes(memory.bytes), f"{speed.mfu:.1%}")
    return table
