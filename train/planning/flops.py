"""Floating-point operations of training, and what GPUs are able to do."""

import functools
import math
import re
from typing import NamedTuple

from train.model.config import (
    ModelConfig,
    hidden_matrices,
    multiplied_parameters,
    parameter_shapes,
)
from train.run.config import RunConfig

GPUS_PER_NODE = 8  # of machines larger than one node


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
    """Return FLOPs per training token: 6 N + 12 layers x heads' width x sequence_length.

    N are all parameters but the token embedding, which is looked up; the head counts, also where it
    is the embedding. The second term is attention's products of queries, keys and values over the
    whole sequence, causal or not (PaLM, arXiv 2204.02311, appendix B). Recomputed activations do
    not count, so that what is divided by the peak is the model FLOPs utilization (MFU).

    Args:
        model: with all its layers.
        sequence_length: tokens that attention sees.

    Example: OLMo2-7B has 41.3 GFLOPs for 6.89e9 parameters and 6.4 for attention.
        >>> from train.model.presets import OLMO2_7B
        >>> round(flops_per_token(OLMO2_7B, 4096) / 1e9, 1)
        47.8
    """
    attention = 12 * model.num_hidden_layers * model.query_size * sequence_length
    return float(6 * multiplied_parameters(model) + attention)


def training_flops(run: RunConfig, after: int, until: int) -> float:
    """Return the FLOPs of the updates of `run` after `after`, up to `until`, of all their passes.

    Rounding weights and drawing noise are no products, and do not count.
    """
    per_token = flops_per_token(run.model, run.data.sequence_length)
    return run.passed_tokens(after, until) * per_token


@functools.cache
def product_weights(model: ModelConfig) -> int:
    """Return the weights of a layer's matrix products; those of the head are a matrix more.

    Example: q, k, v, o and gate, up, down.
        >>> from train.model.presets import OLMO2_7B
        >>> product_weights(OLMO2_7B) == 4 * 4096**2 + 3 * 4096 * 11008
        True
    """
    shapes, matrices = parameter_shapes(model), hidden_matrices(model)
    return sum(math.prod(shapes[name]) for name in matrices) // model.num_hidden_layers


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
