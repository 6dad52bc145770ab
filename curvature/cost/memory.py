"""Work and memory of a measurement: of a GPU and of its host, estimated, and what is free."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from base.errors import UserError
from base.host_memory import free_memory
from base.ranks import Ranks
from ckpt_tools.hf.forward import empty_model
from curvature.products.parameters import block_of
from curvature.settings import (
    CurvatureSettings,
    HutchinsonSettings,
    LanczosSettings,
    ProductSettings,
    StepSettings,
)

FP32 = 4
# Of a GPU: CUDA context, NCCL's buffers, cuBLAS workspaces, slack of the allocator.
FRAMEWORK_BYTES = 3 * 10**9
# Of the host: Python, torch, CUDA and its libraries, a text's pages; a round guess.
PROCESS_BYTES = 4 * 10**9
SIGNS = 2  # vectors over one tensor that the guard draws beside its gradient


class Work(NamedTuple):
    """Products and gradients of a microbatch, at most, and vectors over all parameters at once."""

    products: int
    gradients: int
    vectors: int


def work_of(settings: CurvatureSettings) -> Work:
    """Return the work of a measurement and of its guard."""
    # The guard's gradients are at theta, and on both sides of it for a trial step and the one that
    # it suggests; its vector is theta, to put the parameters back.
    products, gradients, vectors = 1, 5, 1
    microbatches = math.ceil(settings.fixed_sequences / settings.microbatch_sequences)
    if isinstance(settings, HutchinsonSettings):
        products += settings.pairs + settings.norm_pairs
        gradients += 2 * settings.companion_pairs
        eigenvalues = 1 if settings.lambda_max else 0
    else:
        products += settings.starts * settings.steps * microbatches
        vectors = settings.steps + 3
        eigenvalues = settings.largest + settings.smallest
    if eigenvalues:
        products += (settings.max_iterations + eigenvalues) * microbatches
        # The basis and its next vector, the start, a pair that is judged: x, Hx, and their
        # difference.
        vectors = max(vectors, settings.max_iterations + 5)
    return Work(products, gradients, vectors)


def tangent_bytes(settings: ProductSettings) -> int:
    """Return the bytes of an entry of the tangents beside the weights."""
    return 2 if settings.dtype == "bf16" else FP32


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
    entries, tangent = sum(sizes.values()) / shards, tangent_bytes(settings)
    vectors = work_of(settings).vectors
    memory = {
        "weights, fp32": FP32 * entries,
        f"tangents, {settings.dtype}": tangent * entries,
        "vectors": FP32 * entries * vectors if settings.vectors == "device" else 0.0,
        "activations and gradients": activations,
        "signs of the guard": FP32 * SIGNS * largest / shards,
        "framework": float(FRAMEWORK_BYTES),
    }
    if shards > 1:  # at most what is outside the blocks, a block that computes and one on its way
        layer = max(size for name, size in sizes.items() if name.startswith("layer"))
        gathered = sizes["outside the blocks"] + 2 * layer
        memory["gathered weights and tangents"] = (FP32 + tangent) * gathered
    return memory


def host_memory(parameters: int, settings: CurvatureSettings, world_size: int) -> float:
    """Return the most bytes of a GPU's rank on its host, where weights are read by rows."""
    entries = parameters / (world_size if settings.sharding == "fsdp" else 1)
    vectors = FP32 * entries * work_of(settings).vectors if settings.vectors == "host" else 0.0
    return PROCESS_BYTES + vectors


def check_loading(config: PretrainedConfig, settings: ProductSettings, ranks: Ranks) -> None:
    """Raise UserError if the host has no room for the models of its ranks without GPUs."""
    if ranks.device.type != "cpu":
        return
    parameters = sum(weight.numel() for weight in empty_model(config).parameters())
    entries = parameters / (ranks.size if settings.sharding == "fsdp" else 1)
    needed = entries * (FP32 + tangent_bytes(settings))
    beside, free = _ranks_here(), free_memory()
    if needed * beside > free:
        raise UserError(
            f"{beside} times {needed / 1e9:.3g} GB of host memory are needed for weights and"
            f" tangents, {free / 1e9:.3g} GB are free; ask for more memory, or start fewer ranks"
            " on a machine"
        )


def check_room(
    settings: ProductSettings, vectors: Sequence[tuple[int, int]], device: torch.device
) -> None:
    """Raise UserError if vectors, so many of so many entries, do not fit the memory of this rank.

    The weights are in memory by now and the memory of a pass is known from the guard. Checked here,
    a lack of memory does not cost the hours before the vectors are needed.
    """
    # Of a pass: the most that the guard held beyond what is held now.
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        of_pass = torch.cuda.max_memory_allocated(device) - allocated
        # What torch has cached counts as used on the GPU, but is free for this process.
        cached = torch.cuda.memory_reserved(device) - allocated
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        # The peak and the present size in memory of this process, in kB.
        lines = Path("/proc/self/status").read_text().splitlines()
        kilobytes = dict(line.split(":", 1) for line in lines)
        most, now = (int(kilobytes[name].split()[0]) for name in ("VmHWM", "VmRSS"))
        of_pass, free = 1024 * (most - now), free_memory() // _ranks_here()
    needed = FP32 * sum(count * entries for count, entries in vectors) + of_pass
    if needed > free:
        words = ", ".join(f"{count} vectors of {entries:,} entries" for count, entries in vectors)
        raise UserError(
            f"{words} and a pass take {needed / 1e9:.3g} GB,"
            f" {free / 1e9:.3g} are free for a rank on {device.type}; give"
            f" {_fewer(settings, device)}"
        )


def _fewer(settings: ProductSettings, device: torch.device) -> str:
    """Return what would make room for vectors and is not given yet."""
    if isinstance(settings, StepSettings) and device.type == "cpu":
        # Every rank holds the whole step there, however many share the model.
        return "more memory, or fewer ranks on a machine"
    ways = ["more ranks with --sharding fsdp"]
    if device.type == "cuda":
        ways.insert(0, "--vectors host")
    if isinstance(settings, LanczosSettings):
        ways.append("lower --steps and --max-iterations")
    elif isinstance(settings, HutchinsonSettings) and settings.lambda_max:
        ways.append("--no-lambda-max or a lower --max-iterations")
    return ", or ".join(ways)


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
