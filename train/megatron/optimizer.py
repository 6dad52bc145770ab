"""The run's optimizer under megatron-core's distributed optimizer.

Weight-decay groups, clipping, and hidden matrices for optimizers that take them whole.
"""

from collections.abc import Iterator
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
from train.megatron.optimizer_state import OptimizerState, Piece
from train.model import megatron_names
from train.model.config import hidden_matrices, parameter_shapes
from train.optimizers import matrices
from train.optimizers.settings import GroupStep, MatrixOptimizer
from train.optimizers.stepping import GroupStepOptimizer, Member
from train.run.config import RunConfig


def _undecayed(run: RunConfig) -> set[str]:
    """Return the names of parameters that weight decay spares; UserError for a part of a matrix."""
    spared = set()
    for name in megatron_names.megatron_names(run.model):
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
def hand_over_gradients(optimizer: DistributedOptimizer) -> None:
    """Hand the reduced gradients of this rank's weights to the optimizer."""
    overflowed = optimizer.prepare_grads()
    assert not overflowed  # only a loss scaler looks for it, and there is none


@torch.no_grad()
def squared_gradient_norm(optimizer: DistributedOptimizer) -> Tensor:
    """Return this rank's part of the squared L2 norm of the whole gradient: [1] fp64.

    The sum over all ranks counts every weight once.
    """
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
    pieces = {piece.parameter: piece for piece in state.pieces}
    registered = [
        matrix
        for parameter, ranges in state.ranges()
        if hidden.issuperset(megatron_names.hf_names(names[parameter]))
        for matrix in _matrices(run, settings, names[parameter], ranges, pieces.get(parameter))
    ]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    device = next(iter(names)).device
    state.of_matrices = matrices.register(
        settings, state.inner_optimizer, registered, group, device
    )


def _matrices(
    run: RunConfig,
    settings: MatrixOptimizer,
    name: str,
    ranges: dict[int, tuple[int, int]],
    piece: Piece | None,
) -> Iterator[matrices.HiddenMatrix]:
    """Yield the HF matrices in the megatron tensor `name`.

    Queries, keys, values, gate and up are matrices of their own in HF: the one in which they are
    fused here is a matter of layout. Their rows may lie apart in it, a span in every query group.

    Args:
        run: its model and precision.
        settings: of the optimizer.
        name: of a tensor of this stage.
        ranges: (start, stop) in the flat tensor, or tensor-parallel shard, by data-parallel rank.
        piece: this rank's, if it holds one.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    axis, shape = megatron_names.shard_axis(name), megatron_names.whole_shape(name, run.model)
    width = shape[1] // (size if axis == 1 else 1)
    for hf_name, rows in megatron_names.hf_rows(name, run.model, size).items():
        spans = [(begin * width, end * width) for begin, end in rows]
        parts = {rank: _within(spans, *stretch) for rank, stretch in ranges.items()}
        held = {rank: sum(end - begin for begin, end in part) for rank, part in parts.items()}
        own = _within(spans, piece.start, piece.stop) if piece else []
        start = piece.start if piece else 0
        yield matrices.HiddenMatrix(
            hf_name,
            parameter_shapes(run.model)[hf_name],
            settings.decays(hf_name),
            run.scaling_of(hf_name),
            {rank: count for rank, count in held.items() if count},
            piece.inner if piece and own else None,
            tuple(slice(begin - start, end - start) for begin, end in own),
            partial(_direction, settings, PARAMETER_DTYPE[run.precision], width, axis),
        )


def _within(spans: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of the spans that are in [start, stop)."""
    parts = [(max(begin, start), min(end, stop)) for begin, end in spans]
    return [(begin, end) for begin, end in parts if begin < end]


def _direction(
    settings: MatrixOptimizer,
    dtype: torch.dtype,
    width: int,
    axis: int | None,
    flat: Tensor,
    states: matrices.States,
    step: GroupStep,
) -> Tensor:
    """Return the direction of an HF matrix's shard on this rank, flat.

    All tensor ranks call and compute the same, and have the same states of the whole matrix.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    if axis is None or size == 1:
        return settings.direction(flat.view(-1, width), dtype, states, step).flatten()
    shards = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(shards, flat, parallel_state.get_tensor_model_parallel_group())
    matrix = torch.cat([shard.view(-1, width) for shard in shards], axis)
    rank = parallel_state.get_tensor_model_parallel_rank()
    shard: Tensor = settings.direction(matrix, dtype, states, step).chunk(size, axis)[rank]
    return shard.flatten()
