"""Memory of a measurement: of a GPU and of a node's host, estimated, and what is free."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from base.errors import UserError
from base.host_memory import free_memory
from base.ranks import Ranks
from ckpt_tools.hf.forward import empty_model
from curvature.cost.parts import parts_of
from curvature.products.parameters import block_of
from curvature.settings import CurvatureSettings, ProductSettings

FP32 = 4
# Of a GPU: CUDA context, NCCL's buffers, cuBLAS workspaces, slack of the allocator.
FRAMEWORK_BYTES = 3 * 10**9
# Of the host: Python, torch, CUDA and its libraries, a text's pages; a round guess.
PROCESS_BYTES = 4 * 10**9
SIGNS = 2  # vectors over one tensor that the guard draws beside its gradient


class HostMemory(NamedTuple):
    """Bytes of a node's host memory.

    Attributes:
        processes: of all ranks on the node.
        loading: models on their way to the GPUs: every rank reads a whole one, in fp32.
        vectors: over all parameters, where they are on the host; the models have left by then.
    """

    processes: float
    loading: float
    vectors: float

    @property
    def total(self) -> float:
        """Return the most at once."""
        return self.processes + max(self.loading, self.vectors)


def tangent_bytes(settings: ProductSettings) -> int:
    """Return the bytes of an entry of the tangents beside the weights."""
    return 2 if settings.dtype == "bf16" else FP32


def most_vectors(settings: CurvatureSettings) -> int:
    """Return the vectors over all parameters held at once, at most."""
    return max(part.vectors for part in parts_of(settings))


def gpu_memory(
    config: PretrainedConfig, settings: CurvatureSettings, world_size: int, activations: float
) -> dict[str, float]:
    """Return the bytes of each use on one GPU, of the part that holds most."""
    sizes: dict[str, int] = {}
    largest = 0
    for name, weight in empty_model(config).named_parameters():
        block = block_of(name) if block_of(name).startswith("layer") else "outside the blocks"
        sizes[block] = sizes.get(block, 0) + weight.numel()
        largest = max(largest, weight.numel())
    shards = world_size if settings.sharding == "fsdp" else 1
    held, tangent = sum(sizes.values()) / shards, tangent_bytes(settings)
    memory = {
        "weights, fp32": FP32 * held,
        f"tangents, {settings.dtype}": tangent * held,
        "vectors": FP32 * held * most_vectors(settings) if settings.vectors == "device" else 0.0,
        "activations and gradients": activations,
        "signs of the guard": FP32 * SIGNS * largest / shards,
        "framework": float(FRAMEWORK_BYTES),
    }
    if shards > 1:  # at most what is outside the blocks, a block that computes and one on its way
        layer = max(size for name, size in sizes.items() if name.startswith("layer"))
        gathered = sizes["outside the blocks"] + 2 * layer
        memory["gathered weights and tangents"] = (FP32 + tangent) * gathered
    return memory


def host_memory(
    parameters: int, settings: CurvatureSettings, world_size: int, ranks_on_node: int
) -> HostMemory:
    """Return the bytes of the host of a node that holds so many of the ranks."""
    sharded = settings.sharding == "fsdp" and world_size > 1
    held = parameters / (world_size if sharded else 1)
    on_host = most_vectors(settings) if settings.vectors == "host" else 0
    return HostMemory(
        float(ranks_on_node * PROCESS_BYTES),
        ranks_on_node * loading_bytes(parameters, settings, sharded),
        ranks_on_node * FP32 * held * on_host,
    )


def loading_bytes(parameters: int, settings: ProductSettings, sharded: bool) -> float:
    """Return a rank's host memory while it loads; what is to be sharded gets tangents there."""
    return parameters * (FP32 + (tangent_bytes(settings) if sharded else 0))


def check_loading(config: PretrainedConfig, settings: ProductSettings, ranks: Ranks) -> None:
    """Raise UserError where the models of this machine's ranks find no room while they load."""
    parameters = sum(weight.numel() for weight in empty_model(config).parameters())
    sharded = settings.sharding == "fsdp" and ranks.size > 1
    needed = loading_bytes(parameters, settings, sharded)
    beside, free = _ranks_here(), free_memory()
    if needed * beside > free:
        raise UserError(
            f"{beside} times {needed / 1e9:.3g} GB of host memory are needed while the model is"
            f" loaded, {free / 1e9:.3g} GB are free; ask for more memory, or start fewer ranks on a"
            " machine"
        )


def check_room(
    settings: CurvatureSettings, entries: int, place: torch.device, guard_bytes: int
) -> None:
    """Raise UserError where the vectors that a measurement holds at once find no room.

    The weights are in memory by now and what a pass takes is known from the guard; seen here, what
    is missing does not cost the hours that come before it is needed.

    Args:
        settings: of the measurement.
        entries: of a vector on this rank.
        place: the device of vectors.
        guard_bytes: most that the guard held there beyond what is held now.
    """
    count = most_vectors(settings)
    free = _free_on(place)
    needed = FP32 * count * entries + guard_bytes
    if needed > free:
        raise UserError(
            f"{count} vectors of {entries:,} entries and a pass take {needed / 1e9:.3g} GB,"
            f" {free / 1e9:.3g} are free for a rank on {place.type}; give --no-lambda-max,"
            " --vectors host or --sharding fsdp, or lower --max-iterations or --steps"
        )


def guard_bytes(place: torch.device) -> int:
    """Return the most that this process held on a device or the host beyond what it does now."""
    if place.type == "cuda":
        return torch.cuda.max_memory_allocated(place) - torch.cuda.memory_allocated(place)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most, now = (1024 * int(status[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return most - now


def _free_on(place: torch.device) -> int:
    if place.type != "cuda":
        return free_memory() // _ranks_here()
    cached = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return torch.cuda.mem_get_info(place)[0] + cached


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
