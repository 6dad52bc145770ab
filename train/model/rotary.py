"""The rotary embedding of OLMo2, in fp32 whatever the precision of the run.

Shapes: S tokens, B sequences, N heads, D head size.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from train.model.config import Llama3Scaling


@lru_cache(maxsize=2)  # of the run's context, and of a probe's shorter one
def rotations(
    length: int,
    head_dim: int,
    base: float,
    device: torch.device,
    scaling: Llama3Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position and feature: [S, 1, 1, D] in fp32.

    The sin of a head's first half is negative.

    Args:
        length: S, positions from 0.
        head_dim: D, even.
        base: feature i of the first half turns by base^(-2i / D) radians a position.
        device: of the result.
        scaling: slows slow features down.

    Example: position 1 turns the first pair of features by 1 radian, the second by 1/100.
        >>> cos, sin = rotations(2, 4, 1e4, torch.device("cpu"))
        >>> cos[1, 0, 0], sin[1, 0, 0]
        (tensor([0.5403, 0.9999, 0.5403, 0.9999]), tensor([-0.8415, -0.0100,  0.8415,  0.0100]))
    """
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, _frequencies(head_dim, base, device, scaling))[:, None, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _frequencies(
    head_dim: int, base: float, device: torch.device, scaling: Llama3Scaling | None
) -> Tensor:
    """Return radians a position of each feature of the first half, [D / 2] in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / base**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotated(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads with their rotary embedding, in fp32; by -sin they are turned back.

    transformers and OLMo (rope_full_precision) compute it in fp32, too; mcore rounds cos and sin to
    bf16 first, which adds as much error again as the rounding of the result.

    Example: position 1 turns the first pair of features by one radian.
        >>> cos, sin = rotations(2, 2, 10_000.0, torch.device("cpu"))
        >>> turned = rotated(torch.tensor([1.0, 0.0]).expand(2, 1, 1, 2), cos, sin)
        >>> [round(feature, 4) for feature in turned[1].flatten().tolist()]
        [0.5403, 0.8415]
    """
    x_SBND = x_SBND.float()
    # Half a head further: features are paired as i and i + D / 2, the convention of HF.
    other_half = x_SBND.roll(x_SBND.shape[-1] // 2, -1)
    return (x_SBND * cos).addcmul_(other_half, sin)
