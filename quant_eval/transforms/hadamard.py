"""Hadamard transforms of a width, whole or in blocks, as Kronecker products of two small matrices.

A Hadamard matrix has entries +1 and -1 and orthogonal rows; here it is divided by the root of its
size, so that it is orthogonal. It spreads an outlier evenly over all features (QuIP#,
arXiv:2402.04396; QuaRot, arXiv:2404.00456). The Kronecker product of two is one again: 4,096 is
64 x 64 and 11,008 is 172 x 64. Small ones come from compressed-tensors, which has those of all
multiples of 4 up to 256 (N. J. A. Sloane's library).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quant_eval.sizes import hadamard_factors
from quant_eval.transforms.steps import Diagonal, Kronecker, TransformStep


def hadamard_steps(
    width: int, block: int | None = None, seed: Sequence[int] | None = None, kept: int = 0
) -> list[TransformStep]:
    """Return the transform of `width` features.

    Args:
        width: of all blocks, which are multiplied by the same matrix.
        block: features that are transformed together; None: all.
        seed: of the signs that features are multiplied by before; None: they keep theirs.
        kept: the first features of every block, which are not transformed.
    """
    size = block or width
    factors = hadamard_factors(size - kept)
    assert factors is not None, "check_hadamard refuses it"
    left_AA, right_BB = (hadamard_matrix(factor) for factor in factors)
    if kept:
        # diag(I, H) is no Kronecker product of two factors, so all of a block is the right one.
        matrix_KK = torch.kron(left_AA, right_BB)
        left_AA, right_BB = matrix_KK.new_ones(1, 1), torch.block_diag(torch.eye(kept), matrix_KK)
    product = Kronecker(left_AA, right_BB, repeats=width // size)
    return [product] if seed is None else [Diagonal(random_signs(width, seed)), product]


def random_signs(width: int, seed: Sequence[int]) -> Tensor:
    """Return +1 or -1 for each feature, float64.

    By Philox, a counter-based generator: a pure function of the seed, on any device.

    Example:
        >>> random_signs(8, seed=[0]).tolist()
        [-1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    """
    words = np.random.Philox(list(seed)).random_raw(width)
    return torch.from_numpy((words >> 63).astype(np.float64)) * 2 - 1


def hadamard_matrix(size: int) -> Tensor:
    """Return the orthogonal Hadamard matrix of a known size, float64.

    By Sylvester's construction for powers of two, of any size; otherwise as in compressed-tensors.

    Args:
        size: 1, 2, a multiple of 4 up to 256, or a power of two.

    Example: rows of equal size, at right angles.
        >>> matrix = hadamard_matrix(12)
        >>> torch.allclose(matrix @ matrix.T, torch.eye(12, dtype=torch.float64))
        True
        >>> round(float(matrix.abs().min()), 3) == round(float(matrix.abs().max()), 3) == 0.289
        True
    """
    from compressed_tensors.transform.utils import hadamard
    from safetensors import safe_open

    if hadamard.is_pow2(size):
        signs = hadamard.deterministic_hadamard_matrix(size, torch.float64)
    else:
        with safe_open(hadamard.REPO_PATH, framework="pt") as file:
            signs = file.get_tensor(str(size)).double()
    matrix: Tensor = signs / size**0.5
    return matrix
