"""The rounding that the probe of a training run is handed, which finds it by its name.

`train.rounding` measures what it returns.

Shapes: O output features (rows), I input features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from base.hessian import product_dtype
from base.ranks import ALONE
from quant_eval.group import LinearGroup
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
