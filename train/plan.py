"""What runs will cost: memory of a GPU, layouts that fit, GPU-hours, days, and disk."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from train.command import UserError
from train.config import RunConfig
from train.flops import GPUS, Gpu, flops_per_token
from train.memory import CheckpointBytes, RankMemory, checkpoint_bytes, parameter_count, rank_memory
from train.schedules import first_step

# At least, in proposed layouts: a pipeline idles for (stages - 1) / microbatches of its time.
MICROBATCHES_PER_STAGE = 4


class Cluster(NamedTuple):
    """The GPUs of all runs of a plan, and what speed they are to reach: one of the two."""

    nodes: int
    gpus_per_node: int
    gpu: str
    mfu: float | None
    tokens_per_second_per_gpu: float | None

    @property
    def world_size(self) -> int:
        """GPUs, one process each."""
        return self.nodes * self.gpus_per_node

    @property
    def kind(self) -> Gpu:
        """Peak and memory of one GPU."""
        return GPUS[self.gpu]

    def tokens_per_second(self, config: RunConfig) -> float:
        """Training tokens of one GPU per second."""
        if self.tokens_per_second_per_gpu is not None:
            return self.tokens_per_second_per_gpu
        assert self.mfu is not None
        return self.mfu * self.kind.peak_flops / flops_per_token(config.model, config.data.sequence_length)


class Layout(NamedTuple):
    """A layout of a run that fits into memory."""

    words: str  # how a replica is split
    replicas: int
    changes: dict[str, Any]  # to run.json
    memory: RankMemory


class RunPlan(NamedTuple):
    """What one run needs."""

    name: str
    parameters: int
    flops_per_token: float
    tokens: int  # that this run trains on; a branch only those after its start
    tokens_per_second_per_gpu: float
    mfu: float
    gpu_hours: float
    days: float
    replicas: int | None  # data-parallel; None where batch or layout do not divide, as are the next two
    microbatches: int | None  # of one replica in one step
    memory: RankMemory | None
    refusal: str | None  # why they do not
    layouts: list[Layout]  # that fit, the simplest first
    checkpoints: CheckpointBytes


def make_cluster(
    nodes: int, gpus_per_node: int, gpu: str, mfu: float | None, tokens_per_second_per_gpu: float | None
) -> Cluster:
    """The cluster, checked.

    Raises:
        UserError: an unknown GPU, no GPUs, or not exactly one statement of speed.
    """
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu} is unknown; give one of {', '.join(GPUS)}")
    if nodes < 1 or gpus_per_node < 1:
        raise UserError(f"{nodes} nodes of {gpus_per_node} GPUs train nothing; give 1 or more of both")
    if (mfu is None) == (tokens_per_second_per_gpu is None):
        raise UserError(
            "state one speed: --tokens-per-second-per-gpu 10000 (OLMo-core's figure for OLMo2-7B on H100), or --mfu, a "
            "share of the peak"
        )
    if mfu is not None and not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu:g} is no share; give a number above 0 and up to 1")
    if tokens_per_second_per_gpu is not None and not tokens_per_second_per_gpu > 0:
        raise UserError(f"--tokens-per-second-per-gpu {tokens_per_second_per_gpu:g} is no speed; give one above 0")
    return Cluster(nodes, gpus_per_node, gpu, mfu, tokens_per_second_per_gpu)


def plan_run(config: RunConfig, cluster: Cluster) -> RunPlan:
    """What a run needs on a cluster; UserError for a speed above the GPU's peak."""
    flops = flops_per_token(config.model, config.data.sequence_length)
    speed = cluster.tokens_per_second(config)
    tokens = (config.total_steps - first_step(config)) * config.tokens_per_step
    gpu_seconds, mfu = tokens / speed, speed * flops / cluster.kind.peak_flops
    if mfu > 1:
        raise UserError(
            f"{speed:,.0f} tokens a second are {mfu:.0%} of the peak of {cluster.gpu} for {config.name}; state a speed "
            f"below {cluster.kind.peak_flops / flops:,.0f}"
        )
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
        tokens_per_second_per_gpu=speed,
        mfu=mfu,
        gpu_hours=gpu_seconds / 3600,
        days=gpu_seconds / cluster.world_size / 86_400,
        replicas=replicas,
        microbatches=replicas and config.batch_size // (replicas * config.micro_batch_size),
        memory=memory,
        refusal=refusal,
        layouts=fitting_layouts(
            config, cluster.world_size, gpus_per_node=cluster.gpus_per_node, gpu_bytes=cluster.kind.memory_bytes
        ),
        checkpoints=checkpoint_bytes(config),
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _shardings(config: RunConfig, gpus_per_node: int) -> Iterator[tuple[int, int, dict[str, Any], str]]:
    """Ways to split a replica of the model, simplest first: its GPUs, pipeline stages, changes to run.json, words."""
    if config.engine == "deepspeed":
        for stage in (1, 2, 3) if config.zero.allow_stage_3 else (1, 2):
            if stage < 3 or not config.averages:
                yield 1, 1, {"zero": config.zero.model_dump() | {"stage": stage}}, f"ZeRO stage {stage}"
        return
    splits = itertools.product(_divisors(gpus_per_node), _divisors(config.model.num_hidden_layers))
    for tensor, pipeline in sorted(splits, key=lambda split: (split[0] * split[1], split[1])):
        changes = {
            "tensor": tensor,
            "pipeline": pipeline,
            "virtual_pipeline": 1,
            "sequence": tensor > 1 and config.data.sequence_length % tensor == 0,
            "context": config.parallel.context,
        }
        words = f"tensor {tensor}{' + sequence' if changes['sequence'] else ''}, pipeline {pipeline}"
        yield tensor * pipeline * config.parallel.context, pipeline, {"parallel": changes}, words


def fitting_layouts(config: RunConfig, world_size: int, *, gpus_per_node: int, gpu_bytes: int) -> list[Layout]:
    """Return the layouts that fit into memory, each with its largest micro batch, ordered by simplicity.

    That is: fewest GPUs in a replica of the model, then fewest pipeline stages (or the lowest ZeRO stage), then without
    recomputing activations. Searched are tensor sizes that divide a node, pipeline sizes that divide the layers,
    micro batches that divide a replica's share of the batch, and `recompute`.
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
    """Return the memory of a rank; None if it is more than a GPU has, or batch and layout do not divide."""
    try:
        memory = rank_memory(config, world_size)
    except UserError:
        return None
    return memory if memory.bytes <= gpu_bytes else None


def fit(config: RunConfig, world_size: int, *, gpus_per_node: int, gpu_bytes: int) -> RunConfig | None:
    """Return the run with a layout that fits these GPUs: its own if that does, else the simplest; None without any."""
    if memory_if_it_fits(config, world_size, gpu_bytes):
        return config
    layouts = fitting_layouts(config, world_size, gpus_per_node=gpus_per_node, gpu_bytes=gpu_bytes)
    return _changed(config, layouts[0].changes) if layouts else None
