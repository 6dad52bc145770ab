"""GPTQ (Frantar et al. 2022, arXiv:2210.17323, algorithm 1): float64 factors, fp32 rounding.

Columns are rounded from left to right, in blocks of 128. The errors of a block reach the columns
right of it in one product (lazy updates, step 2):

    columns   0..127     128..255   256..383
    block 0   round (E)  u          u
    block 1   final      round (E)  u
    block 2   final      final      round (E)

Within a block the same is nested. After column k, the errors (E) of the last s = k & -k columns
move the next s columns (u) in one product:

    column        1 2 3 4 5 6 7 8
    k = 1, s = 1  E u . . . . . .
    k = 2, s = 2  E E u u . . . .
    k = 3, s = 1  . . E u . . . .
    k = 4, s = 4  E E E E u u u u
    k = 5, s = 1  . . . . E u . .
    k = 6, s = 2  . . . . E E u u
    k = 7, s = 1  . . . . . . E u

Read down a column: before its turn it has received the error of each column left of it, once. Here
12 columns are written, where updates of all columns right of each E would write 28.

Shapes: O output features (rows), I input features (columns), C columns of one block, G groups of a
row of K features, R rows of a part of an inverse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, assert_never

import torch
from torch import Tensor

from base.errors import UserError
from base.ranks import ALONE, Ranks
from quant_eval.group import Rounded
from quant_eval.quantizer import ColumnSpec, GridSpec
from quant_eval.rounding.grid import Grid, Points, check_scales, fit_points, largest_of

# Columns whose errors reach the columns right of them together. Part of the definition: see `gptq`
# on groups.
BLOCK_COLUMNS = 128
# Rows are padded to whole vector registers: a row then rounds to the same bits whichever rows are
# computed with it.
ROW_MULTIPLE = 64
CHUNK_ROWS = 1024  # in float64 at a time
MIN_PART_ROWS = 128  # of an inverse: fewer multiply slowly
PARTS = 16

Rounding = Callable[[Tensor, Tensor, Any, Tensor, Tensor], None]  # of a grid of one kind


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


def prepare(
    hessian_II: Tensor,
    spec: ColumnSpec,
    name: str,
    products: torch.dtype = torch.float64,
    ranks: Ranks = ALONE,
) -> Preparation:
    """Return the spec's order of the columns and the factor of the damped inverse Hessian.

    Order: `actorder` by falling diag(H); `groupaware` (arXiv:2505.14638) whole groups by their
    largest diag(H), and by falling diag(H) within a group, as in gptqmodel 7.6; ties in natural
    order. See `factored`.

    Example: an error of the first column moves the second by h_12 / (h_22 + damping) = 0.9 / 1.05.
        >>> hessian_II = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
        >>> prepared = prepare(hessian_II, ColumnSpec(bits=3, group_size=2), "a weight")
        >>> round(float(prepared.factor_II[0, 1]), 4)
        -0.8571
    """
    order_I = order_of(hessian_II.diagonal(), spec)
    return factored(hessian_II, order_I, spec.damping, name, products, ranks)


def factored(
    hessian_II: Tensor,
    order_I: Tensor,
    damping: float,
    name: str,
    products: torch.dtype,
    ranks: Ranks,
) -> Preparation:
    """Return the factor of the damped inverse Hessian along an order.

    Dead columns, where H_ii = 0: the objective does not depend on their weights. The zero is
    replaced by the mean of the live diagonal. The authors' code and gptqmodel take 1 instead,
    before they damp and order; that depends on the unit of H, in which the two differ. Here neither
    damping nor order sees dead columns: they come last.

    A dead linear, where H = 0: no weight matters to the objective. All are rounded to nearest, and
    none is set to 0, as the authors' code does; results name such linears.

    The scale of H = X X^T is free.

    Args:
        hessian_II: float64, the same on all ranks.
        order_I: the columns as they are rounded.
        damping: added to the diagonal, relative to the mean of its live part.
        name: of the weight, for messages.
        products: dtype that the products of H were summed in.
        ranks: that share the work; every rank has to call it.

    Raises:
        UserError: H is not positive definite beyond what its precision can tell; nothing else is
            tried.
    """
    # Neither the order nor the damping may depend on dead columns: means are over live ones.
    diagonal_I = hessian_II.diagonal()
    dead_I = diagonal_I == 0
    if bool(dead_I.all()):
        # No column is set to 0 (~dead_I), and the identity carries no error from one to another.
        unmoved_II = torch.eye(len(dead_I), dtype=torch.float32, device=dead_I.device)
        return Preparation(order_I, ~dead_I, unmoved_II)
    live_mean = diagonal_I.sum() / (~dead_I).sum()
    # H is positive semidefinite: where H_ii = 0, its row is 0 too, so a dead column moves no other.
    added_I = (dead_I + damping) * live_mean
    factor_II = _factor(hessian_II, added_I, order_I, products, ranks)
    if factor_II is None:
        raise UserError(
            f"{name}: the calibration Hessian with damping {damping:g} is not positive"
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
    # Diagonals are cloned, so that the matrices that they belong to can be freed.
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
    # A lower triangle with both axes in reverse is an upper one along `order_I`.
    return factor_II.float().flip(0, 1) if bool(is_regular) else None


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
    rows = max(MIN_PART_ROWS, -(-len(lower_II) // PARTS))
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
            # Rows of X with X L = diag(L): they need the leading [end, end] part of L alone.
            inverse_II[start:end, :end] = torch.linalg.solve_triangular(
                lower_II[:end, :end], diagonal_RI, upper=False, left=False
            )
    # Broadcasts come after all solves: within the loop above they would make ranks take turns.
    for start, owner in zip(starts, owners, strict=True):
        ranks.broadcast(inverse_II[start : start + rows], owner)
    return inverse_II


def order_of(diagonal_I: Tensor, spec: ColumnSpec) -> Tensor:
    """Return the input features as they are rounded, int64 [I], from diag(H); see `prepare`.

    Example: `groupaware` rounds whole groups, here of two features.
        >>> diagonal_I = torch.tensor([1.0, 3.0, 4.0, 2.0])
        >>> order_of(diagonal_I, ColumnSpec(bits=3, group_size=2, order="actorder")).tolist()
        [2, 1, 3, 0]
        >>> order_of(diagonal_I, ColumnSpec(bits=3, group_size=2, order="groupaware")).tolist()
        [2, 3, 1, 0]
    """
    natural_I = torch.arange(len(diagonal_I), device=diagonal_I.device)
    match spec.order:
        case "natural":
            return natural_I
        case "actorder":
            return diagonal_I.argsort(descending=True, stable=True)
        case "groupaware":
            assert spec.group_size is not None
            diagonal_GK = diagonal_I.view(-1, spec.group_size)
            # Positions within a group become input features.
            within_GK = natural_I.view_as(diagonal_GK).gather(
                1, diagonal_GK.argsort(dim=1, descending=True, stable=True)
            )
            by_largest_G = diagonal_GK.amax(1).argsort(descending=True, stable=True)
            return within_GK[by_largest_G].flatten()
        case _:
            assert_never(spec.order)


def gptq(
    weight_OI: Tensor, preparation: Preparation, spec: ColumnSpec, largest: Tensor | None = None
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
        >>> spec = ColumnSpec(bits=3, group_size=2)
        >>> hessian_II = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
        >>> gptq(torch.tensor([[3.5, 1.4]]), prepare(hessian_II, spec, "a weight"), spec).dense()
        tensor([[3., 2.]])
    """
    return gptq_with_errors(weight_OI, preparation, spec, largest)[0]


