"""A plan as tables on the terminal. GB are 10^9 bytes."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from train.planning.memory import RankMemory
from train.planning.plan import Cluster, RunPlan

SHOWN_LAYOUTS = 8
EXPLANATION = (
    "exact: as in built engines, but for padding. estimated: activations counted tensor by tensor"
    " as in\narXiv 2205.05198 with a fused attention, logits in fp32 with their gradient, the"
    " framework a constant"
)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def _verdict(memory: RankMemory, cluster: Cluster) -> str:
    return "fits" if memory.bytes <= cluster.kind.memory_bytes else "DOES NOT FIT"


def print_plans(plans: Sequence[RunPlan], cluster: Cluster) -> None:
    """Print every run's memory, layouts that fit, time and disk, and the sums."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{cluster.world_size} GPUs: {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu},"
        f" {_gigabytes(cluster.kind.memory_bytes)} and {cluster.kind.peak_flops / 1e12:,.0f}"
        " TFLOP/s in bf16 each"
    )
    for plan in plans:
        _print_run(console, plan, cluster)
    console.print(EXPLANATION)
    if len(plans) > 1:
        disk = sum(plan.checkpoints.trajectory for plan in plans)
        console.print(
            f"\nin sum: {sum(plan.gpu_hours for plan in plans):,.0f} GPU-hours,"
            f" {sum(plan.days for plan in plans):.2f} days one after another, {_gigabytes(disk)} of"
            " checkpoints"
        )


def _print_run(console: Console, plan: RunPlan, cluster: Cluster) -> None:
    console.print(
        f"\n{plan.name}: {plan.parameters:,} parameters, {plan.flops_per_token / 1e9:.1f} GFLOP per"
        f" token\n  time: {plan.tokens:,} tokens at {plan.tokens_per_second_per_gpu:,.0f}"
        f" tokens/s/GPU (assumed MFU {plan.mfu:.0%}): {plan.gpu_hours:,.0f} GPU-hours,"
        f" {plan.days:.2f} days"
    )
    disk = plan.checkpoints
    console.print(
        f"  disk: {_gigabytes(disk.each)} a checkpoint; {disk.permanent} permanent and up to"
        f" {disk.restarts} restart checkpoints, {disk.averages} averages of"
        f" {_gigabytes(disk.average_each)}: {_gigabytes(disk.trajectory)}"
    )
    if plan.memory is None:
        console.print(f"  memory: batch and layout do not divide: {plan.refusal}")
    else:
        console.print(
            f"  batch: {plan.replicas} replicas, {plan.microbatches} microbatches a step on each"
        )
        console.print(_memory_table(plan.memory, cluster))
    if not plan.layouts:
        console.print(
            f"  no layout of {cluster.world_size} {cluster.gpu} fits; give more GPUs or larger ones"
        )
        return
    table = Table(
        box=box.SIMPLE_HEAD,
        title="  layouts that fit by the estimate, the simplest first",
        title_justify="left",
    )
    table.add_column("replica")
    for heading in ("data", "micro batch", "recompute", "memory"):
        table.add_column(heading, justify="right")
    for layout in plan.layouts[:SHOWN_LAYOUTS]:
        settings = [str(layout.changes[key]) for key in ("micro_batch_size", "recompute")]
        table.add_row(
            layout.words, str(layout.replicas), *settings, _gigabytes(layout.memory.bytes)
        )
    console.print(table)


def _memory_table(memory: RankMemory, cluster: Cluster) -> Table:
    title = f"  memory of a GPU, pipeline stage {memory.stage}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_footer=True)
    table.add_column(
        "component",
        footer=f"of {_gigabytes(cluster.kind.memory_bytes)}: {_verdict(memory, cluster)}",
    )
    table.add_column("bytes", justify="right", footer=_gigabytes(memory.bytes))
    table.add_column("", footer="estimated")
    for part in memory.components:
        table.add_row(part.name, _gigabytes(part.bytes), "exact" if part.exact else "estimated")
    return table
