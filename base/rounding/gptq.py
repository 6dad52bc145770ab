"""GPTQ (Frantar et al. 2022, arXiv:2210.17323, algorithm 1): float64 factors, fp32 rounding.

Columns are rounded from left to right, in blocks of 128. The errors of a block reach the columns
right of it in one product (lazy updates, step 2); `columns` draws the updates within a block:

    columns   0..127     128..255   256..383
    block 0   round (E)  u          u
    block 1   final      round (E)  u
    block 2   final      final      round (E)

Shapes: O output features (rows), I input features (columns), C columns of one block, G groups of a
    row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from base.errors import UserError
from base.ranks import ALONE, Ranks
from base.rounding.columns import block_rounding
from base.rounding.grid import Points, Rounded, check_scales, fit_points, largest_of
from base.rounding.inverse import scaled_inverse
from base.rounding.order import order_of
from base.rounding.spec import RoundingSpec

# Columns whose errors reach the columns right of them together. Part of the definition: see `gptq`
# on groups.
BLOCK_COLUMNS = 128
# Rows are padded to whole vector registers: a row then rounds to the same bits whichever rows are
# computed with it.
ROW_MULTIPLE = 64
CHUNK_ROWS = 1024  # in float64 at a time


@dataclass(frozen=True)
class Preparation:
    """The part of rounding that depends on the inputs; the same for all rows.

    Attributes:
        order_I: int64, the input features in the order in which they are rounded.
        dead_I: bool, features that are zero on every calibration token, unless all are.
        factor_II: fp32, along `order_I`; unit upper triangular: an error e of column i moves column
            j > i by -e x factor_ij, which is what makes the objective smallest again.
    """

    order_I: Tensor
    dead_I: Tensor
    factor_II: Tensor


def row_output_errors(
    weight_OI: Tensor, quantized_OI: Tensor, hessian_II: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (w - wq) H (w - wq)^T, GPTQ's objective (eq. 1), and w H w^T of each row, [O].

    With H the mean of x x^T both are mean squares of outputs; their ratio is the relative error.

    Example: errors of the same sign add up under correlated inputs, of opposite signs they cancel.
        >>> weight_OI = torch.tensor([[1.5, 1.5], [1.5, 0.5]])
        >>> hessian_II = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
        >>> row_output_errors(weight_OI, torch.ones(2, 2), hessian_II)[0].tolist()
        [0.75, 0.25]
    """
    none_O = weight_OI.new_empty(0, dtype=torch.float64)
    errors, norms = [none_O], [none_O]
    for weight_CI, quantized_CI in zip(
        weight_OI.split(CHUNK_ROWS), quantized_OI.split(CHUNK_ROWS), strict=True
    ):
        exact_CI = weight_CI.double()
        errors.append(_quadratic_forms(exact_CI - quantized_CI.double(), hessian_II))
        norms.append(_quadratic_forms(exact_CI, hessian_II))
    return torch.cat(errors), torch.cat(norms)


