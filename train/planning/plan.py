"""The cost of runs before they start: GPU memory, layouts that fit, GPU-hours, days, and disk."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from base.errors import UserError
from train.planning.flops import GPUS, Gpu, assumed_mfu, flops_per_token
from train.planning.memory import (
    CheckpointBytes,
    RankMemory,
    checkpoint_bytes,
    parameter_count,
    rank_memory,
)
from train.run.config import RunConfig
from train.run.schedules import first_step

# At least, in proposed layouts: a pipeline idles for (stages - 1) / microbatches of its time.
MICROBATCHES_PER_STAGE = 4


class Cluster(NamedTuple):
    """The GPUs of all runs of a plan."""

    nodes: int
    gpus_per_node: int
    gpu: str

    @property
    def world_size(self) -> int:
        """Return the number of GPUs, one process each."""
        return self.nodes * self.gpus_per_node

    @property
    def kind(self) -> Gpu:
        """Return peak and memory of one GPU."""
        return GPUS[self.gpu]


class Layout(NamedTuple):
    """A layout of a run that fits into memory."""

    words: str  # how a replica is split
    replicas: int
    changes: dict[str, Any]  # to run.json
    memory: RankMemory


class RunPlan(NamedTuple):
    """The needs of one run."""

    name: str
    parameters: int
    flops_per_token: float
    tokens: int  # that this run trains on; a branch only those after its start
    mfu: float  # assumed, of the peak in bf16
    tokens_per_second_per_gpu: float
    gpu_hours: float
    days: float
    # The next three are None where batch or layout do not divide.
    replicas: int | None
    microbatches: int | None  # of one replica in one step
    memory: RankMemory | None
    refusal: str | None  # why they do not divide
    layouts: list[Layout]  # that fit, the simplest first
    checkpoints: CheckpointBytes


def make_cluster(nodes: int, gpus_per_node: int, gpu: str) -> Cluster:
    """Return the cluster, checked; UserError for an unknown GPU or no GPUs."""
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu} is unknown; give one of {', '.join(GPUS)}")
    if nodes < 1 or gpus_per_node < 1:
        raise UserError(
            f"{nodes} nodes of {gpus_per_node} GPUs train nothing; give 1 or more of both"
        )
    return Cluster(nodes, gpus_per_node, gpu)


def plan_run(config: RunConfig, cluster: Cluster) -> RunPlan:
    """Return what a run needs on a cluster."""
    flops = flops_per_token(config.model, config.data.sequence_length)
    mfu = assumed_mfu(config.model)
    speed = mfu * cluster.kind.peak_flops / flops
    tokens = (config.total_steps - first_step(config)) * config.tokens_per_step
    gpu_seconds = tokens / speed
    memory, replicas, refusal = None, None, None
    try:
        replicas = config.data_parallel_size(cluster.world_size)
        memory = rank_memory(config, cluster.world_size)
    except UserError as error:
        refusal = str(error)
    return RunPlan(
        name=config.name,
        parameters=parameter_count(config),
        flops_per_token=flops,
        tokens=tokens,
        mfu=mfu,
        tokens_per_second_per_gpu=speed,
        gpu_hours=gpu_seconds / 3600,
        days=gpu_seconds / cluster.world_size / 86_400,
        replicas=replicas,
        microbatches=replicas and config.batch_size // (replicas * config.micro_batch_size),
        memory=memory,
        refusal=refusal,
        layouts=fitting_layouts(
            config,
            cluster.world_size,
            gpus_per_node=cluster.gpus_per_node,
            gpu_bytes=cluster.kind.memory_bytes,
        ),
        checkpoints=checkpoint_bytes(config),
    )


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
        changes = {
            "tensor": tensor,
            "pipeline": pipeline,
            "sequence": tensor > 1 and config.data.sequence_length % tensor == 0,
        }
        words = (
            f"tensor {tensor}{' + sequence' if changes['sequence'] else ''}, pipeline {pipeline}"
        )
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
    found = []
    for ranks, stages, changes, words in _shardings(config, gpus_per_node):
        replicas = world_size // ranks
        if world_size % ranks or config.batch_size % replicas:
            continue
        share = config.batch_size // replicas
        most = share if stages == 1 else share // (MICROBATCHES_PER_STAGE * stages)
        for recompute in ("none", "layers"):
            largest: Layout | None = None
            for micro in (size for size in _divisors(share) if size <= most):
                tried = changes | {"recompute": recompute, "micro_batch_size": micro}
                changed = _changed(config, tried)
                memory = changed and memory_if_it_fits(changed, world_size, gpu_bytes)
                if not memory:
                    break
                largest = Layout(words, replicas, tried, memory)
            if largest:
                found.append(largest)
    return found


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
