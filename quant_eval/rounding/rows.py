"""Rounding the stacked weights of linears that read one input, its rows shared out over ranks.

`measuring.groups` calls `round_weight`; rows do not interact, so each rank rounds its share.

Shapes: O output features (rows), I input features.
"""

import torch
from torch import Tensor

from base.errors import UserError
from base.ranks import Ranks
from base.rounding.gptq import Preparation, gptq, prepare
from base.rounding.grid import Rounded, largest_of, round_to_nearest
from quant_eval.rounding.mixed import Mixed, round_mixed
from quant_eval.specs import QuantSpec


def round_weight(
    weight_OI: Tensor,
    hessian_II: Tensor | None,
    products: torch.dtype,
    spec: QuantSpec,
    name: str,
    ranks: Ranks,
) -> Rounded | Mixed:
    """Return all rows rounded by rtn, gptq, atom or quik.

    Every rank has to call it.

    Args:
        weight_OI: of any float dtype.
        hessian_II: float64, of the inputs in the basis of the weights; None for rtn.
        products: dtype its products were summed in.
        spec: the method and its grids.
        name: of a linear, for messages.
        ranks: that share the rows.

    Raises:
        UserError: the Hessian or a weight does not fit the spec.

    Example: 3 bits have 7 steps, here from -3.5 to 3.5; the points are -4 to 3.
        >>> from base.ranks import ALONE
        >>> from quant_eval.specs import parse_spec
        >>> spec = parse_spec("rtn-b3-g2")
        >>> weight_OI = torch.tensor([[1.2, -3.5]])
        >>> round_weight(weight_OI, None, torch.float32, spec, "a linear", ALONE).dense()
        tensor([[ 1., -4.]])
    """
    prepared = None
    if spec.damping is not None:
        assert hessian_II is not None
        # a Hessian that is refused is refused on every rank
        prepared = prepare(hessian_II, spec, name, products, ranks)
    share = ranks.share(len(weight_OI))
    try:
        own = _round(weight_OI[share.start : share.stop], prepared, spec, largest_of(weight_OI))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return own.gathered(ranks, len(weight_OI))


def _round(
    own_OI: Tensor, prepared: Preparation | None, spec: QuantSpec, largest: Tensor
) -> Rounded | Mixed:
    if prepared is None:
        return round_to_nearest(own_OI, spec, largest)
    if spec.kept is not None:
        return round_mixed(own_OI, prepared, spec)
    return gptq(own_OI, prepared, spec, largest)
