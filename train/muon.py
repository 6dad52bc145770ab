"""Muon for the hidden matrices: momentum, orthogonalised for a matrix as a whole.

(Jordan 2024, https://kellerjordan.github.io/posts/muon/.) The update has the root mean square of
AdamW's, so one learning rate serves both (Liu et al. 2025, arXiv 2502.16982). The engines register
their matrices with their AdamW, which then leaves those out; `exp_avg` is the momentum.

The optimizer's state is flat, cut over data-parallel ranks. A matrix is on one rank or on
consecutive ones: the first receives the others' parts, orthogonalises, and returns them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Part(NamedTuple):
    """The part on this rank of a matrix, or of its tensor-parallel shard."""

    weights: Tensor  # flat: the optimizer updates it and keys its state by it
    place: slice  # of the part in it
    owner: int  # first data-parallel rank with a part
    ranges: tuple[tuple[int, int], ...]  # (start, stop) in the flat matrix, from the owner on
    orthogonalize: Callable[[Tensor], Tensor]  # of the whole, flat, to its update


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return U V^T, nearly, of a matrix U S V^T, times 0.2 sqrt(the longer side).

    Five Newton-Schulz iterations X <- a X + (b X X^T + c (X X^T)^2) X bring every singular value of
    X / ||X|| above 0.003 to between 0.68 and 1.21. They are computed in `dtype`.

    Example: a rotation times 5 becomes the rotation times 0.2 sqrt(2) = 0.28, but for 11%.
        >>> update = orthogonalized(torch.tensor([[0.0, 5.0], [-5.0, 0.0]]), torch.float32)
        >>> round(float(update[0, 1]), 2), round(float(update[1, 0]), 2), float(update[0, 0])
        (0.31, -0.31, 0.0)
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, factor, x, beta=a)  # summed in fp32 before it is rounded to bf16
    direction: Tensor = (x.T if tall else x).to(matrix.dtype)
    return direction * (0.2 * math.sqrt(max(matrix.shape)))


def register(
    optimizer: torch.optim.Optimizer, parts: list[Part], group: dist.ProcessGroup | None
) -> None:
    """Have Muon update these parts at every step, with rate and decay of their parameter group.

    `group` are the data-parallel ranks; all of them step together.
    """

    def before_step(stepping: torch.optim.Optimizer, *_: Any) -> None:
        for settings in stepping.param_groups:
            params = set(map(id, settings["params"]))
            own = [part for part in parts if id(part.weights) in params]
            _update(optimizer, own, settings["lr"], settings["weight_decay"], group)

    optimizer.register_step_pre_hook(before_step)


@torch.no_grad()
def _update(
    optimizer: torch.optim.Optimizer,
    parts: list[Part],
    rate: float,
    decay: float,
    group: dist.ProcessGroup | None,
) -> None:
    updates = []
    for part in parts:
        assert part.weights.grad is not None
        gradient = part.weights.grad[part.place]
        momentum = optimizer.state[part.weights]["exp_avg"][part.place]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        updates.append(gradient.lerp(momentum, MOMENTUM))  # Nesterov's

    _orthogonalize(parts, updates, group)
    for part, update in zip(parts, updates, strict=True):
        part.weights.detach()[part.place].mul_(1 - rate * decay).add_(update, alpha=-rate)

    for weights in {id(part.weights): part.weights for part in parts}.values():
        weights.grad = None  # AdamW leaves it out, and does not count its step
        if "step" in optimizer.state[weights]:
            optimizer.state[weights]["step"] += 1


def _orthogonalize(
    parts: list[Part], updates: list[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Replace the parts by those of the orthogonalised matrices."""
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
        matrix.copy_(parts[index].orthogonalize(matrix))

    _exchange(parts, updates, matrices, group, to_owner=False)
    for index, matrix in matrices.items():
        start, stop = parts[index].ranges[0]
        updates[index].copy_(matrix[start:stop])


def _exchange(
    parts: list[Part],
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
            send = to_owner == (index not in matrices)
            peer = dist.get_global_rank(group, peer) if group else peer
            operations.append(dist.P2POp(dist.isend if send else dist.irecv, tensor, peer, group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _messages(part: Part, update: Tensor, matrix: Tensor | None) -> Iterator[tuple[Tensor, int]]:
    """Yield each tensor that this rank sends or receives for a matrix, with the other rank."""
    if matrix is None:
        yield update, part.owner
        return
    for peer, (start, stop) in enumerate(part.ranges[1:], part.owner + 1):
        yield matrix[start:stop], peer
