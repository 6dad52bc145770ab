"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), by torch's fused kernel."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from train.optimizers.settings import GroupStep, OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor


class AdamMoments(OptimizerConfig):
    """AdamW's two moments and update, of AdamW and of optimizers that leave it a part."""

    STATES: ClassVar = ("exp_avg", "exp_avg_sq")

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)

    def update(
        self,
        weights: "list[Tensor]",
        gradients: "list[Tensor]",
        states: "dict[str, list[Tensor]]",
        step: GroupStep,
    ) -> None:
        """Update all weights by one kernel. DeepSpeed's own AdamW is compiled when first used."""
        import torch

        # One count for all parameters, made on their device: a copy to a GPU would wait for it.
        count = torch.full((), step.number, dtype=torch.float32, device=weights[0].device)
        torch._fused_adamw_(
            weights,
            gradients,
            states["exp_avg"],
            states["exp_avg_sq"],
            # Maxima of the second moment, which AMSGrad alone keeps.
            [],
            [count] * len(weights),
            lr=step.rate,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=step.decay,
            eps=self.eps * step.epsilon,
            amsgrad=False,
            maximize=False,
        )

    @property
    def betas(self) -> str:
        """Return the decay rates of the moments in words."""
        return f"betas {self.beta1:g} and {self.beta2:g}"


class AdamW(AdamMoments):
    """AdamW (arXiv 1711.05101) for all parameters."""

    matrices: Literal["adamw"] = "adamw"

    @property
    def title(self) -> str:
        """Return name and constants in words."""
        return f"AdamW, {self.betas}"
