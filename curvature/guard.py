"""The start-up guard: a Hessian-vector product is compared with finite differences before anything is measured.

A wrong product is usually silent: it has the right shape and size, and every number made from it looks plausible.
Products are compared in pictures of them (curvature/sketch.py): of billions of parameters no further vector finds room.

Shapes: B sequences, S positions of a sequence, s entries of a picture.
"""

import math
from typing import Any, NamedTuple

from torch import Tensor

from curvature.exact import Hessian
from curvature.sketch import CountSketch
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
    hessian: Hessian, reference: Hessian, tokens_BS1: Tensor, sketch: CountSketch, dtype: str = "fp32"
) -> dict[str, Any]:
    """Relative differences from the reference on one batch and the sketch's probe, for products computed in `dtype`.

    The loss is compared as |L - L_ref| / |L_ref|, the product as |Hv - Hv_ref| / |Hv_ref| over all parameters, in
    pictures, and v'Hv as |v'Hv - v'Hv_ref| / |v'Hv_ref| where bf16 computes. The tensor whose own part differs most is
    named, but not judged: where Hv nearly vanishes, rounding decides.

    Raises:
        UserError: one of them is above its limit, or not a number.
    """
    limits = LIMITS[dtype]
    measured, expected = hessian.sketched(tokens_BS1, sketch), reference.sketched(tokens_BS1, sketch)
    apart_s = measured.picture_s - expected.picture_s
    norm, along = sketch.norm(expected.picture_s), math.fsum(sketch.dots(expected.picture_s).values())
    found = Limits(
        _relative(measured.loss - expected.loss, expected.loss),
        _relative(sketch.norm(apart_s), norm),
        _relative(math.fsum(sketch.dots(apart_s).values()), along),
    )
    if not found.loss <= limits.loss:
        raise UserError(
            f"refusing to measure: the product's loss is {measured.loss:.8g}, the model's own {expected.loss:.8g} "
            f"(relative difference {found.loss:.2g}, limit {limits.loss:g}); the other --route may know this model"
        )
    if not found.product <= limits.product:
        raise UserError(
            f"refusing to measure: |Hv| is {sketch.norm(measured.picture_s):.6g}, by finite differences {norm:.6g} "
            f"(relative difference of the vectors {found.product:.2g}, limit {limits.product:g}); the other --route "
            f"may know this model"
        )
    if dtype != "fp32" and not found.quadratic <= limits.quadratic:
        raise UserError(
            f"refusing to measure: in {dtype} v'Hv is off by {found.quadratic:.2g} of itself (limit "
            f"{limits.quadratic:g}); give --dtype fp32"
        )
    squares, own = sketch.squares(apart_s), sketch.squares(expected.picture_s)
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