@torch.no_grad()
def gptq_with_errors(
    weight_OI: Tensor, preparation: Preparation, spec: ColumnSpec, largest: Tensor | None = None
) -> tuple[Rounded, Tensor]:
    """Round as `gptq`; return also the errors, fp32 [I, O], along the order, of columns as moved.

    O is padded to whole ROW_MULTIPLEs.
    """
    num_outputs, num_inputs = weight_OI.shape
    group_size, order_I = spec.group_size or num_inputs, preparation.order_I
    # Transposed, so that the column that is rounded is contiguous.
    weight_IO = weight_OI.new_zeros(
        num_inputs, -(-num_outputs // ROW_MULTIPLE) * ROW_MULTIPLE, dtype=torch.float32
    )
    weight_IO[:, :num_outputs] = weight_OI.T

    # Grids [G, O] of all groups. They are final, or each is fitted again when it is reached.
    is_final = spec.group_size is None or spec.static_groups
    largest = largest_of(weight_OI) if largest is None else largest
    if spec.group_size is None:
        grid = _group_grids(weight_IO, group_size, spec, largest)
    # Between the two fits: the grid of a whole row still sees dead columns, those of groups do not.
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
            # The last group may reach into later blocks: their columns have had the same updates.
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
    # From the order of rounding back to that of the input features.
    groups_I = torch.empty_like(group_I, dtype=torch.int32).index_copy_(0, order_I, group_I.int())
    codes_OI = codes_IO[:, :num_outputs].T.contiguous()
    numbers, global_scale = grid.numbers, grid.global_scale
    return Rounded(codes_OI, scales_OG, zeros_OG, groups_I, numbers, global_scale), weight_IO


def _groups(order_I: Tensor, group_size: int, spec: ColumnSpec) -> Tensor:
    """Return the group of each column, int64 [I] along the order; see `gptq` on groups."""
    if not spec.groups_are_ranges:
        return torch.arange(len(order_I), device=order_I.device) // group_size
    return order_I // group_size


def _group_grids(weight_IO: Tensor, group_size: int, spec: GridSpec, largest: Tensor) -> Points:
    """Fit the grids [G, O] of successive groups of inputs."""
    return fit_points(weight_IO.unflatten(0, (-1, group_size)).transpose(0, 1), spec, largest)


def block_rounding(weight_CO: Tensor, grid: Points) -> Rounding:
    """Return `round_columns`, on a GPU as a CUDA graph, which is kept for other weights.

    Grids that are not uniform have no graph: their kernels are launched one by one.
    """
    if weight_CO.device.type == "cpu" or not isinstance(grid, Grid):
        return round_columns
    return _graph(len(weight_CO), weight_CO.shape[1], weight_CO.device)


def round_columns(
    weight_CO: Tensor, factor_CC: Tensor, grid: Points, group_C: Tensor, steps_CO: Tensor
) -> None:
    """Write the steps of a block of columns to `steps_CO`; its weights become rounding errors.

    `grid` [G, O] has the rows that `group_C` names. After column k (from 1), the last s columns
    reach the next s, s the largest power of two that divides k: so every column is reached by all
    before it when its turn comes, in products rather than one column at a time.

    Args:
        weight_CO: fp32, in the order of rounding; overwritten.
        factor_CC: fp32, unit upper triangular: the block of `gptq.Preparation.factor_II`.
        grid: of every group of a row.
        group_C: int64, the group of each column.
        steps_CO: fp32, where the steps are written.

    Example: the error 0.4 of the first column moves the second from 0.9 to 1.1.
        >>> grid = Grid(torch.ones(1, 1), torch.full((1, 1), -4.0), torch.full((1, 1), 3.0))
        >>> weight_CO, steps_CO = torch.tensor([[1.4], [0.9]]), torch.empty(2, 1)
        >>> factor_CC = torch.tensor([[1.0, -0.5], [0.0, 1.0]])
        >>> round_columns(weight_CO, factor_CC, grid, torch.tensor([0, 0]), steps_CO)
        >>> steps_CO.flatten().tolist(), [round(error, 4) for error in weight_CO.flatten().tolist()]
        ([1.0, 1.0], [0.4, 0.1])
    """
    groups = group_C.tolist()
    grids = {group: grid.of(group) for group in set(groups)}
    restored_O = torch.empty_like(weight_CO[0])
    columns = zip(weight_CO.unbind(), steps_CO.unbind(), groups, strict=True)
    for k, (weight_O, step_O, group) in enumerate(columns, start=1):
        # In place: from here on the column is its rounding error w - wq.
        grids[group].steps(weight_O, out=step_O)
        weight_O.sub_(torch.mul(step_O, grids[group].scale, out=restored_O))

        # The largest power of two that divides k; at the end of the block the slices are cut short.
        s = k & -k
        weight_CO[k : k + s].addmm_(
            factor_CC[k - s : k, k : k + s].T, weight_CO[k - s : k], alpha=-1
        )


class _Graph:
    """`round_columns` of one shape as a CUDA graph: hundreds of kernels in one launch."""

    def __init__(self, num_columns: int, num_rows: int, device: torch.device) -> None:
        shape = (num_columns, num_rows)
        # A graph replays on the addresses it was captured with. The ones keep the warm-up finite.
        self._weight_CO, self._steps_CO, *bounds = torch.ones(5, *shape, device=device)
        self._factor_CC = torch.ones(num_columns, num_columns, device=device)
        self._grid = Grid(*bounds)

        # The first products allocate cuBLAS's workspace, which a graph must not record.
        warm_up, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            self._round()
        current.wait_stream(warm_up)

        self._graph = torch.cuda.CUDAGraph()
        # Thread-local: other threads use the GPU meanwhile, to read the next block.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._round()

    def _round(self) -> None:
        group_C = torch.arange(len(self._weight_CO))  # here each column has a row of its own
        round_columns(self._weight_CO, self._factor_CC, self._grid, group_C, self._steps_CO)

    def __call__(
        self, weight_CO: Tensor, factor_CC: Tensor, grid: Grid, group_C: Tensor, steps_CO: Tensor
    ) -> None:
        """Copy a block in, replay the graph, and copy its errors and steps out."""
        self._weight_CO.copy_(weight_CO)
        self._factor_CC.copy_(factor_CC)
        self._grid.copy_(grid.of(group_C))
        self._graph.replay()
        weight_CO.copy_(self._weight_CO)
        steps_CO.copy_(self._steps_CO)


_graph = lru_cache(maxsize=8)(_Graph)  # the groups of linears of a block differ in their rows
