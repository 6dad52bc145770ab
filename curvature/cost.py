"""The cost of a measurement before a weight is read: products, operations, memory, traffic and time.

Operations, bytes and activations come from running the code itself without content (curvature/simulation.py). The time
is a roofline: products of matrices at a share of the GPU's peak, everything else at a share of its memory's bandwidth,
one after the other. Nothing of it is measured.
"""

import math
from typing import NamedTuple

from transformers import PretrainedConfig

from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.forward import empty_model
from ckpt_tools.host_memory import total_memory
from curvature.architectures import architecture_of
from curvature.memory import FP32, HostMemory, gpu_memory, host_memory, tangent_bytes
from curvature.parts import GRADIENTS_PER_DIFFERENCE, GUARD_VECTORS, Part, parts_of
from curvature.settings import CurvatureSettings
from curvature.simulation import Pass, moved_around, simulate
from train.command import UserError
from train.flops import GPUS

BF16_SHARE, FP32_SHARE = 0.65, 0.75  # of the peak, reached by products of large matrices
BANDWIDTH_SHARE = 0.85  # of the memory's bandwidth, reached by other kernels
BUS_BANDWIDTH = 12e9  # bytes/s between host and GPU, of memory that is not pinned; a round guess
GPUS_PER_NODE = 8  # at most


class Plan(NamedTuple):
    """GPUs and hosts that a measurement is to run on.

    Attributes:
        world_size: GPUs, up to 8 on a node.
        gpu: their kind.
        host_bytes: memory of a node.
        is_this_machine: whether that is this machine's.
    """

    world_size: int
    gpu: str
    host_bytes: float
    is_this_machine: bool

    @classmethod
    def of(cls, world_size: int | None = None, gpu: str | None = None, host_gigabytes: float | None = None) -> "Plan":
        """The plan of the command line.

        Raises:
            UserError: an unknown GPU, no ranks, or no memory.
        """
        size, kind = 1 if world_size is None else world_size, gpu or "h100"
        if kind not in GPUS:
            raise UserError(f"--gpu {kind} is unknown; give one of {', '.join(GPUS)}")
        if size < 1:
            raise UserError(f"--world-size {size} is no plan; give 1 or more")
        if host_gigabytes is None:
            return cls(size, kind, total_memory(), is_this_machine=True)
        if not 0 < host_gigabytes < math.inf:
            raise UserError(f"--host-memory {host_gigabytes:g} is no plan; give the GB of a node")
        return cls(size, kind, host_gigabytes * 1e9, is_this_machine=False)

    @property
    def ranks_on_node(self) -> int:
        """GPUs of the fullest node."""
        return min(self.world_size, GPUS_PER_NODE)


class Cost(NamedTuple):
    """The estimate of a measurement.

    Attributes:
        parameters: of the model.
        product_flops, gradient_flops: of one microbatch.
        product_seconds: of one microbatch, on the ranks that share it.
        flops: of all parts, over all ranks.
        seconds: on all ranks.
        memory: bytes of each use on one GPU, of the part that holds most.
        host: of the fullest node.
        sent_per_product, sent: bytes that a rank sends over the network, for one product and in all.
    """

    parameters: int
    parts: list[Part]
    product_flops: float
    gradient_flops: float
    product_seconds: float
    flops: float
    seconds: float
    memory: dict[str, float]
    host: HostMemory
    sent_per_product: float
    sent: float


def estimate(config: PretrainedConfig, settings: CurvatureSettings, plan: Plan) -> Cost:
    """Return the cost for a model, of which its configuration is enough.

    Raises:
        UserError: the model's context is shorter than the sequences, or the route does not take the model.
    """
    length = settings.sequence_length or config.max_position_embeddings
    if length > config.max_position_embeddings:
        raise UserError(
            f"--sequence-length {length} is beyond the model's context {config.max_position_embeddings}; shorten it"
        )
    dual, sharded = settings.route == "dual", settings.sharding == "fsdp"
    if dual:
        architecture_of(config)
    sequences = settings.microbatch_sequences
    own = math.ceil(sequences / plan.world_size) if sharded else sequences  # of a microbatch, on the rank that has most
    on_rank = settings.model_copy(update={"microbatch_sequences": own})
    plain = simulate(config, on_rank, length, dual=False)
    product = simulate(config, on_rank, length, dual=True) if dual else plain
    times = 1 if dual else GRADIENTS_PER_DIFFERENCE
    size = sum(weight.numel() for weight in empty_model(config).parameters())
    held = size / plan.world_size if sharded else size
    gradient_seconds = _seconds(plain, held * moved_around(DTYPES["fp32"], dual=False), plan.gpu)
    product_seconds = gradient_seconds * times
    if dual:
        product_seconds = _seconds(product, held * moved_around(DTYPES[settings.dtype], dual=True), plan.gpu)
    gradient_flops, product_flops = plain.flops * sequences / own, times * product.flops * sequences / own
    parts = parts_of(settings)
    flops = seconds = 0.0
    for part in parts:
        flops += part.products * product_flops + part.gradients * gradient_flops
        together = min(part.together, part.products + part.gradients)
        shared = 1 if sharded else together / math.ceil(together / plan.world_size)
        bus = 2 * FP32 * held / BUS_BANDWIDTH if settings.vectors == "host" and part.vectors > GUARD_VECTORS else 0.0
        seconds += (part.products * (product_seconds + bus) + part.gradients * gradient_seconds) / shared
    sent_per_product, sent = _sent(size, settings, plan, parts, times)
    memory = gpu_memory(config, settings, plan.world_size, max(plain.bytes, product.bytes))
    host = host_memory(size, settings, plan.world_size, plan.ranks_on_node)
    figures = (size, parts, product_flops, gradient_flops, product_seconds, flops, seconds, memory, host)
    return Cost(*figures, sent_per_product, sent)


