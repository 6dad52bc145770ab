"""AdamW under megatron-core's distributed optimizer, with the run's weight-decay groups."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
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

    def start_moments(self) -> None:
        """Set all moments to zero, so that a checkpoint can hold them before the first step."""
        for group in self.param_groups:
            for weights in group["params"]:
                self.state[weights] = {
                    "exp_avg": torch.zeros_like(weights),
                    "exp_avg_sq": torch.zeros_like(weights),
                }

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


def _undecayed(run: RunConfig) -> set[str]:
    """Return the names of parameters that weight decay spares; UserError for a part of a matrix."""
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
    return spared


def _groups(run: RunConfig, model: DistributedDataParallel) -> list[dict[str, Any]]:
    """Return this stage's parameters by what decays them.

    Which are decayed is the run's to say (`optimizer.undecayed`); megatron-core would spare norms.
    """
    undecayed, hidden = _undecayed(run), hidden_matrices(run.model)
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {
        kind: [] for kind in itertools.product((False, True), (True, False))
    }
    for name, parameter in global_parameters(model.module).items():
        of_hidden = hidden.issuperset(megatron_names.hf_names(name))
        groups[of_hidden, name not in undecayed].append(parameter)
    return [
        {"params": parameters, "hidden": of_hidden, "decayed": decayed}
        for (of_hidden, decayed), parameters in groups.items()
        if parameters
    ]


def build_optimizer(run: RunConfig, model: DistributedDataParallel) -> DistributedOptimizer:
    """Return the distributed optimizer: fp32 weights and moments, sharded over data ranks.

    Its parts are put together here: where Transformer Engine or Apex is installed, mcore's own
    function would take their AdamW, whatever the run's kernels, and the same run would be another
    on another machine.
    """
    config = OptimizerConfig(
        bf16=run.precision != "fp32",
        params_dtype=PARAMETER_DTYPE[run.precision],
        use_distributed_optimizer=True,
        overlap_param_gather=model.ddp_config.overlap_param_gather,
    )
    betas = run.optimizer.beta1, run.optimizer.beta2
    adamw = GroupStepAdamW(_groups(run, model), betas=betas, eps=run.optimizer.eps)
    optimizer = DistributedOptimizer(
        adamw,
        config,
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[model],
        per_model_buffers={0: model.buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=parallel_state.get_data_parallel_group_gloo(
            with_context_parallel=True
        ),
        data_parallel_group_idx=0,  # names parts of mcore's own checkpoints
        distributed_optimizer_instance_id=0,
    )
    adamw.start_moments()
    return optimizer


@torch.no_grad()
def squared_gradient_norm(optimizer: DistributedOptimizer) -> Tensor:
    """Return this rank's part of the squared L2 norm of the whole gradient: [1] fp64.

    The sum over all ranks counts every weight once. Hands the reduced gradients to the optimizer.
    """
    overflowed = optimizer.prepare_grads()
    assert not overflowed  # only a loss scaler looks for it, and there is none
    gradients = optimizer.get_grads_for_grad_norm()
    if not gradients:
        return torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    norms = torch.stack(torch._foreach_norm(gradients))
    return norms.double().square().sum(0, keepdim=True)


def clip_and_update(
    optimizer: DistributedOptimizer, grad_norm: float, rate: float, settings: Settings
) -> None:
    """Clip by the norm of the whole gradient, and update weights and moments.

    megatron-core leaves the rate and the decay to a scheduler.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
        decay = settings.decay_at(rate, hidden=group["hidden"])
        group["weight_decay"] = decay if group["decayed"] else 0.0
    factor = settings.clip_grad_norm / (grad_norm + 1e-6)
    if factor < 1:
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        torch._foreach_mul_(gradients, factor)
    optimizer.step_with_ready_grads()
