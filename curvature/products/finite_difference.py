"""Hessian-vector products by differences of gradients of transformers' code: the guard's reference.

Hv ~ (g(theta + eps v) - g(theta - eps v)) / (2 eps). A fixed eps fails: too small drowns in
rounding, too large leaves the quadratic neighbourhood. Here eps is set by what it does: |g+ - g-| /
|g| = 0.01, which in fp32 gives Hv to about 2e-4.

One vector is held, theta itself; of the gradients pictures (curvature/products/sketch.py).

Shapes: B sequences, S positions of a sequence, p parameters of this rank, s entries of a picture.
"""

import math

from torch import Tensor

from base.errors import UserError
from curvature.products.exact import sketched_gradient
from curvature.products.interface import SketchedProduct
from curvature.products.model import CurvedModel
from curvature.products.sketch import CountSketch

RELATIVE_CHANGE = 0.01
TRIAL_STEP = 1e-4  # times |theta| / |v|
ACCEPTED_FACTOR = 2.0  # the change may miss its aim by this factor
MAX_STEPS = 5


class DifferenceHessian:
    """Products of a model whose parameters move meanwhile, and are put back to the bit."""

    def __init__(self, model: CurvedModel) -> None:
        self.parameters = model.parameters
        self._model = model

    def sketched(self, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        """Return the picture of Hv for the sketch's probe.

        Raises:
            UserError: no step changes the gradient by about the wanted amount.
        """
        theta_p = self.parameters.point()
        try:
            return self._around(theta_p, tokens_BS1, sketch)
        finally:
            self.parameters.move(theta_p)

    def _around(self, theta_p: Tensor, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        loss, gradient_s = self._gradient(tokens_BS1, sketch)
        norm = sketch.norm(gradient_s)
        length = self.parameters.probe_norm(sketch.along)
        step = TRIAL_STEP * self.parameters.norm(theta_p) / length
        change = math.nan
        for _ in range(MAX_STEPS):
            self._move(theta_p, sketch, step)
            difference_s = self._gradient(tokens_BS1, sketch)[1]
            self._move(theta_p, sketch, -step)
            difference_s -= self._gradient(tokens_BS1, sketch)[1]
            change = sketch.norm(difference_s) / norm if norm else math.nan
            ratio = change / RELATIVE_CHANGE
            if 1 / ACCEPTED_FACTOR <= ratio <= ACCEPTED_FACTOR:
                slope = math.fsum(sketch.dots(gradient_s).values())
                return SketchedProduct(loss, slope, difference_s.div_(2 * step))
            if not 0 < ratio < math.inf:
                break
            step /= ratio  # the change is about proportional to the step
        raise UserError(
            f"no step changes the gradient, of norm {norm:.3g}, by {RELATIVE_CHANGE:g} of itself"
            f" (last change {change:.3g}); check that the checkpoint is finite"
        )

    def _move(self, theta_p: Tensor, sketch: CountSketch, step: float) -> None:
        self.parameters.move(theta_p, lambda name: self.parameters.signs(name, sketch.along), step)

    def _gradient(self, tokens_BS1: Tensor, sketch: CountSketch) -> tuple[float, Tensor]:
        """Return the mean loss where the parameters are now, and the picture of its gradient."""
        loss = self._model.loss(tokens_BS1)
        return loss.value, sketched_gradient(self.parameters, loss.share, sketch)
