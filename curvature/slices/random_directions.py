"""Random directions that move every filter by its own norm (Li et al. 2018, arXiv:1712.09913, section 4).

Networks whose matrices are scaled and followed by a norm compute the same function, yet a step of fixed length means
much to small weights and little to large ones; with filters normalised the planes of such networks look alike.

Shapes: O rows of a matrix, I entries of a row.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def filter_normalised(weights: Mapping[str, Tensor], seed: int, index: int) -> dict[str, Tensor]:
    """Direction `index` of a seed: each row of a matrix is Gaussian, scaled to the norm of the weights' row.

    A row is what one output of a linear, or one token of an embedding, is made of. Norms and biases, which are vectors,
    do not move, as in the paper, and are absent. The unit is therefore the weights' own norm: the direction is as long
    as all matrices together, and at distance 1 every row has moved by its length.

    The numbers are Philox's (Salmon et al. 2011) under the 128-bit BLAKE2b of the text 'seed/index/name': neither the
    order of the parameters nor the device enters.
    """
    direction = {}
    for name, weight in weights.items():
        if weight.dim() > 1:
            key = hashlib.blake2b(f"{seed}/{index}/{name}".encode(), digest_size=16).digest()
            philox = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            drawn = torch.from_numpy(philox.standard_normal(tuple(weight.shape), dtype=np.float32)).to(weight.device)
            scale_O = weight.detach().flatten(1).norm(dim=1) / drawn.flatten(1).norm(dim=1)
            direction[name] = drawn.mul_(scale_O.view(-1, *[1] * (weight.dim() - 1)))
    return direction
