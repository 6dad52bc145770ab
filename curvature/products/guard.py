"""The start-up guard: a Hessian-vector product against finite differences before any measurement.

A wrong product is usually silent: it has the right shape and size, and every number made from it
looks plausible. Products are compared in pictures of them (curvature/products/sketch.py): of
billions of parameters no further vector finds room.

Shapes: B sequences, S positions of a sequence, s entries of a picture.
"""

import math
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from base.errors import UserError
from curvature.products.interface import SketchedProduct
from curvature.products.sketch import CountSketch


class Sketched(Protocol):
    """A way to pictures of Hessian-vector products."""

    def sketched(self, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        """Return the picture of Hv for the sketch's probe."""
        ...


class Limits(NamedTuple):
    """Largest accepted relative differences of the loss, of Hv as a vector, and of v'Hv."""

    loss: float
    product: float
    quadratic: float


# fp32: the losses of two forward codes agree to about 1e-7, differences of gradients give Hv to
# about 2e-4. bf16: products of matrices in bf16 move Hv by 1 to 3% in random directions, of which
# v'Hv sees less than 1%.
LIMITS = {"fp32": Limits(1e-5, 0.01, 0.01), "bf16": Limits(2e-3, 0.05, 0.01)}


def check_product(
    hessian: Sketched,
    reference: Sketched,
    tokens_BS1: Tensor,
    sketch: CountSketch,
    dtype: str = "fp32",
) -> dict[str, Any]:
    """Return relative differences from the reference on one batch, for products in `dtype`.

    The loss is compared as |L - L_ref| / |L_ref|, the product as |Hv - Hv_ref| / |Hv_ref| over all
    parameters, in pictures, and v'Hv as |v'Hv - v'Hv_ref| / |v'Hv_ref| where bf16 computes. The
    tensor whose own part differs most is named, but not judged: where Hv nearly vanishes, rounding
    decides.

    Raises:
        UserError: one of them is above its limit, or not a number.
    """
    limits = LIMITS[dtype]
    product = hessian.sketched(tokens_BS1, sketch)
    expected = reference.sketched(tokens_BS1, sketch)
    apart_s = product.picture_s - expected.picture_s
    norm = sketch.norm(expected.picture_s)
    along = math.fsum(sketch.dots(expected.picture_s).values())
    differences = Limits(
        _relative(product.loss - expected.loss, expected.loss),
        _relative(sketch.norm(apart_s), norm),
        _relative(math.fsum(sketch.dots(apart_s).values()), along),
    )
    if not differences.loss <= limits.loss:
        raise UserError(
            f"refusing to measure: the product's loss is {product.loss:.8g}, the model's own"
            f" {expected.loss:.8g} (relative difference {differences.loss:.2g}, limit"
            f" {limits.loss:g}); check the checkpoint, or report its architecture"
        )
    if not differences.product <= limits.product:
        raise UserError(
            f"refusing to measure: |Hv| is {sketch.norm(product.picture_s):.6g}, by finite"
            f" differences {norm:.6g} (relative difference of the vectors"
            f" {differences.product:.2g}, limit {limits.product:g}); check the checkpoint, or"
            " report its architecture"
        )
    if dtype != "fp32" and not differences.quadratic <= limits.quadratic:
        raise UserError(
            f"refusing to measure: in {dtype} v'Hv is off by {differences.quadratic:.2g} of itself"
            f" (limit {limits.quadratic:g}); give --dtype fp32"
        )
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
