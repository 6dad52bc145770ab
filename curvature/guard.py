"""The start-up guard: a Hessian-vector product is compared with finite differences before anything is measured.

A wrong product is usually silent: it has the right shape and size, and every number made from it looks plausible.

Shapes: B sequences, S positions of a sequence, p parameters of this rank.
"""

import math
from typing import Any, NamedTuple

from torch import Tensor

from curvature.exact import Hessian
from train.command import UserError


class Limits(NamedTuple):
    """Relative differences above which nothing is measured: of the loss, of Hv as a vector, and of v'Hv."""

    loss: float
    product: float
    quadratic: float


# fp32: the losses of two forward codes agree to about 1e-7, differences of gradients give Hv to about 2e-4.
# bf16: products of matrices in bf16 move Hv by 1 to 3% in random directions, of which v'Hv sees less than 1%.
LIMITS = {"fp32": Limits(1e-5, 0.01, 0.01), "bf16": Limits(2e-3, 0.05, 0.01)}


def check_product(
    hessian: Hessian, reference: Hessian, tokens_BS1: Tensor, v_p: Tensor, dtype: str = "fp32"
) -> dict[str, Any]:
    """Relative differences from the reference on one batch and one probe, for products computed in `dtype`.

    The loss is compared as |L - L_ref| / |L_ref|, the product as |Hv - Hv_ref| / |Hv_ref| over all parameters, and
    v'Hv as |v'Hv - v'Hv_ref| / |v'Hv_ref| where bf16 computes. The tensor whose own part differs most is named, but not
    judged: where Hv nearly vanishes, rounding decides.

    Raises:
        UserError: one of them is above its limit, or not a number.
    """
    parameters, limits = hessian.parameters, LIMITS[dtype]
    measured, expected = hessian.product(tokens_BS1, v_p), reference.product(tokens_BS1, v_p)
    apart_p = measured.hv_p - expected.hv_p
    norm, along = parameters.norm(expected.hv_p), float(parameters.inner(v_p[None], expected.hv_p))
    found = Limits(
        _relative(measured.loss - expected.loss, expected.loss),
        _relative(parameters.norm(apart_p), norm),
        _relative(float(parameters.inner(v_p[None], apart_p)), along),
    )
    if not found.loss <= limits.loss:
        raise UserError(
            f"refusing to measure: the product's loss is {measured.loss:.8g}, the model's own {expected.loss:.8g} "
            f"(relative difference {found.loss:.2g}, limit {limits.loss:g}); the other --route may know this model"
        )
    if not found.product <= limits.product:
        raise UserError(
            f"refusing to measure: |Hv| is {parameters.norm(measured.hv_p):.6g}, by finite differences {norm:.6g} "
            f"(relative difference of the vectors {found.product:.2g}, limit {limits.product:g}); the other --route "
            f"may know this model"
        )
    if dtype != "fp32" and not found.quadratic <= limits.quadratic:
        raise UserError(
            f"refusing to measure: in {dtype} v'Hv is off by {found.quadratic:.2g} of itself (limit "
            f"{limits.quadratic:g}); give --dtype fp32"
        )
    squares, own = parameters.dots(apart_p, apart_p), parameters.dots(expected.hv_p, expected.hv_p)
    differences = {name: math.sqrt(squares[name] / own[name]) for name in own if own[name]}
    worst = max(differences, key=differences.__getitem__)
    return {
        "loss_relative_difference": found.loss,
        "product_relative_difference": found.product,
        "quadratic_relative_difference": found.quadratic,
        "limits": limits._asdict(),
        "worst_tensor": {"name": worst, "relative_difference": differences[worst]},
    }


def _relative(difference: float, expected: float) -> float:
    return abs(difference / expected) if expected else math.nan
