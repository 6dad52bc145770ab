"""Hessian-vector products by differences of gradients of the model's own code: any kernel, any architecture.

Hv ~ (g(theta + eps v) - g(theta - eps v)) / (2 eps). A fixed eps fails: too small drowns in rounding, too large leaves
the quadratic neighbourhood, and the right one differs by orders of magnitude between a random vector and an
eigenvector. Here eps is set by what it does: |g+ - g-| / |g| = relative_change. In fp32 a change of 0.01 gives Hv to
about 2e-4.

Shapes: B sequences, S positions of a sequence, P parameters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from curvature.olmo2 import HessianProduct
from curvature.parameters import Parameters
from train.command import UserError

RELATIVE_CHANGE = 0.01
TRIAL_STEP = 1e-4  # times |theta| / |v|
ACCEPTED_FACTOR = 2.0  # the change may miss its aim by this factor
MAX_STEPS = 5


class FiniteDifference:
    """The Hessian of a causal language model's loss as an operator: (tokens, v) -> Hv, from differences of gradients.

    Args:
        model: any HF causal language model in eval mode.
        relative_change: |g+ - g-| / |g| that sets the step.
    """

    def __init__(self, model: PreTrainedModel, *, relative_change: float = RELATIVE_CHANGE) -> None:
        self.parameters = Parameters(model)
        self._model = model
        self._relative_change = relative_change

    def __call__(self, tokens_BS1: Tensor, v_P: Tensor) -> HessianProduct:
        """Hv and the loss over sequences of S inputs and S labels, int64 [B, S + 1].

        Raises:
            UserError: no step changes the gradient by about the wanted amount.
        """
        theta_P = self.parameters.join(self.parameters.weights.values()).detach()
        gradient_P, loss = self._gradient(tokens_BS1, theta_P)
        norm = float(gradient_P.norm())
        step = TRIAL_STEP * float(theta_P.norm()) / float(v_P.norm())
        for _ in range(MAX_STEPS):
            ahead_P, _ = self._gradient(tokens_BS1, theta_P + step * v_P)
            behind_P, _ = self._gradient(tokens_BS1, theta_P - step * v_P)
            difference_P = ahead_P - behind_P
            change = float(difference_P.norm()) / norm if norm else float("nan")
            ratio = change / self._relative_change
            if 1 / ACCEPTED_FACTOR <= ratio <= ACCEPTED_FACTOR:
                return HessianProduct(difference_P / (2 * step), loss)
            if not 0 < ratio < float("inf"):
                break
            step /= ratio
        raise UserError(
            f"no step changes the gradient, of norm {norm:.3g}, by {self._relative_change:g} of itself (last change "
            f"{change:.3g}); check that the checkpoint is finite"
        )

    def _gradient(self, tokens_BS1: Tensor, theta_P: Tensor) -> tuple[Tensor, float]:
        """Gradient of the mean cross-entropy at theta, and the loss in nats per token."""
        weights = {name: w.detach().requires_grad_() for name, w in self.parameters.split(theta_P).items()}
        with torch.enable_grad():
            arguments = {"input_ids": tokens_BS1[:, :-1], "use_cache": False}
            logits_BSV = functional_call(self._model, weights, (), arguments).logits
            loss = F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten())
            gradient = torch.autograd.grad(loss, list(weights.values()))
        return self.parameters.join(gradient), float(loss.detach())
