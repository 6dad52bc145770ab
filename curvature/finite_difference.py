"""Hessian-vector products by differences of gradients of the model's own code: any kernel, any architecture.

Hv ~ (g(theta + eps v) - g(theta - eps v)) / (2 eps). A fixed eps fails: too small drowns in rounding, too large leaves
the quadratic neighbourhood, and the right one differs by orders of magnitude between a random vector and an
eigenvector. Here eps is set by what it does: |g+ - g-| / |g| = relative_change. In fp32 a change of 0.01 gives Hv to
about 2e-4.

Shapes: B sequences, S positions of a sequence, p parameters of this rank.
"""

import math

import torch
from torch import Tensor

from curvature.exact import HessianProduct, whole_gradient
from curvature.model import CurvedModel
from curvature.parameters import Probe
from curvature.trace.hutchinson import Quadratic
from train.command import UserError

RELATIVE_CHANGE = 0.01
TRIAL_STEP = 1e-4  # times |theta| / |v|
ACCEPTED_FACTOR = 2.0  # the change may miss its aim by this factor
MAX_STEPS = 5


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
        theta_p = self.parameters.point()
        try:
            return self._product(tokens_BS1, theta_p, v_p)
        finally:
            self.parameters.move(theta_p)

    def quadratic(self, tokens_BS1: Tensor, v_p: Tensor) -> Quadratic:
        """v_t'(Hv)_t of every tensor t."""
        loss, slope, hv_p = self.product(tokens_BS1, v_p)
        return Quadratic(loss, slope, self.parameters.dots(v_p, hv_p))

    def probed(self, tokens_BS1: Tensor, probe: Probe) -> Quadratic:
        """The same for a probe."""
        return self.quadratic(tokens_BS1, self.parameters.probe(probe))

    def _product(self, tokens_BS1: Tensor, theta_p: Tensor, v_p: Tensor) -> HessianProduct:
        loss, gradient_p = self._gradient(tokens_BS1)
        slope = float(self.parameters.inner(v_p[None], gradient_p))
        norm = self.parameters.norm(gradient_p)
        step = TRIAL_STEP * self.parameters.norm(theta_p) / self.parameters.norm(v_p)
        change = math.nan
        for _ in range(MAX_STEPS):
            self.parameters.move(theta_p + step * v_p)
            _, difference_p = self._gradient(tokens_BS1)
            self.parameters.move(theta_p - step * v_p)
            difference_p -= self._gradient(tokens_BS1)[1]
            change = self.parameters.norm(difference_p) / norm if norm else math.nan
            ratio = change / self._relative_change
            if 1 / ACCEPTED_FACTOR <= ratio <= ACCEPTED_FACTOR:
                return HessianProduct(loss, slope, difference_p / (2 * step))
            if not 0 < ratio < math.inf:
                break
            step /= ratio
        raise UserError(
            f"no step changes the gradient, of norm {norm:.3g}, by {self._relative_change:g} of itself (last change "
            f"{change:.3g}); check that the checkpoint is finite"
        )

    def _gradient(self, tokens_BS1: Tensor) -> tuple[float, Tensor]:
        """Mean cross-entropy where the parameters are now, in nats per token, and its gradient."""
        loss = self._model.loss(tokens_BS1)
        return loss.value, whole_gradient(self.parameters, loss.share)
