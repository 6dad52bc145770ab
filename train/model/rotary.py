"""The rotary embedding of OLMo2, in fp32 whatever the precision of the run.

Shapes: S tokens, B sequences, N heads, D head size.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=2)  # of the run's context, and of a probe's shorter one
def _rotations(
    length: int, head_dim: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position and frequency: [S, 1, 1, D / 2] in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / base**exponents)[:, None, None]
    return angles.cos(), angles.sin()


def rotated(x_SBND: Tensor, base: float) -> Tensor:
    """Return heads with their rotary embedding, computed in fp32 and rounded to their dtype once.

    transformers and OLMo (rope_full_precision) do the same; mcore rounds cos and sin to bf16 first,
    which adds as much error again as the rounding of the result.
    """
    cos, sin = _rotations(x_SBND.shape[0], x_SBND.shape[-1], base, x_SBND.device)
    first, second = x_SBND.float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x_SBND.dtype)
