"""Rounding of one block of columns, each after the errors of those before it.

`gptq.gptq` calls `block_rounding` for each block of a weight. Within the block, GPTQ's lazy updates
(arXiv:2210.17323, step 2) are nested. After column k, the errors (E) of the last s = k & -k columns
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

Shapes: C columns of a block, O output features (rows), G groups of a row.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from base.rounding.grid import Grid, Points

Rounding = Callable[[Tensor, Tensor, Any, Tensor, Tensor], None]  # of a grid of one kind


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

        s = k & -k
        weight_CO[k : k + s].addmm_(
            factor_CC[k - s : k, k : k + s].T, weight_CO[k - s : k], alpha=-1
        )


class _Graph:
    """`round_columns` of one shape as a CUDA graph: hundreds of kernels in one launch."""

    def __init__(self, num_columns: int, num_rows: int, device: torch.device) -> None:
        shape = (num_columns, num_rows)
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
