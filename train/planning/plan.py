"""The layouts of a run that fit into the memory of GPUs, the fastest by the roofline first."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from base.errors import UserError
from train.planning.flops import GpuKind
from train.planning.memory import RankMemory, rank_memory
from train.planning.speed import Roofline
from train.run.config import RunConfig

RECOMPUTE = ("none", "selective", "layers")  # what fits in no other way costs the most time


class Layout(NamedTuple):
    """A run in a layout that fits into memory, and the time of its step."""

    run: RunConfig
    memory: RankMemory
    speed: Roofline


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _shardings(config: RunConfig, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Yield ways to split a replica, the simplest first, as changes to run.json."""
    if config.engine == "deepspeed":
        for stage in (1, 2, 3):
            yield {"zero": {"stage": stage}}
        return
    splits = itertools.product(_divisors(gpus_per_node), _divisors(config.model.num_hidden_layers))
    for tensor, pipeline in sorted(splits, key=lambda split: (split[0] * split[1], split[0])):
        sequence = tensor > 1 and config.data.sequence_length % tensor == 0
        yield {"parallel": {"tensor": tensor, "pipeline": pipeline, "sequence": sequence}}


def in_words(run: RunConfig) -> str:
    """Return how a replica is split."""
    if run.engine == "deepspeed":
        return f"ZeRO stage {run.zero.stage}"
    parallel = run.parallel
    sequence = " + sequence" if parallel.sequence else ""
    return f"tensor {parallel.tensor}{sequence}, pipeline {parallel.pipeline}"


def fitting_layouts(
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu: GpuKind
) -> list[Layout]:
    """Return the layouts that fit into memory, the fastest by the roofline first.

    The search covers tensor sizes that divide a node and pipeline sizes that divide the layers, or
    ZeRO's stages, and `recompute`; each with its fastest micro batch, up to the run's own. Of
    equals the simplest split comes first, and of its layouts the one that recomputes least.
    """
    machine = world_size, gpus_per_node, gpu
    layouts = [
        layout
        for split in _shardings(config, gpus_per_node)
        for recompute in RECOMPUTE
        if (layout := _fastest(config, split | {"recompute": recompute}, machine))
    ]
    return sorted(layouts, key=_hours)


def _hours(layout: Layout) -> float:
    return layout.speed.hours


def _fastest(
    config: RunConfig, changes: dict[str, Any], machine: tuple[int, int, GpuKind]
) -> Layout | None:
    """Return the changed run with its fastest micro batch that fits; None if none does."""
    world_size, _, gpu = machine
    try:
        changed = RunConfig.model_validate(config.model_dump() | changes)
    except ValidationError:  # the engine refuses it
        return None
    layouts = []
    # The batches of all stages of the warm-up have to divide over the replicas.
    for size in _divisors(math.gcd(*config.batch_sizes)):
        if size > config.micro_batch_size:
            break
        run = changed.model_copy(update={"micro_batch_size": size})
        memory = _memory_if_it_fits(run, world_size, gpu)
        if memory:
            layouts.append(Layout(run, memory, Roofline(run, *machine)))
    return min(layouts, key=_hours, default=None)


def _memory_if_it_fits(run: RunConfig, world_size: int, gpu: GpuKind) -> RankMemory | None:
    """Return the memory of a rank; None if a GPU has less, or batch and layout do not divide."""
    try:
        memory = rank_memory(run, world_size)
    except UserError:
        return None
    return memory if memory.bytes <= gpu.memory_bytes else None


def in_its_split(
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu: GpuKind
) -> RunConfig | None:
    """Return the run in its own split, or None where it does not fit without recomputing more.

    Where it does it may still recompute more, if a larger micro batch makes up for that.
    """
    machine = world_size, gpus_per_node, gpu
    own, *more = (
        _fastest(config, {"recompute": recompute}, machine)
        for recompute in RECOMPUTE[RECOMPUTE.index(config.recompute) :]
    )
    return min(filter(None, [own, *more]), key=_hours).run if own else None


def fit(
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu: GpuKind
) -> RunConfig | None:
    """Return the run in its own split if that fits, else in the fastest layout, or None."""
    own = in_its_split(config, world_size, gpus_per_node=gpus_per_node, gpu=gpu)
    if own:
        return own
    layouts = fitting_layouts(config, world_size, gpus_per_node=gpus_per_node, gpu=gpu)
    return layouts[0].run if layouts else None


def ranks_for(fitting: dict[int, RunConfig], gpus: int, runs: int) -> int:
    """Return the ranks of each run where so many runs share so many GPUs.

    Runs that recompute whole layers come last. Then as many GPUs as possible are at work, each
    replica on as few of them as possible, by as few ranks a run as that takes: four runs on two
    GPUs each communicate less than one after the other on eight.

    Args:
        fitting: the run in a layout that fits, by the number of its ranks.
        gpus: of the hardware.
        runs: that can train at once.

    Example: a run as it is on any number of GPUs.
        >>> from types import SimpleNamespace as Run
        >>> run = Run(recompute="none", parallel=Run(tensor=1, pipeline=1))
        >>> fitting = dict.fromkeys((1, 2, 4, 8), run)
        >>> [ranks_for(fitting, gpus=8, runs=runs) for runs in (1, 3, 4, 100)]
        [8, 4, 2, 1]
    """

    def cost(ranks: int) -> tuple[bool, int, int, int]:
        run, at_work = fitting[ranks], min(runs, gpus // ranks) * ranks
        split = run.parallel.tensor * run.parallel.pipeline
        return run.recompute == "layers", -at_work, split, ranks

    return min(fitting, key=cost)
