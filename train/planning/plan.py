"""The layouts of a run that fit into the memory of GPUs, the fastest first."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from base.errors import UserError
from train.planning.flops import Gpu
from train.planning.memory import RankMemory, rank_memory
from train.planning.speed import PESSIMISTIC, Roofline
from train.run.config import RunConfig


class Layout(NamedTuple):
    """A layout of a run that fits into memory."""

    words: str  # how a replica is split
    changes: dict[str, Any]  # to run.json
    memory: RankMemory
    speed: Roofline  # at pessimistic rates


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _shardings(config: RunConfig, gpus_per_node: int) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield ways to split a replica, the simplest first: its GPUs, changes to run.json, words."""
    if config.engine == "deepspeed":
        for stage in (1, 2):
            yield 1, {"zero": {"stage": stage}}, f"ZeRO stage {stage}"
        return
    splits = itertools.product(_divisors(gpus_per_node), _divisors(config.model.num_hidden_layers))
    for tensor, pipeline in sorted(splits, key=lambda split: (split[0] * split[1], split[1])):
        sequence = tensor > 1 and config.data.sequence_length % tensor == 0
        changes = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence}
        words = f"tensor {tensor}{' + sequence' if sequence else ''}, pipeline {pipeline}"
        yield tensor * pipeline, {"parallel": changes}, words


def fitting_layouts(
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu: Gpu
) -> list[Layout]:
    """Return the layouts that fit into memory, the fastest first, with their fastest micro batch.

    The search covers tensor sizes that divide a node, pipeline sizes that divide the layers, micro
    batches that divide a replica's share of the batch, and `recompute`. Layouts are ranked at the
    pessimistic rates: one that depends least on links and host loses little where these are faster.
    Of equals the simplest comes first.
    """
    layouts, common = [], math.gcd(*config.batch_sizes)
    for (ranks, split, words), recompute in itertools.product(
        _shardings(config, gpus_per_node), ("none", "selective", "layers")
    ):
        replicas = world_size // ranks
        if world_size % ranks or common % replicas:
            continue
        fitting = []
        for micro in _divisors(common // replicas):
            changes = split | {"recompute": recompute, "micro_batch_size": micro}
            changed = _changed(config, changes)
            memory = changed and memory_if_it_fits(changed, world_size, gpu.memory_bytes)
            if not changed or not memory:
                break
            speed = Roofline(changed, world_size, gpus_per_node, gpu, PESSIMISTIC)
            fitting.append(Layout(words, changes, memory, speed))
        if fitting:
            layouts.append(min(fitting, key=_seconds))
    return sorted(layouts, key=_seconds)


def _seconds(layout: Layout) -> float:
    return layout.speed.seconds


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


def fit(config: RunConfig, world_size: int, *, gpus_per_node: int, gpu: Gpu) -> RunConfig | None:
    """Return the run in its own layout if that fits, else in the fastest that does, or None."""
    if memory_if_it_fits(config, world_size, gpu.memory_bytes):
        return config
    layouts = fitting_layouts(config, world_size, gpus_per_node=gpus_per_node, gpu=gpu)
    return _changed(config, layouts[0].changes) if layouts else None
