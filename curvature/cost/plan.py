"""The cost of a measurement before a weight is read: operations, memory and time.

Operations, bytes and activations come from running the code itself without content
(curvature/cost/simulation.py). The time is a roofline: products of matrices at a share of the GPU's
peak, everything else at a share of its memory's bandwidth, one after the other. Of a 1B on an H200
the product took 1.6 times that, in two thirds of the memory (docs/guides/one-gpu.md).
"""

import math
import re
from typing import NamedTuple

from transformers import PretrainedConfig

from base.aligned import aligned, wrapped
from base.errors import UserError
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.forward import empty_model
from curvature.cost.memory import Work, gpu_memory, host_memory, work_of
from curvature.cost.simulation import Pass, moved_around, simulate
from curvature.dual.blocks import curved_family
from curvature.settings import CurvatureSettings, checked_length
from train.planning.flops import GPUS, GPUS_PER_NODE

# In a product of OLMo2-1B, 4,096 tokens in bf16, an H100 reached 0.59 of its peak in matrices and
# 0.55 of its memory's bandwidth in all other kernels. Nothing was measured in fp32.
BF16_SHARE, FP32_SHARE = 0.6, 0.75  # of the peak, reached by products of large matrices
BANDWIDTH_SHARE = 0.5  # of the memory's bandwidth, reached by other kernels


class GpuPlan(NamedTuple):
    """The GPUs that a measurement is to run on, up to 8 on a node."""

    world_size: int = 1
    gpu: str = "h100"

    @classmethod
    def parse(cls, text: str) -> "GpuPlan":
        """Return the plan of a text such as h100 or 8xh100, UserError for any other."""
        match = re.fullmatch(r"(?:([1-9]\d*)x)?(\w+)", text)
        if not match or match[2] not in GPUS:
            raise UserError(
                f"--dry-run {text} names no GPUs; give a kind ({', '.join(GPUS)}) and how many,"
                " such as 8xh100"
            )
        return cls(int(match[1] or 1), match[2])


class Cost(NamedTuple):
    """The estimate of a measurement.

    Attributes:
        parameters: of the model.
        product_flops: of one microbatch.
        product_seconds: of one microbatch, on the ranks that share it.
        seconds: on all ranks, none of which waits for another or for vectors on the host.
        memory: bytes of each use on one GPU, of the part that holds most.
        host: bytes of the fullest node.
    """

    parameters: int
    work: Work
    product_flops: float
    product_seconds: float
    seconds: float
    memory: dict[str, float]
    host: float


def estimate(config: PretrainedConfig, settings: CurvatureSettings, plan: GpuPlan) -> Cost:
    """Return the cost for a model, of which its configuration is enough.

    Raises:
        UserError: the model's context is shorter than the sequences, or the dual layers do not know
            the model.
    """
    length = checked_length(config.max_position_embeddings, settings.sequence_length)
    curved_family(config)
    sharded, sequences = settings.sharding == "fsdp", settings.microbatch_sequences
    # Of a microbatch, on the rank that has most.
    sequences_on_rank = math.ceil(sequences / plan.world_size) if sharded else sequences
    on_rank = settings.model_copy(update={"microbatch_sequences": sequences_on_rank})
    plain = simulate(config, on_rank, length, dual=False)
    product = simulate(config, on_rank, length, dual=True)
    size = sum(weight.numel() for weight in empty_model(config).parameters())
    entries = size / plan.world_size if sharded else size
    gradient_seconds = _seconds(plain, entries * moved_around(DTYPES["fp32"], dual=False), plan.gpu)
    beside = entries * moved_around(DTYPES[settings.dtype], dual=True)
    product_seconds = _seconds(product, beside, plan.gpu)
    work = work_of(settings)
    seconds = work.products * product_seconds + work.gradients * gradient_seconds
    on_node = min(plan.world_size, GPUS_PER_NODE)
    return Cost(
        parameters=size,
        work=work,
        # Simulated was the part of the rank that has most; this is the whole microbatch.
        product_flops=product.flops * sequences / sequences_on_rank,
        product_seconds=product_seconds,
        # Whole models take pairs in turns; shards of one model take every product together.
        seconds=seconds if sharded else seconds / plan.world_size,
        memory=gpu_memory(config, settings, plan.world_size, max(plain.bytes, product.bytes)),
        host=on_node * host_memory(size, settings, plan.world_size),
    )


def _seconds(simulated: Pass, moved_beside: float, gpu: str) -> float:
    """Return the seconds of a pass on one GPU."""
    kind = GPUS[gpu]
    matrices = simulated.bf16_flops / (BF16_SHARE * kind.peak_flops)
    matrices += (simulated.flops - simulated.bf16_flops) / (FP32_SHARE * kind.fp32_flops)
    return matrices + (simulated.moved + moved_beside) / (BANDWIDTH_SHARE * kind.bandwidth)


def cost_lines(cost: Cost, settings: CurvatureSettings, plan: GpuPlan) -> list[str]:
    """Return the estimate in words: whether it fits and how long it takes, then the parts."""
    total, available = sum(cost.memory.values()), GPUS[plan.gpu].memory_bytes
    fits = total <= available
    memory = f"{total / 1e9:.1f} of {available / 1e9:.0f} GB of a GPU"
    rows = [(use, f"{size / 1e9:.2f}") for use, size in cost.memory.items()]
    return [
        f"{'fits' if fits else 'DOES NOT FIT'}: {memory} and {cost.host / 1e9:.1f} GB of a node's"
        f" host memory, about {cost.seconds / 60:.3g} minutes on {plan.world_size} x {plan.gpu}",
        *([] if fits else [f"give {_thriftier(settings)}"]),
        f"an estimate, not measured: {cost.parameters:,} parameters, sharding {settings.sharding},"
        f" {settings.dtype}",
        f"at most {cost.work.products} Hessian products, {cost.product_seconds:.3g} s and"
        f" {cost.product_flops / 1e12:.3g} TFLOP each, and {cost.work.gradients} gradients",
        *wrapped(
            f"matrices at {BF16_SHARE:.0%} of the peak in bf16 and {FP32_SHARE:.0%} in fp32, all"
            f" else at {BANDWIDTH_SHARE:.0%} of the memory's bandwidth"
        ),
        "",
        *aligned([("memory of a GPU", "GB"), *rows], right={1}),
    ]


def _thriftier(settings: CurvatureSettings) -> str:
    """Return the options that would take less memory of a GPU and are not given yet."""
    options = {
        "--checkpointing": not settings.checkpointing,
        "--vectors host": settings.vectors == "device",
        "--dtype bf16": settings.dtype == "fp32",
        "--microbatch-sequences 1": settings.microbatch_sequences > 1,
    }
    less = [option for option, is_new in options.items() if is_new]
    return ", ".join([*less, f"{'or ' if less else ''}more ranks with --sharding fsdp"])