def _quadratic_forms(rows_CI: Tensor, hessian_II: Tensor) -> Tensor:
    """Return x H x^T of each row x in float64.

    H is symmetric, so blocks of columns left of the diagonal are not read, and those right of it
    count twice: 9/16 of the products.
    """
    forms_C = rows_CI.new_zeros(len(rows_CI))
    size = -(-len(hessian_II) // 8)
    for start in range(0, len(hessian_II), size):
        own = slice(start, start + size)
        own_CK = rows_CI[:, own]
        product_CK = own_CK @ hessian_II[own, own]
        product_CK.addmm_(rows_CI[:, :start], hessian_II[:start, own], alpha=2)
        forms_C += product_CK.mul_(own_CK).sum(1)
    return forms_C


def prepare(
    hessian_II: Tensor,
    spec: RoundingSpec,
    name: str,
    products: torch.dtype = torch.float64,
    ranks: Ranks = ALONE,
) -> Preparation:
    """Return the order of the columns and the factor of the damped inverse Hessian.

    Order: `actorder` by falling diag(H); `groupaware` (arXiv:2505.14638) whole groups by their
    largest diag(H), and by falling diag(H) within a group, as in gptqmodel 7.6; ties in natural
    order. Atom and QUIK: natural, but the inputs that are kept last (see `mixed`).

    Dead columns, where H_ii = 0: the objective does not depend on their weights. The zero is
    replaced by the mean of the live diagonal. The authors' code and gptqmodel take 1 instead,
    before they damp and order; that depends on the unit of H, in which the two differ. Here neither
    damping nor order sees dead columns: they come last.

    A dead linear, where H = 0: no weight matters to the objective. All are rounded to nearest, and
    none is set to 0, as the authors' code does; results name such linears.

    The scale of H = X X^T is free.

    Args:
        hessian_II: float64, the same on all ranks.
        spec: its order and damping, relative to the mean of the live diagonal.
        name: of the weight, for messages.
        products: dtype that the products of H were summed in.
        ranks: that share the work; every rank has to call it.

    Raises:
        UserError: H is not positive definite beyond what its precision can tell; nothing else is
            tried.

    Example: an error of the first column moves the second by h_12 / (h_22 + damping) = 0.9 / 1.05.
        >>> from base.rounding.spec import IntegerSpec
        >>> hessian_II = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
        >>> prepared = prepare(hessian_II, IntegerSpec("gptq", 3, 2), "a weight")
        >>> round(float(prepared.factor_II[0, 1]), 4)
        -0.8571
    """
    assert spec.damping is not None

    # Neither the order nor the damping may depend on dead columns: means are over live ones.
    diagonal_I = hessian_II.diagonal()
    dead_I, order_I = diagonal_I == 0, order_of(diagonal_I, spec)
    if bool(dead_I.all()):
        unmoved_II = torch.eye(len(dead_I), dtype=torch.float32, device=dead_I.device)
        return Preparation(order_I, ~dead_I, unmoved_II)
    live_mean = diagonal_I.sum() / (~dead_I).sum()
    added_I = (dead_I + spec.damping) * live_mean
    factor_II = _factor(hessian_II, added_I, order_I, products, ranks)
    if factor_II is None:
        raise UserError(
            f"{name}: the calibration Hessian with damping {spec.damping:g} is not positive"
            " definite; use a spec with a larger damp or more calibration sequences"
        )
    return Preparation(order_I, dead_I, factor_II)


def _factor(
    hessian_II: Tensor, added_I: Tensor, order_I: Tensor, products: torch.dtype, ranks: Ranks
) -> Tensor | None:
    """Return diag(U)^-1 U for the upper triangular U with U^T U = (H + diag(added))^-1.

    A = H + diag(added) is R R^T with R upper triangular, its Cholesky factor with columns in
    reverse; so U = R^-1. With F the factor, a pivot R_ii^2 is F_i A F_i^T: what remains of A_ii
    given all later columns. None if a pivot is no larger than noise could make it, as F is noise
    then too:

    - Rounding every A_jk by eps sqrt(A_jj A_kk) in float64 moves it by up to eps (sum_j |F_ij|
      sqrt(A_jj))^2. (Measured: singular matrices stay below 0.02 of this bound whatever the order
      and the sizes of the inputs; regular ones of condition 1e13 are above by 78 or more.)
    - Sums of `products` round every A_jk by about eps sqrt(A_jj A_kk) independently, which moves it
      by about eps sum_j F_ij^2 A_jj. (Measured in fp32 on bf16 inputs: singular matrices stay below
      1e-8 of this, regular ones without damping are above by 20 or more, with damping 1e-4 by 800.)
    """
    # Cholesky of A in reverse order: flipped back, it is upper triangular along `order_I`.
    reverse_I = order_I.flip(0)
    damped_II = hessian_II[reverse_I[:, None], reverse_I]
    damped_II.diagonal().add_(added_I[reverse_I])
    diagonal_I = damped_II.diagonal().clone()
    lower_II, failed_at = torch.linalg.cholesky_ex(damped_II)
    root_I = lower_II.diagonal().clone()
    del damped_II  # of 11,008 inputs each of these takes 1 GB
    factor_II = scaled_inverse(lower_II, ranks)  # F lower = diag(lower), both in reverse
    del lower_II

    # Refuse pivots that rounding noise could have made.
    size_I, parts = diagonal_I.sqrt(), factor_II.split(CHUNK_ROWS)
    moved_I = torch.cat([part_CI.abs() @ size_I for part_CI in parts]).square()
    noise_I = torch.finfo(torch.float64).eps * moved_I
    if products != torch.float64:
        moved_I = torch.cat([part_CI.square() @ diagonal_I for part_CI in parts])
        noise_I = noise_I.maximum(torch.finfo(products).eps * moved_I)
    is_regular = (failed_at == 0) & (root_I.square() > noise_I).all()
    return factor_II.float().flip(0, 1) if bool(is_regular) else None


def gptq(
    weight_OI: Tensor, preparation: Preparation, spec: RoundingSpec, largest: Tensor | None = None
) -> Rounded:
    """Round column after column; the columns after each compensate its error.

    Rows do not interact, so linears that read the same input may be stacked along O, and rows may
    be computed separately: on a CPU every row comes out the same, bit for bit.

    Groups: with `actorder` they are formed along the order, as in the authors' code, so a group is
    no range of input features; otherwise a group is. With static groups all grids are fitted to the
    original weight, and a group is a range of input features in any order. Else a group's grid is
    fitted when its first column is reached, to weights that carry the corrections of all columns of
    earlier blocks of 128 columns, but not of the same block: the authors' code and gptqmodel do so
    too, and without it groups of less than 128 would have other scales than theirs. A scale of the
    tensor is that of the original weight, whose max|w| is `largest`, as in `round_to_nearest`.

    Dead columns are set to 0, before the grids of groups are fitted, but after the one grid of a
    whole row: also as in both.

    Args:
        weight_OI: of any float dtype.
        preparation: by `prepare`, of the inputs of this weight.
        spec: the same as there.
        largest: fp32 [1]; None: max|w| of this weight.

    Raises:
        UserError: a weight is not finite, or a scale is beyond the spec's format.

    Example: the nearest points are 3 and 1. 3 is too small by 0.5, so 1.4 becomes 1.4 + 0.43.
        >>> from base.rounding.spec import IntegerSpec
        >>> spec = IntegerSpec("gptq", 3, 2)
        >>> hessian_II = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
        >>> gptq(torch.tensor([[3.5, 1.4]]), prepare(hessian_II, spec, "a weight"), spec).dense()
        tensor([[3., 2.]])
    """
    return gptq_with_errors(weight_OI, preparation, spec, largest)[0]


@torch.no_grad()
def gptq_with_errors(
    weight_OI: Tensor, preparation: Preparation, spec: RoundingSpec, largest: Tensor | None = None
) -> tuple[Rounded, Tensor]:
    """Round as `gptq`; return also the errors, fp32 [I, O], along the order, of columns as moved.

    O is padded to whole ROW_MULTIPLEs.
    """
    num_outputs, num_inputs = weight_OI.shape
    group_size, order_I = spec.group_size or num_inputs, preparation.order_I
    weight_IO = weight_OI.new_zeros(
        num_inputs, -(-num_outputs // ROW_MULTIPLE) * ROW_MULTIPLE, dtype=torch.float32
    )
    weight_IO[:, :num_outputs] = weight_OI.T

    # Grids [G, O] of all groups. They are final, or each is fitted again when it is reached.
    is_final = spec.group_size is None or bool(spec.static_groups)
    largest = largest_of(weight_OI) if largest is None else largest
    if spec.group_size is None:
        grid = _group_grids(weight_IO, group_size, spec, largest)
    weight_IO.masked_fill_(preparation.dead_I[:, None], 0.0)
    if spec.group_size is not None:
        grid = _group_grids(weight_IO, group_size, spec, largest)

    # From here on weights are in the order of rounding, codes in that of the input features.
    weight_IO = weight_IO[order_I]
    group_I = _groups(order_I, group_size, spec)
    codes_IO = torch.empty_like(weight_IO, dtype=torch.uint8)
    steps_CO = torch.empty_like(weight_IO[:BLOCK_COLUMNS])
    for start in range(0, num_inputs, BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, num_inputs)

        # Groups that begin in this block: their weights carry the errors of all earlier blocks.
        firsts = range(-(-start // group_size) * group_size, end, group_size)
        if firsts and not is_final:
            members = slice(firsts[0], firsts[-1] + group_size)
            fitted: Any = _group_grids(weight_IO[members], group_size, spec, largest)
            grid.copy_(fitted, group_I[members][::group_size])

        # Round the block in place, so that its weights become errors.
        error_CO, factor_CI = weight_IO[start:end], preparation.factor_II[start:end]
        group_C, steps_CO = group_I[start:end], steps_CO[: end - start]
        round_block = block_rounding(error_CO, grid)
        round_block(error_CO, factor_CI[:, start:end], grid, group_C, steps_CO)
        codes_IO[order_I[start:end]] = grid.of(group_C).codes(steps_CO)

        # The lazy update: all errors of the block reach all columns right of it at once.
        weight_IO[end:].addmm_(factor_CI[:, end:].T, error_CO, alpha=-1)

    # Cut the padding rows off.
    scales_OG = grid.scale[:, :num_outputs].T.contiguous()
    zeros_OG = grid.zeros()[:, :num_outputs].T.contiguous()
    check_scales(scales_OG, weight_OI, spec)
    groups_I = torch.empty_like(group_I, dtype=torch.int32).index_copy_(0, order_I, group_I.int())
    codes_OI = codes_IO[:, :num_outputs].T.contiguous()
    numbers, global_scale = grid.numbers, grid.global_scale
    return Rounded(codes_OI, scales_OG, zeros_OG, groups_I, numbers, global_scale), weight_IO


def _groups(order_I: Tensor, group_size: int, spec: RoundingSpec) -> Tensor:
    """Return the group of each column, int64 [I] along the order; see `gptq` on groups."""
    if spec.order == "actorder" and not spec.static_groups:
        return torch.arange(len(order_I), device=order_I.device) // group_size
    return order_I // group_size


def _group_grids(weight_IO: Tensor, group_size: int, spec: RoundingSpec, largest: Tensor) -> Points:
    """Fit the grids [G, O] of successive groups of inputs."""
    return fit_points(weight_IO.unflatten(0, (-1, group_size)).transpose(0, 1), spec, largest)
