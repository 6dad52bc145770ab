"""What a measurement will cost: products, operations, memory of a GPU and time, before a weight is read.

Operations and activations come from running the code itself without content (curvature/simulation.py); the time is
those operations over a stated share of the GPU's peak. None of it is measured.
"""

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from ckpt_tools.forward import empty_model, read_config
from curvature.architectures import architecture_of
from curvature.parameters import block_of
from curvature.settings import (
    CurvatureSettings,
    FixedTraceSettings,
    HutchinsonSettings,
    LanczosSettings,
    PowerSettings,
)
from curvature.simulation import simulate
from curvature.trace.hutchinson import ROUND_MICROBATCHES
from train.command import UserError
from train.flops import GPUS

FP32_PEAK_FLOPS = {"h100": 67e12, "h200": 67e12, "a100": 19.5e12}  # not TF32; NVIDIA's data sheets
GRADIENTS_PER_DIFFERENCE = 5  # at theta, and on both sides of it for a trial step and the one it suggests
GUARD_VECTORS = 6  # theta, v, and a few gradients and products at once
FRAMEWORK_BYTES = 3 * 10**9  # CUDA context, NCCL's buffers, cuBLAS workspaces, slack of the allocator
FP32 = 4


class Part(NamedTuple):
    """One part of a measurement.

    Attributes:
        products: Hessian products, of a microbatch each.
        gradients: of a microbatch each.
        vectors: over all parameters, that it holds at once.
        together: microbatches that ranks with whole models share out at once, each a whole one.
        at_most: whether it may stop before.
    """

    name: str
    products: int
    gradients: int
    vectors: int
    together: int
    at_most: bool = False


class Cost(NamedTuple):
    """The estimate of a measurement.

    Attributes:
        parameters: of the model.
        product_flops, gradient_flops: of one microbatch.
        flops: of all parts, over all ranks.
        seconds: on all ranks.
        memory: bytes of each use on one GPU, of the part that holds most.
    """

    parameters: int
    parts: list[Part]
    product_flops: float
    gradient_flops: float
    flops: float
    seconds: float
    memory: dict[str, float]


def parts_of(settings: CurvatureSettings) -> list[Part]:
    """What a measurement is made of, the guard first."""
    microbatches = math.ceil(settings.fixed_sequences / settings.microbatch_sequences)
    steps = settings.max_iterations
    parts = [Part("guard", 1, GRADIENTS_PER_DIFFERENCE, GUARD_VECTORS, 1)]
    ends = 1
    if isinstance(settings, HutchinsonSettings):
        stops = settings.relative_error is not None
        at_once = ROUND_MICROBATCHES * settings.probes_per_microbatch if stops else settings.pairs
        parts += [
            Part("trace", settings.pairs, 0, 0, at_once, stops),
            Part("norm traces", settings.norm_pairs, 0, 0, settings.norm_pairs),
            Part("Gauss-Newton and Fisher traces", 0, 2 * settings.companion_pairs, 0, settings.companion_pairs),
        ]
    elif isinstance(settings, FixedTraceSettings):
        sketched = settings.products // (3 if settings.name == "hutch++" else 2)
        parts.append(Part("trace", settings.products * microbatches, 0, sketched + 3, microbatches))
    elif isinstance(settings, LanczosSettings):
        parts.append(
            Part("density", settings.starts * settings.steps * microbatches, 0, settings.steps + 3, microbatches)
        )
        ends = settings.largest + settings.smallest
    else:
        parts.append(Part("trace", settings.probes * microbatches, 0, 3, microbatches))
    if isinstance(settings, PowerSettings):
        return [*parts, Part("lambda_max", steps * microbatches, 0, 4, microbatches, at_most=True)]
    return [*parts, Part("eigenvalues", (steps + ends) * microbatches, 0, steps + 4, microbatches, at_most=True)]


def check_vectors(settings: CurvatureSettings, entries: int, place: torch.device) -> None:
    """UserError where the vectors that a measurement holds at once, of `entries` each on this rank, find no room.

    Seen here, it does not cost the hours that the parts before them take.
    """
    count = max(part.vectors for part in parts_of(settings))
    if place.type == "cuda":
        available = torch.cuda.get_device_properties(place).total_memory
    else:
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // beside
    if FP32 * count * entries > available:
        raise UserError(
            f"{count} vectors of {entries:,} entries take {FP32 * count * entries / 1e9:.3g} GB, a rank has "
            f"{available / 1e9:.3g} on {place.type}; give --vectors host or --sharding fsdp, or "
            f"lower --max-iterations, --products or --steps"
        )


