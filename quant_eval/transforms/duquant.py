"""DuQuant (Lin et al. 2024, arXiv:2406.01721): block rotation, permutation, block rotation.

`fitting` calls `duquant_steps`.

Shapes: I input features, G blocks of K features.
"""

import torch
from torch import Tensor

from quant_eval.transforms.steps import Blocks, Permutation, Transform

MOST_ROTATIONS = 256  # greedy steps, the authors' setting


def duquant_steps(hessian_II: Tensor, block: int) -> tuple[Blocks, Permutation, Blocks]:
    """Return both rotations and the permutation between them, for the mean of x x^T.

    Rotations are built greedily, from the largest feature of a block; the permutation deals the
    features out to the blocks by falling size, forth and back.

    Simpler than the paper: the size of a feature is the root of its mean square, which is known
    after any rotation without the tokens, instead of max|x|; all is fitted to the inputs alone; and
    the rotation of a step has no random part, as in the authors' code.

    Args:
        hessian_II: the mean of x x^T, float64.
        block: features that are rotated together; it divides I.

    Example: the mean square 16 of one feature is spread evenly over all four.
        >>> hessian_II = torch.tensor([16.0, 1.0, 1.0, 1.0]).double().diag()
        >>> sizes_I = Transform(*duquant_steps(hessian_II, block=2)).hessian(hessian_II).diagonal()
        >>> [round(size, 2) for size in sizes_I.tolist()]
        [4.75, 4.75, 4.75, 4.75]
    """
    first = Blocks(_greedy_rotations(_diagonal_blocks(hessian_II, block)))
    # The permutation and the second rotation are fitted to what the first one leaves.
    rotated_II = Transform(first).hessian(hessian_II)
    order_I = _zigzag(rotated_II.diagonal(), block)
    permuted_II = rotated_II[order_I[:, None], order_I]
    second = Blocks(_greedy_rotations(_diagonal_blocks(permuted_II, block)))
    return first, Permutation(order_I), second


def spreading_rotation(size: int) -> Tensor:
    """Return the Helmert matrix, orthogonal [K, K], float64: its first row is 1 / sqrt(K).

    So x times it spreads the first feature evenly over all, and leaves most of each other feature
    in its place.

    Example:
        >>> x = torch.tensor([2.0, 0.0, 0.0, 0.0]).double() @ spreading_rotation(4)
        >>> [round(feature, 4) for feature in x.tolist()]
        [1.0, 1.0, 1.0, 1.0]
    """
    row_K = torch.arange(1, size, dtype=torch.float64)
    below_KK = torch.ones(size, size, dtype=torch.float64).tril(-1)[1:]
    # Row k has k ones and then -k: orthogonal to all other rows, of length sqrt(k (k + 1)).
    below_KK[torch.arange(size - 1), torch.arange(1, size)] = -row_K
    others_KK = below_KK / (row_K * (row_K + 1)).sqrt()[:, None]
    return torch.cat([torch.full((1, size), size**-0.5, dtype=torch.float64), others_KK])


def _greedy_rotations(moments_GKK: Tensor) -> Tensor:
    """Return an orthogonal R for each block, after which its largest mean square is small.

    Every step spreads the feature that is now the largest; of all steps the best is kept, which may
    be the one before the first.
    """
    count, size = moments_GKK.shape[:2]
    spread_KK = spreading_rotation(size).to(moments_GKK.device)
    rotations_GKK = torch.eye(size).to(moments_GKK).expand(count, size, size).clone()
    best_GKK, smallest_G = rotations_GKK.clone(), moments_GKK.diagonal(dim1=1, dim2=2).amax(1)
    for _ in range(MOST_ROTATIONS):
        largest_G = moments_GKK.diagonal(dim1=1, dim2=2).argmax(1)
        step_GKK = _exchanged(spread_KK, largest_G)
        rotations_GKK = rotations_GKK @ step_GKK
        # Inputs become x R, so their second moment becomes R^T M R.
        moments_GKK = step_GKK.mT @ moments_GKK @ step_GKK
        peak_G = moments_GKK.diagonal(dim1=1, dim2=2).amax(1)
        is_better_G = peak_G < smallest_G
        best_GKK[is_better_G] = rotations_GKK[is_better_G]
        smallest_G = torch.minimum(peak_G, smallest_G)
    return best_GKK


def _exchanged(matrix_KK: Tensor, feature_G: Tensor) -> Tensor:
    """Return the matrix for each block with its first row and column exchanged for a feature's."""
    count, size = len(feature_G), len(matrix_KK)
    order_GK = torch.arange(size, device=feature_G.device).repeat(count, 1)
    # Swap feature 0 and the given one; where they are the same both writes change nothing.
    order_GK[:, 0] = feature_G
    order_GK.scatter_(1, feature_G[:, None], 0)
    return matrix_KK[order_GK[:, :, None], order_GK[:, None, :]]


def _zigzag(size_I: Tensor, block: int) -> Tensor:
    """Return the order in which blocks have features of even size: dealt out forth and back."""
    falling_I = size_I.argsort(descending=True, stable=True)
    count = len(size_I) // block
    dealt_KG = falling_I.view(block, count)
    # Without turning around, the first block would get the largest feature of every round.
    dealt_KG[1::2] = dealt_KG[1::2].flip(1)
    return dealt_KG.T.reshape(-1)


def _diagonal_blocks(matrix_II: Tensor, block: int) -> Tensor:
    """Return the blocks [G, K, K] on the diagonal."""
    count = len(matrix_II) // block
    return matrix_II.view(count, block, count, block).diagonal(dim1=0, dim2=2).movedim(-1, 0)
