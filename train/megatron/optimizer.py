"""AdamW under megatron-core's distributed optimizer, with the run's weight-decay groups."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer as mcore_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch import Tensor

from base.errors import UserError
from train.megatron.model import PARAMETER_DTYPE, global_parameters
from train.model import megatron_names
from train.model.families import hidden_matrices
from train.run.config import RunConfig
from train.run.optimization import OptimizerConfig as Settings


class GroupStepAdamW(torch.optim.AdamW):
    """torch's fused AdamW with one step count, in its groups and in one tensor on the device.

    A checkpoint that loads at every layout holds what has the shape of a parameter, and one count
    for all of them. A count for each parameter would also be copied to the GPU at every step.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._step = torch.zeros((), device=torch.cuda.current_device())
        for group in self.param_groups:
            group["step"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            group["step"] += 1
            self._step.fill_(group["step"])
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [self._step] * len(parameters),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def _undecayed(run: RunConfig, model: DistributedDataParallel) -> set[torch.nn.Parameter]:
    """Return the parameters that weight decay spares; UserError for a part of a fused matrix.

    All ranks decide on all names, so that they refuse together.
    """
    spared = set()
    for name in megatron_names.megatron_names(run.model.num_hidden_layers):
        hf_names = megatron_names.hf_names(name)
        decayed = {run.optimizer.decays(hf_name) for hf_name in hf_names}
        if len(decayed) > 1:
            raise UserError(
                f"optimizer.undecayed {list(run.optimizer.undecayed)} spares some of"
                f" {', '.join(hf_names)}, one matrix here; spare all of them or none"
            )
        if decayed == {False}:
            spared.add(name)
    named = global_parameters(model.module)
    return {named[name] for name in spared & named.keys()}


def _hidden(run: RunConfig, model: DistributedDataParallel) -> set[torch.nn.Parameter]:
    """Return the hidden matrices of this stage."""
    hidden = hidden_matrices(run.model)
    return {
        parameter
        for name, parameter in global_parameters(model.module).items()
        if hidden.issuperset(megatron_names.hf_names(name))
    }


@contextmanager
def _adamw_for_mcore() -> Iterator[None]:
    """Have mcore build GroupStepAdamW within the block.

    Where Transformer Engine or Apex is installed it would take theirs, whatever the run's kernels:
    the same run would be another on another machine.
    """
    module: Any = mcore_optimizer
    before = module.USING_PYTORCH_OPTIMIZER, torch.optim.AdamW
    module.USING_PYTORCH_OPTIMIZER = True
    torch.optim.AdamW = GroupStepAdamW  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        module.USING_PYTORCH_OPTIMIZER, torch.optim.AdamW = before  # type: ignore[misc]


def build_optimizer(run: RunConfig, model: DistributedDataParallel) -> MegatronOptimizer:
    """Return the distributed optimizer: fp32 weights and moments, sharded over data ranks.

    Which parameters are decayed is the run's to say (`optimizer.undecayed`); megatron-core would
    spare norms.
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
        bf16=run.precision != "fp32",
        params_dtype=PARAMETER_DTYPE[run.precision],
        use_distributed_optimizer=True,
        overlap_param_gather=model.ddp_config.overlap_param_gather,
    )
    groups = {
        _any_of("undecayed", _undecayed(run, model)): {"wd_mult": 0.0},
        _any_of("hidden", _hidden(run, model)): {"hidden": True},
    }
    with _adamw_for_mcore():
        optimizer = get_megatron_optimizer(config, [model], config_overrides=groups)
    for part in optimizer.chained_optimizers:
        # Zero moments, so that a checkpoint can hold them before the first step.
        part.init_state_fn(part.optimizer, part.config)
    return optimizer


def _any_of(name: str, parameters: set[torch.nn.Parameter]) -> ParamKey:
    """Return mcore's key of a set of parameters."""
    return ParamKey(
        with_name_predicate=ParamWithNamePredicate(
            name, lambda parameter, _: parameter in parameters
        )
    )


@torch.no_grad()
def squared_gradient_norm(optimizer: MegatronOptimizer) -> Tensor:
    """Return this rank's part of the squared L2 norm of the whole gradient: [1] fp64.

    The sum over all ranks counts every weight once. Hands the reduced gradients to the optimizer.
    """
    overflowed = optimizer.prepare_grads()
    assert not overflowed  # only a loss scaler looks for it, and there is none
    (part,) = optimizer.chained_optimizers
    gradients = part.get_grads_for_grad_norm()
    if not gradients:
        return torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    norms = torch.stack(torch._foreach_norm(gradients))
    return norms.double().square().sum(0, keepdim=True)


def clip_and_update(
    optimizer: MegatronOptimizer, grad_norm: float, rate: float, settings: Settings
) -> None:
    """Clip by the norm of the whole gradient, and update weights and moments.

    megatron-core leaves the rate, and the multiplier of the decay, to a scheduler.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
        decay = settings.decay_at(rate, hidden=group.get("hidden", False))
        group["weight_decay"] = decay * group["wd_mult"]
    factor = settings.clip_grad_norm / (grad_norm + 1e-6)
    if factor < 1:
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        torch._foreach_mul_(gradients, factor)
    optimizer.step_with_ready_grads()
