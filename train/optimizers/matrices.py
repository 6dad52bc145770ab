"""Updates of whole hidden matrices whose states are flat and cut over data-parallel ranks.

A matrix is on one rank or on consecutive ones: the first receives the others' parts, computes the
direction of the update, and returns theirs. The engine registers its parts with its optimizer,
which then leaves them out.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from train.optimizers.settings import MatrixOptimizer


class MatrixPart(NamedTuple):
    """The part on this rank of a matrix, or of its tensor-parallel shard."""

    weights: Tensor  # flat: the optimizer updates it and keys its state by it
    span: slice  # of the part in it
    owner: int  # first data-parallel rank with a part
    ranges: tuple[tuple[int, int], ...]  # (start, stop) in the flat matrix, from the owner on
    direction: Callable[[Tensor], Tensor]  # of the whole, flat


def register(
    settings: MatrixOptimizer,
    optimizer: torch.optim.Optimizer,
    parts: list[MatrixPart],
    group: dist.ProcessGroup | None,
) -> None:
    """Update these parts as matrices at every step, with rate and decay of their parameter group.

    `group` are the data-parallel ranks; all of them step together.
    """

    def before_step(stepping: torch.optim.Optimizer, *_: Any) -> None:
        for values in stepping.param_groups:
            # By identity: to compare tensors with == compares their elements.
            members = set(map(id, values["params"]))
            of_group = [part for part in parts if id(part.weights) in members]
            _update(settings, optimizer, of_group, values["lr"], values["weight_decay"], group)

    optimizer.register_step_pre_hook(before_step)


@torch.no_grad()
def _update(
    settings: MatrixOptimizer,
    optimizer: torch.optim.Optimizer,
    parts: list[MatrixPart],
    rate: float,
    decay: float,
    group: dist.ProcessGroup | None,
) -> None:
    updates = []
    for part in parts:
        assert part.weights.grad is not None
        states = optimizer.state[part.weights]
        parts_of_states = {name: states[name][part.span] for name in settings.STATES}
        updates.append(settings.accumulate(part.weights.grad[part.span], parts_of_states))

    _replace_by_directions(parts, updates, group)
    for part, update in zip(parts, updates, strict=True):
        part.weights.detach()[part.span].mul_(1 - rate * decay).add_(update, alpha=-rate)

    for part in parts:
        part.weights.grad = None  # the optimizer leaves out what has no gradient


def _replace_by_directions(
    parts: list[MatrixPart], updates: list[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Replace the parts of matrices by those of their directions."""
    rank = dist.get_rank(group)
    matrices = {
        index: torch.empty(part.ranges[-1][1], dtype=update.dtype, device=update.device)
        for index, (part, update) in enumerate(zip(parts, updates, strict=True))
        if part.owner == rank
    }
    for index, matrix in matrices.items():
        start, stop = parts[index].ranges[0]
        matrix[start:stop] = updates[index]
    _exchange(parts, updates, matrices, group, to_owner=True)

    for index, matrix in matrices.items():
        matrix.copy_(parts[index].direction(matrix))

    _exchange(parts, updates, matrices, group, to_owner=False)
    for index, matrix in matrices.items():
        start, stop = parts[index].ranges[0]
        updates[index].copy_(matrix[start:stop])


def _exchange(
    parts: list[MatrixPart],
    updates: list[Tensor],
    matrices: dict[int, Tensor],
    group: dist.ProcessGroup | None,
    *,
    to_owner: bool,
) -> None:
    """Send parts to the owners of their matrices, or back; `matrices` are those of this rank."""
    operations = []
    for index, part in enumerate(parts):
        for tensor, peer in _messages(part, updates[index], matrices.get(index)):
            # On the way to the owner all others send; on the way back the owner does.
            send = to_owner == (index not in matrices)
            peer = dist.get_global_rank(group, peer) if group else peer
            operations.append(dist.P2POp(dist.isend if send else dist.irecv, tensor, peer, group))
    # All at once: in turn, two ranks could each wait for the other to receive.
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _messages(
    part: MatrixPart, update: Tensor, matrix: Tensor | None
) -> Iterator[tuple[Tensor, int]]:
    """Yield each tensor that this rank sends or receives for a matrix, with the other rank."""
    if matrix is None:
        yield update, part.owner
        return
    for peer, (start, stop) in enumerate(part.ranges[1:], part.owner + 1):
        yield matrix[start:stop], peer
