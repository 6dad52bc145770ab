"""AdamW under megatron-core's distributed optimizer, with OLMo2's weight-decay groups."""

from collections.abc import Callable
from typing import Any

import megatron.core.optimizer as mcore_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.optim.adamw import adamw

from train.config import RunConfig
from train.megatron.model import PARAMETER_DTYPE


class GroupStepAdamW(torch.optim.AdamW):
    """torch's AdamW with the step count in the parameter group, as Apex and Transformer Engine keep it.

    megatron-core's resharding checkpoint stores the state of every parameter by shape and cannot hold torch's
    per-parameter `step`; with it in the group the same checkpoint loads at every layout.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group["step"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(group["step"])) for _ in parameters],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            group["step"] += 1

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the group's step repeated per parameter, where megatron-core looks for it."""
        packed = super().state_dict()
        step_of = {index: group["step"] for group in packed["param_groups"] for index in group["params"]}
        state = {
            index: {**state, "step": torch.tensor(float(step_of[index]))} for index, state in packed["state"].items()
        }
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the per-parameter steps it asks for are dropped, the group's step is kept."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["step"] = int(group["step"])
        for state in self.state.values():
            state.pop("step", None)


def build_optimizer(run: RunConfig, model: DistributedDataParallel) -> MegatronOptimizer:
    """The distributed optimizer: fp32 main parameters and moments, sharded over data-parallel ranks.

    Ai2 decays norms and lm_head but not the token embedding (allenai/OLMo, olmo/optim.py, decay_norm_and_bias true and
    decay_embeddings false): the reverse of megatron-core's default.
    """
    settings = run.optimizer
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.peak_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad_norm,
        bf16=run.precision == "bf16",
        params_dtype=PARAMETER_DTYPE[run.precision],
        use_distributed_optimizer=True,
    )
    no_decay = {ParamKey(name="*word_embeddings.weight"): {"wd_mult": 0.0}}
    if mcore_optimizer.USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor Apex is installed
        torch_adamw = torch.optim.AdamW
        torch.optim.AdamW = GroupStepAdamW  # type: ignore[misc, assignment]  # get_megatron_optimizer takes the class from there
        try:
            optimizer = get_megatron_optimizer(config, [model], config_overrides=no_decay)
        finally:
            torch.optim.AdamW = torch_adamw  # type: ignore[misc]
    else:
        optimizer = get_megatron_optimizer(config, [model], config_overrides=no_decay)
    for part in optimizer.chained_optimizers:  # zero moments, so that a checkpoint can hold them before the first step
        part.init_state_fn(part.optimizer, part.config)
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, learning_rate: float, weight_decay: float) -> None:
    """Sets the rate of the next update; megatron-core leaves this, and the decay multiplier, to a scheduler."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        group["weight_decay"] = weight_decay * group["wd_mult"]
