"""The needs of runs before they start, as `python -m train plan` prints them.

The answer comes first: which runs fit, their hours and their disk. GB are 10^9 bytes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from base.aligned import aligned, shortened
from base.errors import UserError
from base.quantities import significant, size_in_words
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
from train.planning.speed import EXPECTED, FAST, SLOW, GpuHours, Rates, Roofline, gpu_hours
from train.run.config import RunConfig
from train.run.schedules import first_step, perturbed_in_words

SHOWN_LAYOUTS = 8
SHOWN_RUNS = 16


class PlannedGpus(NamedTuple):
    """The GPUs that runs are planned for."""

    nodes: int
    gpus_per_node: int
    gpu: str  # a key of GPUS

    @property
    def gpus(self) -> int:
        """Return the number of all GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def kind(self) -> GpuKind:
        """Return the rates and the memory of each."""
        return GPUS[self.gpu]

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} {self.gpu}"

    def fit(self, run: RunConfig) -> RunConfig | None:
        """Return the run in the layout that it gets, None where none fits."""
        return fit(run, self.gpus, gpus_per_node=self.gpus_per_node, gpu=self.kind)

    def speed(self, run: RunConfig, rates: Rates = EXPECTED) -> Roofline:
        """Return the time of a step."""
        return Roofline(run, self.gpus, self.gpus_per_node, self.kind, rates)

    def hours(self, runs: Sequence[RunConfig]) -> GpuHours:
        """Return the GPU-hours of runs that each take all GPUs."""
        layouts = [(run, self.gpus) for run in runs]
        return gpu_hours(layouts, gpus_per_node=self.gpus_per_node, gpu=self.kind)

    def time(self, hours: GpuHours) -> str:
        """Return how long the expected hours take, in the unit that suits."""
        each = hours.expected / self.gpus
        for unit, length in (("days", 24.0), ("hours", 1.0), ("minutes", 1 / 60)):
            if each >= length:
                return f"{significant(each / length)} {unit}"
        return "less than a minute"


def plan_lines(
    runs: Sequence[RunConfig], machine: PlannedGpus, *, whole: bool = False
) -> list[str]:
    """Return the sum of all runs, a row for each, and with `whole` the parts of every estimate."""
    fitted = {run: best for run in runs if (best := machine.fit(run))}
    heads = ("run", "GPU-hours", "MFU", "memory", "disk", "micro batch", "layout")
    rows = [
        _row(run, fitted[run], machine)
        if run in fitted
        else (run.name, "fits no layout", *[""] * (len(heads) - 2))
        for run in runs
    ]
    lines = [
        *_sum(runs, list(fitted.values()), machine),
        "",
        *shortened(aligned([heads, *rows], right={1, 2, 3, 4, 5}), SHOWN_RUNS),
        *dict.fromkeys(words for best in fitted.values() for words in _perturbed(best, machine)),
        "",
    ]
    if not whole:
        return [*lines, "estimates; --all prints their parts, and all layouts that fit"]
    lines.append(
        f"estimates, for {machine.kind.peak_flops / 1e12:,.0f} TFLOP/s in bf16 and"
        f" {size_in_words(machine.kind.memory_bytes)} of each GPU"
    )
    return [*lines, *(line for run in runs for line in _parts(run, machine))]


def _sum(runs: Sequence[RunConfig], fitted: Sequence[RunConfig], machine: PlannedGpus) -> list[str]:
    """Return how many runs fit, and what they take in all."""
    if len(fitted) < len(runs):
        left = f"{len(runs) - len(fitted)} of {len(runs)} runs"
        lines = [f"{left} fit no layout on {machine}; give more GPUs or larger ones"]
    else:
        who = f"{runs[0].name} fits" if len(runs) == 1 else f"all {len(runs)} runs fit"
        lines = [f"{who} on {machine}"]
    if fitted:
        hours = machine.hours(fitted)
        disk = size_in_words(sum(checkpoint_bytes(run).kept for run in runs))
        after = " one after another" if len(fitted) > 1 else ""
        lines.append(f"{hours} GPU-hours, {machine.time(hours)}{after}, {disk} of checkpoints")
    return lines


