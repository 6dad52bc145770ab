"""The cost of a measurement before a weight is read: products, operations, memory and time.

Operations, bytes and activations come from running the code itself without content
(curvature/cost/simulation.py). The time is a roofline: products of matrices at a share of the GPU's
peak, everything else at a share of its memory's bandwidth, one after the other. Nothing of it is
measured.
"""

import math
import re
from typing import NamedTuple

from transformers import PretrainedConfig

from base.errors import UserError
from base.host_memory import total_memory
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.forward import empty_model
from curvature.architectures import architecture_of
from curvature.batches import checked_length
from curvature.cost.memory import FP32, HostMemory, gpu_memory, host_memory
from curvature.cost.parts import GUARD_VECTORS, Part, parts_of
from curvature.cost.simulation import Pass, moved_around, simulate
from curvature.settings import CurvatureSettings
from train.planning.flops import GPUS

BF16_SHARE, FP32_SHARE = 0.65, 0.75  # of the peak, reached by products of large matrices
BANDWIDTH_SHARE = 0.85  # of the memory's bandwidth, reached by other kernels
BUS_BANDWIDTH = 12e9  # bytes/s between host and GPU, of memory that is not pinned; a round guess
GPUS_PER_NODE = 8  # at most


class Plan(NamedTuple):
    """The GPUs that a measurement is to run on, up to 8 on a node."""

    world_size: int = 1
    gpu: str = "h100"

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Return the plan of a text such as h100 or 8xh100; UserError for any other."""
        match = re.fullmatch(r"(?:([1-9]\d*)x)?(\w+)", text)
        if not match or match[2] not in GPUS:
            raise UserError(
                f"--dry-run {text} names no GPUs; give a kind ({', '.join(GPUS)}) and how many,"
                " such as 8xh100"
            )
        return cls(int(match[1] or 1), match[2])

    @property
    def ranks_on_node(self) -> int:
        """Return the GPUs of the fullest node."""
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


def estimate(config: PretrainedConfig, settings: CurvatureSettings, plan: Plan) -> Cost:
    """Return the cost for a model, of which its configuration is enough.

    Raises:
        UserError: the model's context is shorter than the sequences, or the dual layers do not know
            the model.
    """
    length = checked_length(config, settings.sequence_length)
    architecture_of(config)
    sharded, sequences = settings.sharding == "fsdp", settings.microbatch_sequences
    # Of a microbatch, on the rank that has most.
    own = math.ceil(sequences / plan.world_size) if sharded else sequences
    on_rank = settings.model_copy(update={"microbatch_sequences": own})
    plain = simulate(config, on_rank, length, dual=False)
    product = simulate(config, on_rank, length, dual=True)
    size = sum(weight.numel() for weight in empty_model(config).parameters())
    held = size / plan.world_size if sharded else size
    gradient_seconds = _seconds(plain, held * moved_around(DTYPES["fp32"], dual=False), plan.gpu)
    beside = held * moved_around(DTYPES[settings.dtype], dual=True)
    product_seconds = _seconds(product, beside, plan.gpu)
    gradient_flops = plain.flops * sequences / own
    product_flops = product.flops * sequences / own
    parts = parts_of(settings)
    flops = seconds = 0.0
    for part in parts:
        flops += part.products * product_flops + part.gradients * gradient_flops
        together = min(part.together, part.products + part.gradients)
        # Ranks with whole models wait for the one that has most of what is shared out at once.
        shared = 1 if sharded else together / math.ceil(together / plan.world_size)
        over_bus = settings.vectors == "host" and part.vectors > GUARD_VECTORS
        bus = 2 * FP32 * held / BUS_BANDWIDTH if over_bus else 0.0
        of_products = part.products * (product_seconds + bus)
        seconds += (of_products + part.gradients * gradient_seconds) / shared
    return Cost(
        parameters=size,
        parts=parts,
        product_flops=product_flops,
        gradient_flops=gradient_flops,
        product_seconds=product_seconds,
        flops=flops,
        seconds=seconds,
        memory=gpu_memory(config, settings, plan.world_size, max(plain.bytes, product.bytes)),
        host=host_memory(size, settings, plan.world_size, plan.ranks_on_node),
    )


def _seconds(simulated: Pass, moved_beside: float, gpu: str) -> float:
    """Return the seconds of a pass on one GPU."""
    kind = GPUS[gpu]
    matrices = simulated.bf16_flops / (BF16_SHARE * kind.peak_flops)
    matrices += (simulated.flops - simulated.bf16_flops) / (FP32_SHARE * kind.fp32_flops)
    return matrices + (simulated.moved + moved_beside) / (BANDWIDTH_SHARE * kind.bandwidth)


def cost_lines(cost: Cost, settings: CurvatureSettings, plan: Plan) -> list[str]:
    """Return the estimate in words."""
    return [
        f"{cost.parameters:,} parameters; {plan.world_size} x {plan.gpu}, sharding"
        f" {settings.sharding}, {settings.dtype}; an estimate, not measured",
        f"one Hessian product: {cost.product_flops / 1e12:.4g} TFLOP,"
        f" {cost.product_seconds:.3g} s (matrices at {BF16_SHARE:.0%} of the peak in bf16 and"
        f" {FP32_SHARE:.0%} in fp32, all else at {BANDWIDTH_SHARE:.0%} of the memory's"
        f" bandwidth); one gradient: {cost.gradient_flops / 1e12:.4g} TFLOP",
        *(
            f"  {part.name:<32} {part.products:>7} products{' at most' if part.at_most else ''},"
            f" {part.gradients} gradients"
            for part in cost.parts
        ),
        f"in all {cost.flops / 1e15:.4g} PFLOP, about {cost.seconds / 60:.3g} minutes",
        *_gpu_lines(cost, settings, plan),
        *_host_lines(cost, settings, plan),
    ]


def _gpu_lines(cost: Cost, settings: CurvatureSettings, plan: Plan) -> list[str]:
    advice = {
        "--checkpointing": not settings.checkpointing,
        "--vectors host": settings.vectors == "device",
        "--dtype bf16": settings.dtype == "fp32",
        "more ranks with --sharding fsdp": True,
    }
    total, available = sum(cost.memory.values()), GPUS[plan.gpu].memory_bytes
    verdict = _verdict(total, available, advice)
    return [*_uses(cost.memory), f"memory of a GPU: {verdict}"]


def _host_lines(cost: Cost, settings: CurvatureSettings, plan: Plan) -> list[str]:
    host, ranks = cost.host, plan.ranks_on_node
    uses = {
        f"{ranks} processes": host.processes,
        f"{ranks} models while they load": host.loading,
        "vectors, after that": host.vectors,
    }
    of_vectors = host.vectors > host.loading
    advice = {
        "--vectors device": of_vectors,
        "--no-lambda-max": of_vectors and settings.name == "hutchinson",
        "fewer ranks on a node": ranks > 1,
        "a node with more memory than this one": True,
    }
    verdict = _verdict(host.total, total_memory(), advice)
    return [*_uses(uses), f"host memory of a node, this one's at hand: {verdict}"]


def _uses(uses: dict[str, float]) -> list[str]:
    return [f"  {use:<32} {size / 1e9:>8.2f} GB" for use, size in uses.items()]


def _verdict(needed: float, available: float, advice: dict[str, bool]) -> str:
    """Return both sizes and whether the one fits; the advice that is left where it does not."""
    left = " or ".join(words for words, is_left in advice.items() if is_left)
    verdict = "fits" if needed <= available else f"DOES NOT FIT; give {left}"
    return f"{needed / 1e9:.1f} of {available / 1e9:.0f} GB: {verdict}"
