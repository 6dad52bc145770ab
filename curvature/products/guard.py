"""The start-up guard: a Hessian-vector product against finite differences before any measurement.

A wrong product is usually silent: it has the right shape and size, and every number made from it
looks plausible. The reference is a difference of gradients of transformers' code, Hv ~ (g(theta +
eps v) - g(theta - eps v)) / (2 eps). A fixed eps fails: too small drowns in rounding, too large
leaves the quadratic neighbourhood. Here eps is set by what it does: |g+ - g-| / |g| = 0.01, which
in fp32 gives Hv to about 2e-4.

Products are compared in pictures of them (curvature/products/sketch.py): of billions of parameters
one vector finds room, theta itself.

Shapes: B sequences, S positions of a sequence, p parameters of this rank, s entries of a picture.
"""

import math
from typing import Any, NamedTuple

from torch import Tensor

from base.errors import UserError
from curvature.products.exact import SketchedProduct, sketched_gradient
from curvature.products.model import CurvedModel
from curvature.products.sketch import CountSketch

RELATIVE_CHANGE = 0.01
TRIAL_STEP = 1e-4  # times |theta| / |v|
ACCEPTED_FACTOR = 2.0  # the change may miss its aim by this factor
MAX_STEPS = 5


class GuardLimits(NamedTuple):
    """Largest accepted relative differences of the loss, of Hv as a vector, and of v'Hv."""

    loss: float
    product: float
    quadratic: float


# fp32: the losses of two forward codes agree to about 1e-7, differences of gradients give Hv to
# about 2e-4. bf16: products of matrices in bf16 move Hv by 1 to 3% in random directions, of which
# v'Hv sees less than 1%.
LIMITS = {"fp32": GuardLimits(1e-5, 0.01, 0.01), "bf16": GuardLimits(2e-3, 0.05, 0.01)}
NAMES = {"loss": "the product's loss", "product": "Hv", "quadratic": "v'Hv"}


def difference_product(
    model: CurvedModel, tokens_BS1: Tensor, sketch: CountSketch
) -> SketchedProduct:
    """Return the picture of Hv for the sketch's probe.

    The parameters move meanwhile, and are put back to the bit.

    Raises:
        UserError: no step changes the gradient by about RELATIVE_CHANGE.
    """
    parameters = model.parameters
    theta_p = parameters.point()

    def gradient_at(step: float) -> tuple[float, Tensor]:
        """Return the mean loss at theta + step v, and the picture of its gradient."""
        # The first call asks for step 0, before the parameters have moved.
        if step:
            parameters.move(theta_p, lambda name: parameters.signs(name, sketch.along), step)
        loss = model.loss(tokens_BS1)
        return loss.value, sketched_gradient(parameters, loss.share, sketch)

    # steps until one changes the gradient by about RELATIVE_CHANGE of itself
    loss, gradient_s = gradient_at(0.0)
    norm, change = sketch.norm(gradient_s), math.nan
    step = TRIAL_STEP * parameters.norm(theta_p) / math.sqrt(parameters.size)  # |v| of signs
    try:
        for _ in range(MAX_STEPS):
            # A central difference: terms of even order in the step cancel.
            difference_s = gradient_at(step)[1]
            difference_s -= gradient_at(-step)[1]
            change = sketch.norm(difference_s) / norm if norm else math.nan
            ratio = change / RELATIVE_CHANGE
            if 1 / ACCEPTED_FACTOR <= ratio <= ACCEPTED_FACTOR:
                return SketchedProduct(loss, difference_s.div_(2 * step))
            # 0, infinite or not a number: there is nothing to scale the step by.
            if not 0 < ratio < math.inf:
                break
            step /= ratio  # the change is about proportional to the step
    finally:
        parameters.move(theta_p)
    raise UserError(
        f"no step changes the gradient, of norm {norm:.3g}, by {RELATIVE_CHANGE:g} of itself"
        f" (last change {change:.3g}); check that the checkpoint is finite"
    )


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
    differences = GuardLimits(
        _relative(product.loss - expected.loss, expected.loss),
        _relative(sketch.norm(apart_s), norm),
        _relative(math.fsum(sketch.dots(apart_s).values()), along),
    )

    judged = ["loss", "product"] if dtype == "fp32" else list(GuardLimits._fields)
    for name in judged:
        difference, limit = getattr(differences, name), getattr(limits, name)
        # Written so that a NaN is refused too.
        if not difference <= limit:
            instead = "check the checkpoint" if dtype == "fp32" else "give --dtype fp32"
            raise UserError(
                f"refusing to measure: {NAMES[name]} in {dtype} is off by {difference:.2g} of"
                f" itself (limit {limit:g}); {instead}, or report the architecture"
            )

    # the tensor that differs most, for the report
    squares, expected_squares = sketch.squares(apart_s), sketch.squares(expected.picture_s)
    by_tensor = {
        name: math.sqrt(squares[name] / expected_squares[name])
        for name in expected_squares
        if expected_squares[name]
    }
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
