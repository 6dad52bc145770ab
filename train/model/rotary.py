"""The rotary embedding of OLMo2, in fp32 whatever the precision of the run.

Shapes: S tokens, B sequences, N heads, D head size.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=2)  # of the run's context, and of a probe's shorter one
def rotations(
    length: int, head_dim: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position and frequency: [S, 1, 1, D / 2] in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / base**exponents)[:, None, None]
    return angles.cos(), angles.sin()


def rotated(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads with their rotary embedding, in fp32; by -sin they are turned back.

    transformers and OLMo (rope_full_precision) compute it in fp32, too; mcore rounds cos and sin to
    bf16 first, which adds as much error again as the rounding of the result.
    """
    x_SBND = x_SBND.float()
    turned = x_SBND * torch.cat((cos, cos), -1)
    first, second = turned.chunk(2, -1)
    first_before, second_before = x_SBND.chunk(2, -1)
    first.addcmul_(second_before, sin, value=-1)
    second.addcmul_(first_before, sin)
    return turned
