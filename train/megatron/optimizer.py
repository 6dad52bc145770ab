"""The run's optimizer under megatron-core's distributed optimizer.

Weight-decay groups, clipping, and hidden matrices for optimizers that take them whole.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from base.errors import UserError
from train.megatron.model import PARAMETER_DTYPE, global_parameters
from train.megatron.optimizer_state import OptimizerState
from train.model import megatron_names
from train.model.config import hidden_matrices
from train.optimizers import matrices
from train.optimizers.settings import MatrixOptimizer
from train.optimizers.stepping import GroupStepOptimizer, Member
from train.run.config import RunConfig


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


def _members(run: RunConfig, model: DistributedDataParallel) -> list[Member]:
    """Return this stage's parameters with what decays them, those of the same kind together.

    Which are decayed is the run's to say (`optimizer.undecayed`); megatron-core would spare norms.
    """
    undecayed, hidden = _undecayed(run), hidden_matrices(run.model)
    members = []
    for name, parameter in global_parameters(model.module).items():
        hf_names = megatron_names.hf_names(name)
        # Matrices that are one here read the same input, and are scaled alike.
        (scaling,) = {run.scaling_of(hf_name) for hf_name in hf_names}
        members.append(
            Member(parameter, hidden.issuperset(hf_names), name not in undecayed, scaling)
        )
    return sorted(members, key=lambda each: (each.hidden, not each.decayed, each.scaling))


def build_optimizer(run: RunConfig, model: DistributedDataParallel) -> DistributedOptimizer:
    """Return the distributed optimizer: fp32 weights and states, sharded over data ranks.

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
    inner = GroupStepOptimizer(run.optimizer, _members(run, model))
    optimizer = DistributedOptimizer(
        inner,
        config,
        grad_scaler=None,
        init_state_fn=lambda *_: inner.start_states(),
        model_chunks=[model],
        per_model_buffers={0: model.buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,  # for mcore's own checkpoints, as is the next
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    inner.start_states()
    return optimizer


@torch.no_grad()
def squared_gradient_norm(optimizer: DistributedOptimizer) -> Tensor:
    """Return this rank's part of the squared L2 norm of the whole gradient: [1] fp64.

    The sum over all ranks counts every weight once. Hands the reduced gradients to the optimizer.
    """
    overflowed = optimizer.prepare_grads()
    assert not overflowed  # only a loss scaler looks for it, and there is none
    gradients = optimizer.get_grads_for_grad_norm()
    # In a small model a rank may hold no weight that counts here.
    if not gradients:
        return torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    norms = torch.stack(torch._foreach_norm(gradients))
    return norms.double().square().sum(0, keepdim=True)


def clip_and_update(
    optimizer: DistributedOptimizer, grad_norm: float, rate: float, clip_grad_norm: float
) -> None:
    """Clip by the norm of the whole gradient, and update weights and states."""
    optimizer.optimizer.set_rate(rate)  # megatron-core leaves it to a scheduler
    # The 1e-6 is what torch.nn.utils.clip_grad_norm_ adds as well.
    factor = clip_grad_norm / (grad_norm + 1e-6)
    if factor < 1:
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        torch._foreach_mul_(gradients, factor)
    optimizer.step_with_ready_grads()


def register_matrices(run: RunConfig, model: Any, state: OptimizerState) -> None:
    """Have this stage's hidden matrices updated whole, if the run's optimizer asks for that."""
    settings = run.optimizer
    if not isinstance(settings, MatrixOptimizer):
        return
    hidden = hidden_matrices(run.model)
    names = {parameter: name for name, parameter in global_parameters(model).items()}
    parts = [
        matrices.MatrixPart(
            piece.inner,
            slice(0, piece.inner.numel()),
            piece.owner,
            piece.ranks,
            partial(_direction, run, settings, names[piece.parameter], piece.parameter.shape),
        )
        for piece in state.pieces
        if hidden.issuperset(megatron_names.hf_names(names[piece.parameter]))
    ]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    matrices.register(settings, state.inner_optimizer, parts, group)


def _direction(
    run: RunConfig, settings: MatrixOptimizer, name: str, shape: torch.Size, flat: Tensor
) -> Tensor:
    """Return the direction of a megatron tensor's shard on this rank, flat, by HF matrices.

    Queries, keys, values, gate and up are matrices of their own in HF: the one in which they are
    fused here is a matter of layout, and a tensor rank's shard even more so. All tensor ranks call
    and compute the same.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    shards = [torch.empty_like(flat) for _ in range(size)] if size > 1 else [flat]
    if size > 1:
        dist.all_gather(shards, flat, parallel_state.get_tensor_model_parallel_group())
    matrix = megatron_names.unshard(name, [shard.view(shape) for shard in shards])

    dtype = PARAMETER_DTYPE[run.precision]
    # The rows of an HF matrix lie apart in a fused one: a span in every query group.
    for rows in megatron_names.hf_rows(name, run.model).values():
        index = torch.cat([torch.arange(*span, device=flat.device) for span in rows])
        matrix[index] = settings.direction(matrix[index], dtype)
    return megatron_names.shard(name, matrix, rank, size).flatten()
