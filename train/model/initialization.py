"""Initial weights, drawn parameter by parameter: the same for every engine, layout and library.

A weight is the normal quantile of a random number of 31 bits and a sign. The numbers come from
Philox, which counts: a chunk of a parameter is drawn by itself, on whatever thread. The quantile is
a line between exact values, so that sums and products alone decide a weight: no version of torch or
numpy has another algorithm for those.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from train.model.config import ModelConfig, parameter_shapes

CUT_AT = 3.0  # standard deviations (allenai/OLMo, olmo/initialization.py, init_cutoff_factor)
CHUNK = 1 << 15  # weights of one counter: torch computes on so few in the calling thread

# The cells of the table: fp32 probabilities up to 1/2, by exponent and first bits of the mantissa.
FIRST_EXPONENT = -33  # of the smallest one, half of 2^-32
CELL_BITS, PLACE_BITS = 10, 13  # of the mantissa: which cell, and the place within it


def initial_parameter(name: str, model: ModelConfig, seed: int, factor: float = 1.0) -> Tensor:
    """Return the initial fp32 value of a parameter, a function of seed and HF name.

    Norm weights are 1 and biases 0. Every matrix, the embedding and lm_head included, is normal
    with std `initializer_range`, for OLMo2 truncated at three standard deviations; all of that
    times `factor`.

    Args:
        name: of the parameter in HF's checkpoint.
        model: whose shapes it has.
        seed: of the run.
        factor: of the run's parametrization, `RunConfig.scaling_of`.

    Example: a matrix of OLMo2, with std 0.02 cut at 0.06.
        >>> from train.model.presets import OLMO2_30M
        >>> weight = initial_parameter("model.layers.0.self_attn.q_proj.weight", OLMO2_30M, 0)
        >>> tuple(weight.shape), round(float(weight.std()), 3), bool(weight.abs().max() < 0.06)
        ((256, 256), 0.02, True)
    """
    shape = parameter_shapes(model)[name]
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith(".bias") else factor)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    weight = torch.empty(shape)
    cut_at = {"normal": None, "truncated_normal": CUT_AT}[model.initializer]
    draw_normal(weight.view(-1), key, std=model.initializer_range * factor, cut_at=cut_at)
    return weight


def draw_normal(weights: Tensor, key: int, *, std: float, cut_at: float | None) -> None:
    """Fill a flat fp32 tensor with normal numbers, all within `cut_at` standard deviations.

    Args:
        weights: overwritten.
        key: of Philox, 128 bits; each chunk of 32,768 weights has a counter of its own.
        std: before the cut, which makes it smaller.
        cut_at: in standard deviations; None: no cut.

    Example: cut at three standard deviations.
        >>> weights = torch.empty(100_000)
        >>> draw_normal(weights, key=0, std=0.02, cut_at=3.0)
        >>> round(float(weights.std()), 4), float(weights.abs().max()) <= 0.06
        (0.0197, True)
    """
    lowest = NormalDist().cdf(-cut_at) if cut_at else 0.0

    def draw(chunk: int) -> None:
        part = weights[chunk * CHUNK : (chunk + 1) * CHUNK]
        # The low 64 bits of the counter count within the chunk, the higher ones are its number.
        generator = np.random.Philox(key=key, counter=chunk << 64)
        bits = generator.random_raw((len(part) + 1) // 2).view(np.int32)
        torch.mul(standard_normal(torch.from_numpy(bits)[: len(part)], lowest), std, out=part)

    with ThreadPoolExecutor(_threads()) as pool:
        list(pool.map(draw, range(-(-len(weights) // CHUNK))))  # raises what a thread raised


def _threads() -> int:
    """Return this rank's share of the machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def standard_normal(bits: Tensor, lowest: float = 0.0) -> Tensor:
    """Return a standard normal number for every int32, none with less than `lowest` beyond it.

    It is the same on any device.

    Args:
        bits: int32 of any shape.
        lowest: a probability.

    Example: the sign bit is that of the number.
        >>> standard_normal(torch.tensor([1 << 30, (1 << 30) - (1 << 31)], dtype=torch.int32))
        tensor([ 0.6745, -0.6745])
    """
    sign, magnitude = bits & -(1 << 31), bits & ((1 << 31) - 1)
    # The 0.5 keeps the probability above 0, which has no quantile.
    beyond = magnitude.float().add_(0.5).mul_((0.5 - lowest) * 2.0**-31).add_(lowest)

    as_bits = beyond.view(torch.int32)
    cell = (as_bits >> PLACE_BITS).sub_((FIRST_EXPONENT + 127) << CELL_BITS)  # exponents are biased
    fraction = (as_bits & ((1 << PLACE_BITS) - 1)).float().mul_(2.0**-PLACE_BITS)

    first, rise = _quantiles_on(bits.device)
    cell = cell.view(-1)  # what selects an index takes one dimension
    distance = rise.index_select(0, cell).mul_(fraction.view(-1))
    distance.add_(first.index_select(0, cell))
    # A distance is not negative, so its sign bit is 0, and xor sets that of the number.
    distance.view(torch.int32).bitwise_xor_(sign.view(-1))
    return distance.view(bits.shape)


@cache
def _quantiles_on(device: torch.device) -> tuple[Tensor, Tensor]:
    first, rise = _quantiles()
    return first.to(device), rise.to(device)


@cache
def _quantiles() -> tuple[Tensor, Tensor]:
    """Return by cell the distance from 0 beyond which its first probability is, and the rise.

    With the roundings of fp32 a line in a cell is off by less than 5e-7.
    """
    mantissas = 1 + np.arange(1 << CELL_BITS) / (1 << CELL_BITS)
    octaves = 2.0 ** np.arange(FIRST_EXPONENT, -1)
    # A probability of exactly 1/2 has a cell of its own, in which nothing rises.
    probabilities = [*np.outer(octaves, mantissas).flatten().tolist(), 0.5, 0.5]
    distances = np.array([-NormalDist().inv_cdf(probability) for probability in probabilities])
    return torch.from_numpy(distances[:-1]).float(), torch.from_numpy(np.diff(distances)).float()
