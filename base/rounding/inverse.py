"""The inverse of a triangular factor, its rows shared over ranks; `gptq.prepare` calls it.

Shapes: I input features, R rows of a part.
"""

import torch
from torch import Tensor

from base.ranks import Ranks

MIN_ROWS = 128  # of a part: fewer multiply slowly
PARTS = 16


def scaled_inverse(lower_II: Tensor, ranks: Ranks) -> Tensor:
    """Return diag(L) L^-1 of a lower triangular L, float64 [I, I], on every rank.

    Row i ends at column i and depends on the first i rows of L alone. So the rows are computed in
    parts that are the same for any number of ranks, which takes a third of the products that all
    columns of all rows would. Parts are dealt out to the ranks and back again, since later ones are
    longer.

    Args:
        lower_II: float64, the same on every rank; what is right of its diagonal is not read.
        ranks: that share the rows; every rank has to call it.

    Example:
        >>> from base.ranks import ALONE
        >>> scaled_inverse(torch.tensor([[2.0, 0.0], [1.0, 4.0]]).double(), ALONE).tolist()
        [[1.0, 0.0], [-0.5, 1.0]]
    """
    rows = max(MIN_ROWS, -(-len(lower_II) // PARTS))
    diagonal_I = lower_II.diagonal()
    inverse_II = lower_II.new_zeros(lower_II.shape)  # row-major, as L is not
    starts = range(0, len(lower_II), rows)

    # Deal the parts out as 0, 1, .., n-1, n-1, .., 1, 0, and so on.
    turns = [*range(ranks.size), *reversed(range(ranks.size))]
    owners = [turns[part % len(turns)] for part in range(len(starts))]

    for start, owner in zip(starts, owners, strict=True):
        if owner == ranks.rank:
            end = min(start + rows, len(lower_II))
            diagonal_RI = lower_II.new_zeros(end - start, end)
            diagonal_RI.diagonal(start).copy_(diagonal_I[start:end])
            inverse_II[start:end, :end] = torch.linalg.solve_triangular(
                lower_II[:end, :end], diagonal_RI, upper=False, left=False
            )
    for start, owner in zip(starts, owners, strict=True):
        ranks.broadcast(inverse_II[start : start + rows], owner)
    return inverse_II
