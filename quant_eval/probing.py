"""The rounding of a training run, which finds these functions by their names.

`train.rounding` measures what they return, `train.weight_changes` trains with it.

Shapes: O output features (rows), I input features, G groups of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from base.errors import UserError
from base.hessian import product_dtype
from base.ranks import ALONE
from quant_eval.group import LinearGroup
from quant_eval.quantizer import QuantSpec
from quant_eval.quantizers.rtn import RTN
from quant_eval.rounding.grid import grouped_with_points, nearest_points
from quant_eval.specs import parse_spec


@torch.no_grad()
def round_by_names(
    names: Sequence[str], weight_OI: Tensor, hessian_II: Tensor | None, linear: str
) -> list[Tensor]:
    """Return a weight rounded by each spec, fp32 [O, I].

    Specs that read the Hessian alike share its factor.

    Args:
        names: of specs that round weights alone, such as rtn-b3-g128.
        weight_OI: of any float dtype.
        hessian_II: float64, the mean of x x^T of its inputs; None for specs that need none.
        linear: its name, for messages.
    """
    products = product_dtype(weight_OI.dtype)
    ranks = ALONE._replace(device=weight_OI.device)
    group = LinearGroup(linear, [len(weight_OI)], weight_OI, hessian_II, products, ranks)
    return [_rounded(parse_spec(name), group) for name in names]


def _rounded(spec: QuantSpec, group: LinearGroup) -> Tensor:
    """Return the weights of a group rounded, by RTN without the codes that nobody reads here."""
    if not isinstance(spec, RTN):
        return spec.round(group).dense_OI
    try:
        return nearest_points(group.weight_OI, spec)
    except UserError as error:
        raise UserError(f"{group.name}: {error}") from None


@torch.no_grad()
def round_to_grid(grid: RTN, weight_OI: Tensor, largest: Tensor | None) -> Tensor:
    """Return whole rows of a weight rounded to a grid, fp32 [O, I].

    Args:
        grid: as `quant_eval.specs.weight_grid` returns it.
        weight_OI: of any float dtype.
        largest: fp32 [1], max|w| of all linears that read the same input; for grids that scale
            tensors.

    Raises:
        UserError: a weight is not finite, or a scale is beyond the grid's format.
    """
    return nearest_points(weight_OI, grid, largest)


@torch.no_grad()
def step_sizes(grid: RTN, weight_OI: Tensor) -> Tensor:
    """Return the distance of neighbouring points of integer grids, fp32 [O, G].

    Args:
        grid: of integers.
        weight_OI: whole rows, of any float dtype.

    Raises:
        UserError: a weight is not finite, or a scale is beyond the grid's format.
    """
    _, points = grouped_with_points(weight_OI, grid)
    return points.scale
