"""Updates of whole hidden matrices whose states are flat and cut over data-parallel ranks.

The parts of a matrix are on one rank or on consecutive ones. Any rank may compute it: it receives
all parts, computes the direction of the update, and returns them. The engine registers all
matrices, on every rank, with its optimizer, which then leaves them out.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from base.ranks import even_shares
from train.model.parametrization import Scaling
from train.optimizers.settings import GroupStep, MatrixOptimizer

# Of whole matrices that a rank computes in a round, at most, unless a single one is larger: 1 GiB.
# As many elements again are its own parts of the matrices of the round.
ROUND_ELEMENTS = 1 << 28
States = dict[str, Tensor]  # of a whole matrix, by the keys of `MatrixOptimizer.whole_states`


class HiddenMatrix(NamedTuple):
    """A hidden matrix in HF's terms, or its tensor-parallel shard, and what this rank holds."""

    name: str  # in HF's terms
    shape: tuple[int, ...]  # of the whole matrix
    decayed: bool  # as its parameter group, as is the next
    scaling: Scaling
    held: dict[int, int]  # elements on each data-parallel rank that holds some, in order
    weights: Tensor | None  # flat: the optimizer updates it and keys its state by it
    spans: tuple[slice, ...]  # of this rank's part in it, in order
    direction: Callable[[Tensor, States, GroupStep], Tensor]  # of all parts, flat


def rounds(
    flops: Sequence[float], elements: Sequence[int], ranks: int
) -> Iterator[list[list[int]]]:
    """Yield rounds of matrices, by their numbers: those that each rank computes.

    Rounds bound memory; all ranks begin one together.

    Args:
        flops: of the direction of each matrix.
        elements: of each matrix on a rank that computes it.
        ranks: number of ranks.

    Example: four matrices on two ranks.
        >>> list(rounds([3, 2, 2, 1], [9, 4, 4, 1], 2))
        [[[0, 3], [1, 2]]]
    """
    order = sorted(range(len(flops)), key=lambda index: -flops[index])
    while order:
        count = ranks * max(1, ROUND_ELEMENTS // elements[order[0]])
        numbers, order = order[:count], order[count:]
        yield even_shares({index: flops[index] for index in numbers}, ranks)


def register(
    settings: MatrixOptimizer,
    optimizer: torch.optim.Optimizer,
    matrices: list[HiddenMatrix],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, States]:
    """Update these matrices at every step, with rate and decay of their parameter groups.

    `group` are the data-parallel ranks. All of them step together, and give the same matrices in
    the same order. Returns the live states of the matrices that this rank computes, by HF name.
    """
    by_group: dict[tuple[Any, ...], list[HiddenMatrix]] = {}
    for matrix in matrices:
        key = matrix.decayed, matrix.scaling.rate, matrix.scaling.epsilon
        by_group.setdefault(key, []).append(matrix)
    exchanges = {
        key: _exchanges(settings, members, group, device) for key, members in by_group.items()
    }

    of_group = itemgetter("decayed", "rate_factor", "epsilon_factor")

    @torch.no_grad()
    def before_step(stepping: torch.optim.Optimizer, *_: Any) -> None:
        # DeepSpeed steps every group alone; a rank without parts of a group computes its matrices.
        for values in filter(itemgetter("hidden"), stepping.param_groups):
            rate, decay = values["lr"], values["weight_decay"]
            # The optimizer counts this update when its own step begins.
            step = GroupStep(rate, decay, values["step"] + 1, values["epsilon_factor"])
            for exchange in exchanges[of_group(values)]:
                updates = [_accumulated(settings, optimizer, *part) for part in exchange.parts]
                exchange.replace_by_directions(updates, step)
                for (weights, span), update in zip(exchange.parts, updates, strict=True):
                    weights.detach()[span].mul_(1 - rate * decay).add_(update, alpha=-rate)
            for weights in values["params"]:
                weights.grad = None  # the optimizer leaves out what has no gradient

    optimizer.register_step_pre_hook(before_step)
    return {
        name: states
        for of_kind in exchanges.values()
        for exchange in of_kind
        for name, states in exchange.states.items()
    }


def _exchanges(
    settings: MatrixOptimizer,
    matrices: list[HiddenMatrix],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> list["_Exchange"]:
    flops = [settings.direction_flops(matrix.shape) for matrix in matrices]
    elements = [sum(matrix.held.values()) for matrix in matrices]
    return [
        _Exchange(
            settings,
            [[matrices[index] for index in indices] for indices in assigned],
            group,
            device,
        )
        for assigned in rounds(flops, elements, dist.get_world_size(group))
    ]


def _accumulated(
    settings: MatrixOptimizer, optimizer: torch.optim.Optimizer, weights: Tensor, span: slice
) -> Tensor:
    """Update the states of a span; return what the direction takes of it."""
    assert weights.grad is not None
    states = optimizer.state[weights]
    span_states = {name: state[span] for name, state in states.items()}
    return settings.accumulate(weights.grad[span], span_states)


class _Exchange:
    """A round: the matrices of every rank, and the messages that carry their parts.

    A rank sends what it holds by the rank that computes, and receives by the rank that holds. Both
    go by the order of matrices within that, so a message needs no description.

    Attributes:
        parts: of this rank, in the order in which it sends them.
        states: of the whole matrices that this rank computes, by HF name.
    """

    def __init__(
        self,
        settings: MatrixOptimizer,
        assigned: list[list[HiddenMatrix]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group, self._device, rank = group, device, dist.get_rank(group)
        self._computed = assigned[rank]
        self.states = {
            matrix.name: {
                key: torch.zeros(shape, device=device)
                for key, shape in settings.whole_states(matrix.shape).items()
            }
            for matrix in self._computed
        }
        self._sent = [sum(matrix.held.get(rank, 0) for matrix in matrices) for matrices in assigned]
        # Elements of a matrix from a rank, in the order in which they arrive.
        self._pieces = [
            (index, matrix.held[source])
            for source in range(len(assigned))
            for index, matrix in enumerate(self._computed)
            if source in matrix.held
        ]
        self._received = [
            sum(matrix.held.get(source, 0) for matrix in self._computed)
            for source in range(len(assigned))
        ]
        self.parts = [
            (matrix.weights, span)
            for matrices in assigned
            for matrix in matrices
            if matrix.weights is not None
            for span in matrix.spans
        ]

    def replace_by_directions(self, updates: list[Tensor], step: GroupStep) -> None:
        """Replace this rank's parts of matrices by those of the directions."""
        sizes = [len(update) for update in updates]
        sent = torch.cat(updates) if updates else torch.empty(0, device=self._device)
        updates[:] = sent.split(sizes)  # in one place, also on the way back
        received = sent
        if len(self._sent) > 1:
            received = sent.new_empty(sum(self._received))
            dist.all_to_all_single(received, sent, self._received, self._sent, group=self._group)

        # The ranks that hold a matrix are in the order of its elements.
        by_matrix: list[list[Tensor]] = [[] for _ in self._computed]
        views = received.split([count for _, count in self._pieces])
        for (index, _), view in zip(self._pieces, views, strict=True):
            by_matrix[index].append(view)
        for matrix, parts in zip(self._computed, by_matrix, strict=True):
            direction = matrix.direction(torch.cat(parts), self.states[matrix.name], step)
            for part, values in zip(parts, direction.split(list(map(len, parts))), strict=True):
                part.copy_(values)

        if len(self._sent) > 1:
            dist.all_to_all_single(sent, received, self._sent, self._received, group=self._group)
