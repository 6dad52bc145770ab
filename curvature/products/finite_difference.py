"""Hessian-vector products by differences of gradients of transformers' code: the guard's reference.

Hv ~ (g(theta + eps v) - g(theta - eps v)) / (2 eps). A fixed eps fails: too small drowns in
rounding, too large leaves the quadratic neighbourhood. Here eps is set by what it does: |g+ - g-| /
|g| = 0.01, which in fp32 gives Hv to about 2e-4.

One vector is in memory, theta itself; of the gradients pictures (curvature/products/sketch.py).

Shapes: B sequences, S positions of a sequence, p parameters of this rank, s entries of a picture.
"""

import math

from torch import Tensor

from base.errors import UserError
from curvature.products.exact import SketchedProduct, sketched_gradient
from curvature.products.model import CurvedModel
from curvature.products.sketch import CountSketch

RELATIVE_CHANGE = 0.01
TRIAL_STEP = 1e-4  # times |theta| / |v|
ACCEPTED_FACTOR = 2.0  # the change may miss its aim by this factor
MAX_STEPS = 5


def difference_product(
    model: CurvedModel, tokens_BS1: Tensor, sketch: CountSketch
) -> SketchedProduct:
    """Return the picture of Hv for the sketch's probe.

    The parameters move meanwhile, and are put back to the bit.

    Args:
        model: at the checkpoint, which stays as it is.
        tokens_BS1: int64, inputs and labels.
        sketch: its probe is the v of Hv.

    Raises:
        UserError: no step changes the gradient by about RELATIVE_CHANGE.
    """
    parameters = model.parameters
    theta_p = parameters.point()

    def gradient_at(step: float) -> tuple[float, Tensor]:
        """Return the mean loss at theta + step v, and the picture of its gradient."""
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
            difference_s = gradient_at(step)[1]
            difference_s -= gradient_at(-step)[1]
            change = sketch.norm(difference_s) / norm if norm else math.nan
            ratio = change / RELATIVE_CHANGE
            if 1 / ACCEPTED_FACTOR <= ratio <= ACCEPTED_FACTOR:
                return SketchedProduct(loss, difference_s.div_(2 * step))
            if not 0 < ratio < math.inf:
                break
            step /= ratio  # the change is about proportional to the step
    finally:
        parameters.move(theta_p)
    raise UserError(
        f"no step changes the gradient, of norm {norm:.3g}, by {RELATIVE_CHANGE:g} of itself"
        f" (last change {change:.3g}); check that the checkpoint is finite"
    )
