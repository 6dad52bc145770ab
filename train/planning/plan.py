"""The layouts of a run that fit into the memory of GPUs, the simplest first."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from base.errors import UserError
from train.planning.memory import RankMemory, rank_memory
from train.run.config import RunConfig

# At least, in proposed layouts: a pipeline idles for (stages - 1) / microbatches of its time.
MICROBATCHES_PER_STAGE = 4


class Layout(NamedTuple):
    """A layout of a run that fits into memory."""

    words: str  # how a replica is split
    replicas: int
    changes: dict[str, Any]  # to run.json
    memory: RankMemory


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _shardings(
    config: RunConfig, gpus_per_node: int
) -> Iterator[tuple[int, int, dict[str, Any], str]]:
    """Yield ways to split a replica, simplest first: GPUs, stages, changes to run.json, words."""
    if config.engine == "deepspeed":
        for stage in (1, 2):
            yield 1, 1, {"zero": {"stage": stage}}, f"ZeRO stage {stage}"
        return
    splits = itertools.product(_divisors(gpus_per_node), _divisors(config.model.num_hidden_layers))
    for tensor, pipeline in sorted(splits, key=lambda split: (split[0] * split[1], split[1])):
        sequence = tensor > 1 and config.data.sequence_length % tensor == 0
        changes = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence}
        words = f"tensor {tensor}{' + sequence' if sequence else ''}, pipeline {pipeline}"
        yield tensor * pipeline, pipeline, {"parallel": changes}, words


def fitting_layouts(
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu_bytes: int
) -> list[Layout]:
    """Return the layouts that fit into memory, the simplest first, with their largest micro batch.

    That is: fewest GPUs in a replica of the model, then fewest pipeline stages (or the lowest ZeRO
    stage), then without recomputing activations. Searched are tensor sizes that divide a node,
    pipeline sizes that divide the layers, micro batches that divide a replica's share of the batch,
    and `recompute`.
    """
    layouts = []
    for ranks, stages, changes, words in _shardings(config, gpus_per_node):
        replicas = world_size // ranks
        if world_size % ranks or config.batch_size % replicas:
            continue
        share = config.batch_size // replicas
        most = share if stages == 1 else share // (MICROBATCHES_PER_STAGE * stages)
        for recompute in ("none", "selective", "layers"):
            largest: Layout | None = None
            for micro in (size for size in _divisors(share) if size <= most):
                tried = changes | {"recompute": recompute, "micro_batch_size": micro}
                changed = _changed(config, tried)
                memory = changed and memory_if_it_fits(changed, world_size, gpu_bytes)
                if not memory:
                    break
                largest = Layout(words, replicas, tried, memory)
            if largest:
                layouts.append(largest)
    return layouts


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
    config: RunConfig, world_size: int, *, gpus_per_node: int, gpu_bytes: int
) -> RunConfig | None:
    """Return the run in its own layout if that fits, else in the simplest that does, or None."""
    if memory_if_it_fits(config, world_size, gpu_bytes):
        return config
    layouts = fitting_layouts(config, world_size, gpus_per_node=gpus_per_node, gpu_bytes=gpu_bytes)
    return _changed(config, layouts[0].changes) if layouts else None
