"""The layouts of a run that fit into the memory of GPUs, those that cost the least time first."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from base.errors import UserError
from train.planning.flops import GpuKind
from train.planning.memory import RankMemory, rank_memory
from train.run.config import RunConfig

RECOMPUTE = ("none", "selective", "layers")  # "layers" adds a third to the time, as a 4th pass


class Layout(NamedTuple):
    """A layout of a run that fits into memory."""

    words: str  # how a replica is split
    changes: dict[str, Any]  # to run.json
    memory: RankMemory


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _shardings(config: RunConfig, gpus_per_node: int) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield ways to split a replica, the simplest first: its GPUs, changes to run.json, words.

    Stages of a pipeline send less than tensor ranks do.
    """
    if config.engine == "deepspeed":
        for stage in (1, 2):
            yield 1, {"zero": {"stage": stage}}, f"ZeRO stage {stage}"
        return
    splits = itertools.product(_divisors(gpus_per_node), _divisors(config.model.num_hidden_layers))
    for tensor, pipeline in sorted(splits, key=lambda split: (split[0] * split[1], split[0])):
        sequence = tensor > 1 and config.data.sequence_length % tensor == 0
        changes = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence}
        words = f"tensor {tensor}{' + sequence' if sequence else ''}, pipeline {pipeline}"
        yield tensor * pipeline, {"parallel": changes}, words


def fitting_layouts(
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu: GpuKind
) -> list[Layout]:
    """Return the layouts that fit into memory, each with the largest micro batch that does.

    The search covers tensor sizes that divide a node, pipeline sizes that divide the layers, micro
    batches up to the run's own, and `recompute`. Those that recompute whole layers come last, then
    the simplest split comes first, and of equals the one that recomputes nothing.
    """
    # The batches of all stages of the warm-up have to divide over the replicas.
    layouts, common = [], math.gcd(*config.batch_sizes)
    for ranks, split, words in _shardings(config, gpus_per_node):
        replicas = world_size // ranks
        if world_size % ranks or common % replicas:
            continue
        sizes = [size for size in _divisors(common // replicas) if size <= config.micro_batch_size]
        for recompute in RECOMPUTE:
            for size in reversed(sizes):
                changes = split | {"recompute": recompute, "micro_batch_size": size}
                changed = _changed(config, changes)
                memory = changed and memory_if_it_fits(changed, world_size, gpu.memory_bytes)
                if memory:
                    layouts.append(Layout(words, changes, memory))
                    break
    return sorted(layouts, key=lambda layout: layout.changes["recompute"] == "layers")


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig | None:
    """Return the run with another layout; None if the configuration refuses it."""
    try:
        return RunConfig.model_validate(config.model_dump() | changes)
    except ValidationError:
        return None


def memory_if_it_fits(config: RunConfig, world_size: int, gpu_bytes: int) -> RankMemory | None:
    """Return the memory of a rank; None if a GPU has less, or batch and layout do not divide."""
    try:
        memory = rank_memory(config, world_size)
    except UserError:
        return None
    return memory if memory.bytes <= gpu_bytes else None


def fit(
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu: GpuKind
) -> RunConfig | None:
    """Return the run in its own layout if that fits, else in the first that does, or None."""
    if memory_if_it_fits(config, world_size, gpu.memory_bytes):
        return config
    layouts = fitting_layouts(config, world_size, gpus_per_node=gpus_per_node, gpu=gpu)
    return _changed(config, layouts[0].changes) if layouts else None


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
