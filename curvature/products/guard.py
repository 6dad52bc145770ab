"""The start-up guard: a Hessian-vector product against finite differences before any measurement.

A wrong product is usually silent: it has the right shape and size, and every number made from it
looks plausible. Products are compared in pictures of them (curvature/products/sketch.py): of
billions of parameters no further vector finds room.

Shapes: s entries of a picture.
"""

import math
from typing import Any, NamedTuple

from base.errors import UserError
from curvature.products.exact import SketchedProduct
from curvature.products.sketch import CountSketch


class Limits(NamedTuple):
    """Largest accepted relative differences of the loss, of Hv as a vector, and of v'Hv."""

    loss: float
    product: float
    quadratic: float


# fp32: the losses of two forward codes agree to about 1e-7, differences of gradients give Hv to
# about 2e-4. bf16: products of matrices in bf16 move Hv by 1 to 3% in random directions, of which
# v'Hv sees less than 1%.
LIMITS = {"fp32": Limits(1e-5, 0.01, 0.01), "bf16": Limits(2e-3, 0.05, 0.01)}
NAMES = {"loss": "the product's loss", "product": "Hv", "quadratic": "v'Hv"}


def check_product(
    product: SketchedProduct, expected: SketchedProduct, sketch: CountSketch, dtype: str = "fp32"
) -> dict[str, Any]:
    """Return the relative differences of a product in `dtype` from the expected one.

    v'Hv is judged where bf16 computes. The tensor whose own part differs most is named, but not
    judged: where Hv nearly vanishes, rounding decides.

    Raises:
        UserError: one of them is above its limit, or not a number.
    """
    limits = LIMITS[dtype]
    apart_s = product.picture_s - expected.picture_s
    norm = sketch.norm(expected.picture_s)
    along = math.fsum(sketch.dots(expected.picture_s).values())
    differences = Limits(
        _relative(product.loss - expected.loss, expected.loss),
        _relative(sketch.norm(apart_s), norm),
        _relative(math.fsum(sketch.dots(apart_s).values()), along),
    )

    judged = ["loss", "product"] if dtype == "fp32" else list(Limits._fields)
    for name in judged:
        difference, limit = getattr(differences, name), getattr(limits, name)
        if not difference <= limit:
            instead = "check the checkpoint" if dtype == "fp32" else "give --dtype fp32"
            raise UserError(
                f"refusing to measure: {NAMES[name]} in {dtype} is off by {difference:.2g} of"
                f" itself (limit {limit:g}); {instead}, or report the architecture"
            )

    # the tensor that differs most, for the report
    squares, own = sketch.squares(apart_s), sketch.squares(expected.picture_s)
    by_tensor = {name: math.sqrt(squares[name] / own[name]) for name in own if own[name]}
    worst = max(by_tensor, key=by_tensor.__getitem__)
    return {
        "loss_relative_difference": differences.loss,
        "product_relative_difference": differences.product,
        "quadratic_relative_difference": differences.quadratic,
        "limits": limits._asdict(),
        "worst_tensor": {"name": worst, "relative_difference": by_tensor[worst]},
    }


def _relative(difference: float, expected: float) -> float:
    return abs(difference / expected) if expected else math.nan