def estimate(hf_dir: Path, settings: CurvatureSettings, *, world_size: int, gpu: str, mfu: float) -> Cost:
    """The cost for the model of an HF directory, of which config.json is enough.

    Args:
        hf_dir: holds config.json.
        settings: of the measurement.
        world_size: GPUs.
        gpu: their kind.
        mfu: share of the peak of the computation's precision that products of matrices reach.

    Raises:
        UserError: an unknown GPU, a share outside (0, 1], or a model that the route does not take.
    """
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu} is unknown; give one of {', '.join(GPUS)}")
    if not 0 < mfu <= 1 or world_size < 1:
        raise UserError(f"--mfu {mfu:g} and --world-size {world_size} are no plan; give a share up to 1 and 1 or more")
    config = read_config(hf_dir)
    dual = settings.route == "dual"
    if dual:
        architecture_of(config)
    length = settings.sequence_length or config.max_position_embeddings
    if length > config.max_position_embeddings:
        raise UserError(
            f"--sequence-length {length} is beyond the model's context {config.max_position_embeddings}; shorten it"
        )
    sharded = settings.sharding == "fsdp"
    sequences = settings.microbatch_sequences
    own = math.ceil(sequences / world_size) if sharded else sequences  # of a microbatch, on the rank that has most
    on_rank = settings.model_copy(update={"microbatch_sequences": own})
    plain = simulate(config, on_rank, length, dual=False)
    product = simulate(config, on_rank, length, dual=True) if dual else plain
    gradient_flops = plain.flops * sequences / own
    product_flops = product.flops * sequences / own if dual else GRADIENTS_PER_DIFFERENCE * gradient_flops
    parts = parts_of(settings)
    peaks = {"fp32": FP32_PEAK_FLOPS[gpu], "bf16": GPUS[gpu].peak_flops}
    flops = seconds = 0.0
    for part in parts:
        computed = part.products * product_flops, part.gradients * gradient_flops
        flops += sum(computed)
        together = min(part.together, part.products + part.gradients)
        shared = sequences / own if sharded else together / math.ceil(together / world_size)
        # gradients are transformers' own, in fp32
        seconds += (computed[0] / peaks[settings.dtype] + computed[1] / peaks["fp32"]) / mfu / shared
    memory = _memory(config, settings, world_size, parts, max(plain.bytes, product.bytes))
    size = sum(weight.numel() for weight in empty_model(config).parameters())
    return Cost(size, parts, product_flops, gradient_flops, flops, seconds, memory)


def _memory(
    config: PretrainedConfig, settings: CurvatureSettings, world_size: int, parts: list[Part], activations: float
) -> dict[str, float]:
    sizes: dict[str, int] = {}
    for name, weight in empty_model(config).named_parameters():
        block = block_of(name) if block_of(name).startswith("layer") else "outside the blocks"
        sizes[block] = sizes.get(block, 0) + weight.numel()
    sharded = settings.sharding == "fsdp"
    held = sum(sizes.values()) / (world_size if sharded else 1)
    tangent = torch.finfo(torch.bfloat16 if settings.dtype == "bf16" else torch.float32).bits // 8
    tangent = tangent if settings.route == "dual" else 0
    on_gpu = settings.vectors == "device"
    memory = {
        "weights, fp32": FP32 * held,
        f"tangents, {settings.dtype}": tangent * held,
        "vectors": FP32 * held * max(part.vectors for part in parts) if on_gpu else 0.0,
        "activations and gradients": activations,
        "framework": float(FRAMEWORK_BYTES),
    }
    if sharded:  # at most what lies outside the blocks, a block that computes and one on its way
        largest = max(size for block, size in sizes.items() if block.startswith("layer"))
        memory["gathered weights and tangents"] = (FP32 + tangent) * (sizes["outside the blocks"] + 2 * largest)
    return memory


def cost_lines(cost: Cost, settings: CurvatureSettings, *, world_size: int, gpu: str, mfu: float) -> list[str]:
    """The estimate in words."""
    total, available = sum(cost.memory.values()), GPUS[gpu].memory_bytes
    lines = [
        f"{cost.parameters:,} parameters; {world_size} x {gpu}, sharding {settings.sharding}, "
        f"{settings.dtype} at {mfu:.0%} of the peak (an estimate, not measured)",
        f"one Hessian product: {cost.product_flops / 1e12:.4g} TFLOP; one gradient: {cost.gradient_flops / 1e12:.4g}",
    ]
    for part in cost.parts:
        most = " at most" if part.at_most else ""
        lines.append(f"  {part.name:<32} {part.products:>7} products{most}, {part.gradients} gradients")
    lines.append(f"in all {cost.flops / 1e15:.4g} PFLOP, about {cost.seconds / 60:.3g} minutes")
    lines += [f"  {use:<32} {size / 1e9:>8.2f} GB" for use, size in cost.memory.items()]
    left = {
        "--checkpointing": not settings.checkpointing,
        "--vectors host": settings.vectors == "device",
        "--dtype bf16": settings.dtype == "fp32" and settings.route == "dual",
        "more ranks with --sharding fsdp": True,
    }
    verdict = "fits" if total <= available else f"DOES NOT FIT; give {' or '.join(one for one in left if left[one])}"
    return [*lines, f"memory of a GPU: {total / 1e9:.1f} of {available / 1e9:.0f} GB: {verdict}"]