def _seconds(found: Pass, moved_beside: float, gpu: str) -> float:
    """Return the seconds of a pass on one GPU."""
    kind = GPUS[gpu]
    matrices = found.bf16_flops / (BF16_SHARE * kind.peak_flops)
    matrices += (found.flops - found.bf16_flops) / (FP32_SHARE * kind.fp32_flops)
    return matrices + (found.moved + moved_beside) / (BANDWIDTH_SHARE * kind.bandwidth)


def _sent(size: int, settings: CurvatureSettings, plan: Plan, parts: list[Part], times: int) -> tuple[float, float]:
    """Bytes that a rank sends for one product, and in all, in rings, where each of W sends (W - 1) / W of the whole.

    Ranks with shards gather weights and tangents for the forward pass and for the backward pass, and scatter sums of
    gradients. Ranks with whole models sum vectors, twice around, once for all microbatches of a product.
    """
    away = (plan.world_size - 1) / plan.world_size
    if settings.sharding == "fsdp":
        a_pass = away * size * (2 * (FP32 + tangent_bytes(settings)) + FP32)
        passes = sum(times * part.products + part.gradients for part in parts)
        return times * a_pass, passes * a_pass
    a_sum = 2 * away * FP32 * size
    return a_sum, a_sum * sum(part.sums for part in parts)


def cost_lines(cost: Cost, settings: CurvatureSettings, plan: Plan) -> list[str]:
    """The estimate in words."""
    lines = [
        f"{cost.parameters:,} parameters; {plan.world_size} x {plan.gpu}, sharding {settings.sharding}, "
        f"{settings.dtype}; an estimate, not measured",
        f"one Hessian product: {cost.product_flops / 1e12:.4g} TFLOP, {cost.product_seconds:.3g} s "
        f"(matrices at {BF16_SHARE:.0%} of the peak in bf16 and {FP32_SHARE:.0%} in fp32, all else at "
        f"{BANDWIDTH_SHARE:.0%} of the memory's bandwidth); one gradient: {cost.gradient_flops / 1e12:.4g} TFLOP",
    ]
    for part in cost.parts:
        most = " at most" if part.at_most else ""
        lines.append(f"  {part.name:<32} {part.products:>7} products{most}, {part.gradients} gradients")
    lines.append(f"in all {cost.flops / 1e15:.4g} PFLOP, about {cost.seconds / 60:.3g} minutes")
    if plan.world_size > 1:
        what = "product" if settings.sharding == "fsdp" else "product of the fixed batch"
        lines.append(
            f"network: a rank sends {cost.sent_per_product / 1e9:.3g} GB for a {what}, {cost.sent / 1e12:.3g} TB in "
            f"all; not in the time"
        )
    return [*lines, *_gpu_lines(cost, settings, plan), *_host_lines(cost, settings, plan)]


def _gpu_lines(cost: Cost, settings: CurvatureSettings, plan: Plan) -> list[str]:
    total, available = sum(cost.memory.values()), GPUS[plan.gpu].memory_bytes
    left = {
        "--checkpointing": not settings.checkpointing,
        "--vectors host": settings.vectors == "device",
        "--dtype bf16": settings.dtype == "fp32" and settings.route == "dual",
        "more ranks with --sharding fsdp": True,
    }
    verdict = "fits" if total <= available else f"DOES NOT FIT; give {' or '.join(one for one in left if left[one])}"
    lines = [f"  {use:<32} {size / 1e9:>8.2f} GB" for use, size in cost.memory.items()]
    return [*lines, f"memory of a GPU: {total / 1e9:.1f} of {available / 1e9:.0f} GB: {verdict}"]


def _host_lines(cost: Cost, settings: CurvatureSettings, plan: Plan) -> list[str]:
    host, ranks = cost.host, plan.ranks_on_node
    uses = {
        f"{ranks} processes": host.processes,
        f"{ranks} models while they load": host.loading,
        "vectors, after that": host.vectors,
    }
    left = {
        "--vectors device": host.vectors > host.loading,
        "--no-lambda-max": host.vectors > host.loading and settings.has_eigenvalues and settings.name != "lanczos",
        "fewer ranks on a node": ranks > 1,
        "--host-memory of a larger node": True,
    }
    advice = " or ".join(one for one in left if left[one])
    verdict = "fits" if host.total <= plan.host_bytes else f"DOES NOT FIT; give {advice}"
    whose = " (this machine's)" if plan.is_this_machine else ""
    lines = [f"  {use:<32} {size / 1e9:>8.2f} GB" for use, size in uses.items()]
    return [
        *lines,
        f"host memory of a node: {host.total / 1e9:.1f} of {plan.host_bytes / 1e9:.0f} GB{whose}: {verdict}",
    ]
