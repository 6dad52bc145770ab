"""Floating-point operations of training, and what GPUs are able to do."""

import functools
import math
import re
from typing import NamedTuple

from train.model.config import ModelConfig, parameter_shapes

# Measured on one H200 and one H100: 43 to 45% with OLMo2-190M and 53 to 56% with OLMo2-1B
# (docs/guides/one-gpu.md). OLMo-core reports 47 to 48% of its own engine with the 7B.
MFU = 0.45

# A model this narrow spends its time on moving logits: with 256 wide and 100,352 tokens the output
# layer is 7/8 of the products, and 14 bytes a logit (`train.planning.memory`), written and read
# once each, bound it at 13% of the peak at 3.35 TB/s; each kernel of its blocks takes as long to
# launch as to run.
NARROW_HIDDEN_SIZE, NARROW_MFU = 512, 0.1


class GpuKind(NamedTuple):
    """A kind of GPU, from NVIDIA's data sheets.

    Attributes:
        peak_flops: dense bf16 FLOP/s.
        memory_bytes: of the GPU.
        fp32_flops: FLOP/s of fp32, not TF32.
        bandwidth: of its memory, bytes/s.
    """

    peak_flops: float
    memory_bytes: int
    fp32_flops: float
    bandwidth: float


GPUS = {
    "h100": GpuKind(989e12, 80 * 10**9, 67e12, 3.35e12),  # SXM
    "h200": GpuKind(989e12, 141 * 10**9, 67e12, 4.8e12),  # SXM
    "a100": GpuKind(312e12, 80 * 10**9, 19.5e12, 2.039e12),  # SXM
}


@functools.cache
def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return FLOPs per training token: 6 N + 12 layers x hidden x sequence_length.

    N are all parameters but the token embedding, which is looked up; lm_head counts. The second
    term is attention's products of queries, keys and values over the whole sequence, causal or not
    (PaLM, arXiv 2204.02311, appendix B). Recomputed activations do not count, so that what is
    divided by the peak is the model FLOPs utilization (MFU).

    Args:
        model: with all its layers.
        sequence_length: tokens that attention sees.

    Example: OLMo2-7B has 41.3 GFLOPs for 6.89e9 parameters and 6.4 for attention.
        >>> from train.model.presets import OLMO2_7B
        >>> round(flops_per_token(OLMO2_7B, 4096) / 1e9, 1)
        47.8
    """
    embedding = model.row.embedding_weight
    multiplied = sum(
        math.prod(shape) for name, shape in parameter_shapes(model).items() if name != embedding
    )
    return float(
        6 * multiplied + 12 * model.num_hidden_layers * model.hidden_size * sequence_length
    )


def assumed_mfu(model: ModelConfig) -> float:
    """Return the share of the peak in bf16 that training is assumed to reach."""
    return NARROW_MFU if model.hidden_size < NARROW_HIDDEN_SIZE else MFU


def kind_of(device_name: str) -> str | None:
    """Return the key in `GPUS` of a CUDA name such as 'NVIDIA H100 80GB HBM3', or None.

    The slower PCIe and NVL boards of H100 and H200 and the slices of MIG are other devices.
    """
    if re.search(r"\bMIG\b", device_name) or re.search(r"\bH[12]00\b.*\b(PCIe|NVL)\b", device_name):
        return None
    match = re.search(r"\b(A100|H100|H200)\b", device_name)
    return match[1].lower() if match else None


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a whole GPU by its CUDA name, or None.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe")
        (989000000000000.0, None)
    """
    kind = kind_of(device_name)
    return GPUS[kind].peak_flops if kind else None
