"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675).

Every weight moves by the learning rate, in the direction of a sign. The paper takes a tenth to a
third of AdamW's learning rate, and three to ten times its weight decay.
"""

from typing import TYPE_CHECKING, ClassVar, Literal, override

from pydantic import Field

from train.optimizers.settings import GroupStep, OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor


class Lion(OptimizerConfig):
    """Lion (arXiv 2302.06675) for all parameters: the sign of a momentum, one state."""

    STATES: ClassVar = ("exp_avg",)

    matrices: Literal["lion"] = "lion"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)

    @property
    def title(self) -> str:
        """Return name and constants in words."""
        return f"Lion, betas {self.beta1:g} and {self.beta2:g}"

    @override
    def update(
        self,
        weights: "list[Tensor]",
        gradients: "list[Tensor]",
        states: "dict[str, list[Tensor]]",
        step: GroupStep,
    ) -> None:
        """Move weights by the sign of momentum and gradient, then the momentum to the gradient."""
        for weight, gradient, momentum in zip(weights, gradients, states["exp_avg"], strict=True):
            # A lerp by 1 - b is b m + (1 - b) g.
            direction = momentum.lerp(gradient, 1 - self.beta1).sign_()
            weight.mul_(1 - step.rate * step.decay).add_(direction, alpha=-step.rate)
            momentum.lerp_(gradient, 1 - self.beta2)
