"""QTIP (Tseng et al. 2024, arXiv:2406.11235): trellis codes of tiles of a weight, in GPTQ's order.

`quantizers.qtip` calls `qtip`, and `sizes.check_tiles` before a model is read. The code of a tile
is in `trellis_code`.

Shapes: O output features (rows), I input features, B columns of a block, R tiles of 16 rows, T
    weights of a tile, C bytes of a tile.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from base.errors import UserError
from quant_eval.group import LinearGroup
from quant_eval.rounding.gptq import ROW_MULTIPLE, factored
from quant_eval.rounding.trellis_code import Trellis
from quant_eval.sizes import TILE, check_tiles
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.steps import Transform

# Weights have 0.9 of the deviation of the code's values, as in the authors' script: large ones are
# in reach. Of normal ones, the error is 10% less than with 1 at 4 bits, 1% more at 2.
DEVIATION = 0.9


@torch.no_grad()
def qtip(group: LinearGroup, bits: int, states: int, damping: float) -> Tensor:
    """Return the quantized weights of linears that read one input, in the basis they are given in.

    With S and T random signs times a Hadamard matrix, W' = S^T W T is rounded on inputs with the
    second moment T^-1 H T^-T, and S Q(W') T^-1 returned: weights and Hessian are incoherent, so
    that weights are nearly normal, as the code is. T is one for all the linears, S and the scale of
    the weights are each linear's own.

    Rows are rotated together, but tiles of 16 rows are rounded independently: ranks share them, and
    on a CPU the bits do not depend on the number of ranks.

    Args:
        group: the linears, and the seed of the random signs.
        bits: of a weight.
        states: log2 of those of the trellis.
        damping: of the Hessian.

    Returns:
        fp32 [O, I].

    Raises:
        UserError: a width has no tiles or Hadamard matrix, the Hessian is not positive definite, or
            a weight is not finite.
    """
    weight_OI, sizes, name, ranks = group.weight_OI, list(group.sizes), group.name, group.ranks
    for width, side in ((weight_OI.shape[1], "inputs"), *((size, "outputs") for size in sizes)):
        check_tiles(width, f"{side} of {name}", bits)

    # incoherent inputs and outputs
    device = weight_OI.device
    inputs = _rotation(weight_OI.shape[1], [*group.seed, 0], device)
    outputs = [_rotation(size, [*group.seed, i + 1], device) for i, size in enumerate(sizes)]
    assert group.hessian_II is not None
    natural_I = torch.arange(weight_OI.shape[1], device=device)
    prepared = factored(
        inputs.hessian(group.hessian_II), natural_I, damping, name, group.products, ranks
    )
    trellis = Trellis(bits, states, device)

    # weights to the deviation of the code, each linear by its own scale
    rotated, scales = [], []
    for part_OI, output in zip(weight_OI.split(sizes), outputs, strict=True):
        # S acts on outputs, so it multiplies the rows of the transposed weight.
        rotated.append(output.weight(inputs.weight(part_OI.float()).T).T)
        scales.append(rotated[-1].double().square().mean().sqrt().float() / DEVIATION)
    if not all(bool(scale.isfinite()) for scale in scales):
        raise UserError(
            f"{name}: weights hold NaN or infinity; check the checkpoint with"
            " 'python -m ckpt_tools inspect --verify'"
        )
    # a linear of zeros stays one, with a scale of 0
    unit_OI = torch.cat(
        [part / (scale or 1.0) for part, scale in zip(rotated, scales, strict=True)]
    )

    # the codes, and back to the basis of the weights
    share = ranks.share(len(unit_OI) // TILE)
    rows_OI = unit_OI[share.start * TILE : share.stop * TILE]
    codes = ranks.gather(round_tiles(rows_OI, prepared.factor_II, trellis), len(unit_OI) // TILE)
    parts = []
    quantized = dense_tiles(codes, trellis).split(sizes)
    for part_OI, scale, output in zip(quantized, scales, outputs, strict=True):
        parts.append(output.restored((part_OI * scale).T).T)
    return inputs.restored(torch.cat(parts))


def round_tiles(weight_OI: Tensor, factor_II: Tensor, trellis: Trellis) -> Tensor:
    """Return the codes of all tiles of a weight, uint8 [R, I / 16, C]: BlockLDLQ.

    With F of `gptq.factored`, the objective of the error E of all weights is tr(E A E^T) = tr((E
    F^-1) D (E F^-1)^T), where D is diagonal. GPTQ rounds a column at a time, E = e F. Here block b
    of columns is rounded as a whole to what is nearest, and its error E_b, the difference from what
    it was then, moves the later columns by

        W_later <- W_later - E_b F_bb^-1 F_b,later

    For all that is known by then this makes the objective smallest: E F^-1 has E_b F_bb^-1 in the
    columns of b, and 0 in those that are not yet rounded.
    """
    num_rows, num_inputs = weight_OI.shape
    # rows are padded, so that they come out the same whichever are computed together
    weight_IO = weight_OI.new_zeros(num_inputs, -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE)
    weight_IO[:, :num_rows] = weight_OI.T
    columns = []
    for start in range(0, num_inputs, TILE):
        block_BO, end = weight_IO[start : start + TILE], start + TILE
        # A tile is 16 outputs by 16 inputs, read output by output.
        tiles_RT = block_BO[:, :num_rows].T.reshape(-1, TILE * TILE)
        columns.append(trellis.encode(tiles_RT))
        # A view of `weight_IO`: from here on the block holds its errors.
        block_BO[:, :num_rows] -= trellis.decode(columns[-1]).view(num_rows, TILE).T
        factor_BI = factor_II[start:end, start:]
        # F_bb^-1 F_b,later of the formula above, of which only the product with errors is needed.
        moves_BI = torch.linalg.solve_triangular(
            factor_BI[:, :TILE], factor_BI[:, TILE:], upper=True, unitriangular=True
        )
        weight_IO[end:].addmm_(moves_BI.T, block_BO, alpha=-1)
    return torch.stack(columns, 1)


def dense_tiles(codes_RIC: Tensor, trellis: Trellis) -> Tensor:
    """Return the weights of all tiles from their codes, fp32 [O, I], of deviation 1."""
    tiles = trellis.decode(codes_RIC.flatten(0, 1)).view(*codes_RIC.shape[:2], TILE, TILE)
    return tiles.transpose(1, 2).reshape(len(codes_RIC) * TILE, -1)


def _rotation(width: int, seed: Sequence[int], device: torch.device) -> Transform:
    """Return random signs and a Hadamard matrix."""
    return Transform(*hadamard_steps(width, seed=seed)).to(device)
