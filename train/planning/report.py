"""The needs of runs, printed before they start: `python -m train plan`. GB are 10^9 bytes."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from base.errors import UserError
from train.planning.flops import GPUS, assumed_mfu, flops_per_token
from train.planning.memory import (
    RankMemory,
    checkpoint_bytes,
    parameter_count,
    rank_memory,
    snapshot_bytes,
)
from train.planning.plan import Layout, fitting_layouts
from train.run.config import RunConfig
from train.run.schedules import first_step

SHOWN_LAYOUTS = 8


def print_plans(runs: Sequence[RunConfig], *, nodes: int, gpus_per_node: int, gpu: str) -> None:
    """Print time, disk, memory and layouts that fit of every run, and the sums."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    kind, gpus = GPUS[gpu], nodes * gpus_per_node
    console.print(
        f"{gpus} GPUs: {nodes} x {gpus_per_node} {gpu}, {_gigabytes(kind.memory_bytes)} and"
        f" {kind.peak_flops / 1e12:,.0f} TFLOP/s in bf16 each. All figures are estimates."
    )
    hours = 0.0
    for run in runs:
        hours += _print_time_and_disk(console, run, kind.peak_flops, gpus)

        # The layout of its run.json, which need not divide these GPUs.
        try:
            console.print(_memory_table(rank_memory(run, gpus), kind.memory_bytes))
            host = snapshot_bytes(run, gpus)
            console.print(f"  host memory of a rank for the copies of a save: {_gigabytes(host)}")
            if run.probe:
                cost = run.probe.cost(run.batch_size, run.data_parallel_size(gpus))
                console.print(f"  probe of quantization: {cost:.3%} of the time, by FLOPs")
        except UserError as error:
            console.print(f"  memory: batch and layout do not divide: {error}")

        # Other layouts that fit.
        layouts = fitting_layouts(run, gpus, gpus_per_node=gpus_per_node, gpu=kind)
        if layouts:
            console.print(_layout_table(layouts))
        else:
            console.print(f"  no layout of {gpus} {gpu} fits; give more GPUs or larger ones")

    if len(runs) > 1:
        disk = sum(checkpoint_bytes(run).kept for run in runs)
        console.print(
            f"\nin sum: {hours:,.0f} GPU-hours, {hours / gpus / 24:.2f} days one after another,"
            f" {_gigabytes(disk)} of checkpoints"
        )


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def _print_time_and_disk(console: Console, run: RunConfig, peak_flops: float, gpus: int) -> float:
    """Print them; return the GPU-hours."""
    flops = flops_per_token(run.model, run.data.sequence_length)
    speed = assumed_mfu(run.model) * peak_flops / flops
    tokens = run.total_tokens - run.tokens_at(first_step(run))  # a branch trains on fewer
    hours = tokens / speed / 3600
    console.print(
        f"\n{run.name}: {parameter_count(run):,} parameters, {flops / 1e9:.1f} GFLOP per token\n"
        f"  time: {tokens:,} tokens at {speed:,.0f} tokens/s/GPU (assumed MFU"
        f" {assumed_mfu(run.model):.0%}): {hours:,.0f} GPU-hours, {hours / gpus / 24:.2f} days"
    )
    disk = checkpoint_bytes(run)
    console.print(
        f"  disk: {disk.full} checkpoints of {_gigabytes(disk.full_each)},"
        f" {disk.weights + disk.averages} of weights or averages, {_gigabytes(disk.weights_each)}:"
        f" {_gigabytes(disk.kept)}, and {_gigabytes(disk.rotated)} of restart checkpoints until"
        " the end"
    )
    return hours


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
    title = "  layouts that fit by the estimate, the simplest first"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("replica")
    for heading in ("micro batch", "recompute", "memory"):
        table.add_column(heading, justify="right")
    for layout in layouts[:SHOWN_LAYOUTS]:
        settings = [str(layout.changes[key]) for key in ("micro_batch_size", "recompute")]
        table.add_row(layout.words, *settings, _gigabytes(layout.memory.bytes))
    return table
