"""Hessian-vector products by differences of gradients of the model's own code: any kernel, any architecture.

Hv ~ (g(theta + eps v) - g(theta - eps v)) / (2 eps). A fixed eps fails: too small drowns in rounding, too large leaves
the quadratic neighbourhood, and the right one differs by orders of magnitude between a random vector and an
eigenvector. Here eps is set by what it does: |g+ - g-| / |g| = relative_change. In fp32 a change of 0.01 gives Hv to
about 2e-4.

A product with a probe holds one vector, theta itself: of the gradients it keeps pictures (curvature/sketch.py).

Shapes: B sequences, S positions of a sequence, p parameters of this rank, x entries of a gradient or of its picture.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.exact import HessianProduct, SketchedProduct, sketched_gradient, whole_gradient
from curvature.model import CurvedModel
from curvature.parameters import Probe
from curvature.sketch import CountSketch
from curvature.trace.hutchinson import Quadratic
from train.command import UserError

RELATIVE_CHANGE = 0.01
TRIAL_STEP = 1e-4  # times |theta| / |v|
ACCEPTED_FACTOR = 2.0  # the change may miss its aim by this factor
MAX_STEPS = 5


class _Way(NamedTuple):
    """A direction v, and what is kept of gradients.

    Attributes:
        direction: this rank's part of v in a tensor, by name.
        length: |v|.
        gradient: of an objective, or a linear map of it, [x].
        norm: |g| of what that gives.
    """

    direction: Callable[[str], Tensor]
    length: float
    gradient: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], float]


class _Difference(NamedTuple):
    loss: float
    gradient_x: Tensor
    product_x: Tensor  # Hv


class DifferenceHessian:
    """Products by differences of gradients.

    Args:
        model: its parameters move while a product is computed, and are put back to the bit.
        relative_change: |g+ - g-| / |g| that sets the step.
    """

    def __init__(self, model: CurvedModel, *, relative_change: float = RELATIVE_CHANGE) -> None:
        assert torch.finfo(model.parameters.dtype).bits >= 32, "a lower precision rounds the step away"
        self.parameters = model.parameters
        self._model = model
        self._relative_change = relative_change

    def product(self, tokens_BS1: Tensor, v_p: Tensor) -> HessianProduct:
        """Hv.

        Raises:
            UserError: no step changes the gradient by about the wanted amount.
        """
        parameters = self.parameters
        way = _Way(
            parameters.split(v_p).__getitem__,
            parameters.norm(v_p),
            lambda objective: whole_gradient(parameters, objective),
            parameters.norm,
        )
        found = self._difference(tokens_BS1, way)
        return HessianProduct(found.loss, float(parameters.inner([v_p], found.gradient_x)), found.product_x)

    def quadratic(self, tokens_BS1: Tensor, v_p: Tensor) -> Quadratic:
        """v_t'(Hv)_t of every tensor t."""
        loss, slope, hv_p = self.product(tokens_BS1, v_p)
        return Quadratic(loss, slope, self.parameters.dots(v_p, hv_p))

    def probed(self, tokens_BS1: Tensor, probe: Probe) -> Quadratic:
        """The same for a probe."""
        sketch = CountSketch(self.parameters, probe)
        loss, slope, picture_s = self.sketched(tokens_BS1, sketch)
        return Quadratic(loss, slope, sketch.dots(picture_s))

    def sketched(self, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        """Hv for the sketch's probe, in its picture."""
        parameters = self.parameters
        way = _Way(
            lambda name: parameters.signs(name, sketch.along),
            parameters.probe_norm(sketch.along),
            lambda objective: sketched_gradient(parameters, objective, sketch),
            sketch.norm,
        )
        found = self._difference(tokens_BS1, way)
        return SketchedProduct(found.loss, math.fsum(sketch.dots(found.gradient_x).values()), found.product_x)

    def _difference(self, tokens_BS1: Tensor, way: _Way) -> _Difference:
        theta_p = self.parameters.point()
        try:
            return self._from(theta_p, tokens_BS1, way)
        finally:
            self.parameters.move(theta_p)

    def _from(self, theta_p: Tensor, tokens_BS1: Tensor, way: _Way) -> _Difference:
        loss, gradient_x = self._gradient(tokens_BS1, way)
        norm = way.norm(gradient_x)
        step = TRIAL_STEP * self.parameters.norm(theta_p) / way.length
        change = math.nan
        for _ in range(MAX_STEPS):
            self.parameters.move(theta_p, way.direction, step)
            _, difference_x = self._gradient(tokens_BS1, way)
            self.parameters.move(theta_p, way.direction, -step)
            difference_x -= self._gradient(tokens_BS1, way)[1]
            change = way.norm(difference_x) / norm if norm else math.nan
            ratio = change / self._relative_change
            if 1 / ACCEPTED_FACTOR <= ratio <= ACCEPTED_FACTOR:
                return _Difference(loss, gradient_x, difference_x.div_(2 * step))
            if not 0 < ratio < math.inf:
                break
            step /= ratio
        raise UserError(
            f"no step changes the gradient, of norm {norm:.3g}, by {self._relative_change:g} of itself (last change "
            f"{change:.3g}); check that the checkpoint is finite"
        )

    def _gradient(self, tokens_BS1: Tensor, way: _Way) -> tuple[float, Tensor]:
        """Mean cross-entropy where the parameters are now, in nats per token, and what is kept of its gradient."""
        loss = self._model.loss(tokens_BS1)
        return loss.value, way.gradient(loss.share)
