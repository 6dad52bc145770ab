"""The rounding of a training run, which finds these functions by their names.

`train.rounding` measures what they return, `train.perturbing` trains with it.

Shapes: O output features (rows), I input features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from base.errors import UserError
from base.hessian import product_dtype
from base.ranks import ALONE
from quant_eval.group import LinearGroup
from quant_eval.quantizers.rtn import RTN
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
    return [parse_spec(name).round(group).dense_OI for name in names]


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
    from quant_eval.rounding.grid import round_to_nearest

    rounded = round_to_nearest(weight_OI, weight_grid(name))
    return rounded.scales_OG[:, rounded.groups_I.long()]
