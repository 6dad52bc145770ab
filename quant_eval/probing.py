"""The rounding of a training run, which finds these functions by their names.

`train.rounding` measures what they return, `train.perturbing` trains with it.

Shapes: O output features (rows), I input features, G groups of a row, K weights of each.
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


def weight_grid(name: str) -> RTN:
    """Return the spec of a grid that weights are rounded to by nearest while training.

    Raises:
        UserError: the spec is not one, or asks for more than rounding weights.
    """
    spec = parse_spec(name)
    if not isinstance(spec, RTN):
        raise UserError(f"spec {name} does not round to nearest; give rtn, such as rtn-b3-g128")
    if spec.casts or spec.is_transformed:
        raise UserError(
            f"spec {name} does more than round weights; leave casts and transforms out, with -a16"
            " for formats that cast activations by default"
        )
    return spec


@torch.no_grad()
def step_sizes(name: str, weight_OI: Tensor) -> Tensor:
    """Return the distance of neighbouring points of an integer grid, at each weight, fp32 [O, I].

    Args:
        name: of a spec such as rtn-b3-g128.
        weight_OI: of any float dtype.
    """
    weight_KOG, grid = grouped_with_points(weight_OI, weight_grid(name))
    scale_OGK = grid.scale[:, :, None].expand(-1, -1, len(weight_KOG))
    return scale_OGK.reshape(weight_OI.shape)