def _row(run: RunConfig, best: RunConfig, machine: PlannedGpus) -> tuple[str, ...]:
    """Return the cells of a run in the layout that it gets."""
    recompute = "" if best.recompute == "none" else f", recompute {best.recompute}"
    return (
        run.name,
        significant(machine.hours([best]).expected),
        f"{machine.speed(best).mfu:.0%}",
        size_in_words(rank_memory(best, machine.gpus).bytes),
        size_in_words(checkpoint_bytes(run).kept),
        str(best.micro_batch_size),
        in_words(best) + recompute,
    )


def _perturbed(run: RunConfig, machine: PlannedGpus) -> Iterator[str]:
    """Yield what a perturbation adds to the steps that have it."""
    if words := perturbed_in_words(run):
        speed = machine.speed(run)
        yield f"{words}, which take {speed.perturbed_seconds / speed.seconds:.3g} times as long"


def _parts(run: RunConfig, machine: PlannedGpus) -> Iterator[str]:
    """Yield the parts of a run's estimate: speed, disk, memory as configured, and layouts."""
    gpus, kind = machine.gpus, machine.kind
    gflop = significant(flops_per_token(run.model, run.data.sequence_length) / 1e9)
    yield ""
    yield f"{run.name}: {parameter_count(run):,} parameters, {gflop} GFLOP per token"
    if best := machine.fit(run):
        yield _speed(best, machine)
    yield _disk(run)

    # The layout of its run.json, which need not divide these GPUs.
    try:
        yield from _memory(rank_memory(run, gpus), kind.memory_bytes)
        if words := communication_words(run, gpus):
            yield f"  communication: {words}"
        host = size_in_words(snapshot_bytes(run, gpus))
        yield f"  host memory of a rank for the copies of a save: {host}"
        if run.probe:
            cost = run.probe.cost(run.batch_size, run.data_parallel_size(gpus))
            yield f"  probe of quantization: {cost:.3%} of the time, by FLOPs"
    except UserError as error:
        yield f"  memory: batch and layout do not divide: {error}"

    # All layouts that fit, with larger micro batches than the run's, too.
    largest = run.model_copy(update={"micro_batch_size": math.gcd(*run.batch_sizes)})
    layouts = fitting_layouts(largest, gpus, gpus_per_node=machine.gpus_per_node, gpu=kind)
    if layouts:
        yield from _layouts(layouts)
    else:
        yield f"  no layout of {gpus} {machine.gpu} fits; give more GPUs or larger ones"


def _speed(run: RunConfig, machine: PlannedGpus) -> str:
    """Return the tokens and the speed of training in the layout that the run gets."""
    expected, fast, slow = (machine.speed(run, rates) for rates in (EXPECTED, FAST, SLOW))
    tokens = run.total_tokens - run.tokens_at(first_step(run))  # a branch trains on fewer
    speed = run.tokens_per_step / expected.seconds / machine.gpus
    return (
        f"  speed: {tokens:,} tokens at {speed:,.0f} tokens/s/GPU, MFU {expected.mfu:.0%}"
        f" ({slow.mfu:.0%} to {fast.mfu:.0%})"
    )


def _disk(run: RunConfig) -> str:
    disk = checkpoint_bytes(run)
    return (
        f"  disk: {disk.full} checkpoints of {size_in_words(disk.full_each)},"
        f" {disk.weights + disk.averages} of weights or averages,"
        f" {size_in_words(disk.weights_each)}; {size_in_words(disk.rotated)} of restart"
        " checkpoints until the end"
    )


def _memory(memory: RankMemory, gpu_bytes: int) -> list[str]:
    """Return the memory of a GPU by component, in the layout of the run.json."""
    verdict = "fits" if memory.bytes <= gpu_bytes else "DOES NOT FIT"
    total = f"{size_in_words(memory.bytes)} of {size_in_words(gpu_bytes)}"
    title = (
        f"  memory of a GPU as run.json has it, pipeline stage {memory.stage}: {total}: {verdict}"
    )
    rows = [(f"    {name}", size_in_words(count)) for name, count in memory.components.items()]
    return [title, *aligned(rows, right={1})]


def _layouts(layouts: list[Layout]) -> list[str]:
    rows = [("    replica", "micro batch", "recompute", "memory", "MFU")]
    for run, memory, speed in layouts[:SHOWN_LAYOUTS]:
        settings = str(run.micro_batch_size), run.recompute
        size = size_in_words(memory.bytes)
        rows.append((f"    {in_words(run)}", *settings, size, f"{speed.mfu:.1%}"))
    return [
        f"  the fastest of {len(layouts)} layouts that fit",
        *aligned(rows, right={1, 2, 3, 4}),
    ]
