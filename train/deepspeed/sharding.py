"""Weights, optimizer states and gradients in fp32 in DeepSpeed.

The rest of the engine knows only ranges of parameters. This file reaches into DeepSpeed's private
members: look here first when its version changes.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from base.ranks import spans_of_ranks
from train.engine import Change, LinearPart, change_in_place
from train.model.config import hidden_matrices
from train.optimizers.matrices import HiddenMatrix, States
from train.optimizers.settings import GroupStep, MatrixOptimizer
from train.run.config import RunConfig


class ParameterRange(NamedTuple):
    """A range of one parameter, flattened."""

    name: str  # in HF's terms
    start: int
    length: int


class StatePart(NamedTuple):
    """A range of one kind of state of a parameter, live."""

    kind: str
    range: ParameterRange
    values: Tensor  # flat


class Partition(NamedTuple):
    """Consecutive fp32 weights of one decay group on this rank, without padding."""

    owner: Tensor  # flat: the optimizer updates it and keys its state by it
    pieces: tuple[ParameterRange, ...]  # its content, in order; padding may follow
    start: int = 0  # of the first in the owner

    def of(self, flat: Tensor) -> Tensor:
        """Return the partition's range of the owner, or of a tensor of its shape; live."""
        length = sum(piece.length for piece in self.pieces)
        return flat.detach().view(-1)[self.start : self.start + length]


def by_piece(
    partitions: list[Partition], values: list[Tensor]
) -> Iterator[tuple[ParameterRange, Tensor]]:
    """Yield every piece with its part, live, of the values in the shapes of the partitions."""
    for partition, value in zip(partitions, values, strict=True):
        parts = value.split([piece.length for piece in partition.pieces])
        yield from zip(partition.pieces, parts, strict=True)


def _flat_pieces(
    group: list[tuple[str, int]], rank_start: int, rank_stop: int
) -> tuple[ParameterRange, ...]:
    """Return the pieces in [rank_start, rank_stop) of parameters (name, numel) laid end to end."""
    pieces, offset = [], 0
    for name, numel in group:
        start, stop = max(rank_start - offset, 0), min(rank_stop - offset, numel)
        if start < stop:
            pieces.append(ParameterRange(name, start, stop - start))
        offset += numel
    return tuple(pieces)


class Sharding:
    """The parameters of a decay group end to end, cut evenly over the ranks: stages 1 and 2."""

    def __init__(self, optimizer: Any, parameters: dict[str, Tensor]) -> None:
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in parameters.items()}

    def _groups(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Return parameters and this rank's fp32 weights of every group."""
        optimizer = self._optimizer
        # Pieces are computed as laid end to end: padding between parameters would shift them.
        assert not any(any(padding) for padding in optimizer.round_robin_bit16_padding)
        groups = optimizer.round_robin_bit16_groups
        return zip(groups, optimizer.single_partition_of_fp32_groups, strict=True)

    def partitions(self) -> list[Partition]:
        """Return what this rank holds: one range of every group."""
        partitions = []
        for parameters, weights in self._groups():
            start = dist.get_rank() * weights.numel()
            group = [(self._names[parameter], parameter.numel()) for parameter in parameters]
            pieces = _flat_pieces(group, start, start + weights.numel())
            partitions.append(Partition(weights, pieces))
        return partitions

    def matrices(
        self, run: RunConfig, settings: MatrixOptimizer, dtype: torch.dtype
    ) -> list[HiddenMatrix]:
        """Return the hidden matrices, on all ranks; directions are in `dtype`."""
        registered, rank, hidden = [], dist.get_rank(), hidden_matrices(run.model)
        for parameters, weights in self._groups():
            size, begin = weights.numel(), 0
            for parameter in parameters:
                end = begin + parameter.numel()
                name = self._names[parameter]
                if name in hidden:
                    spans = spans_of_ranks(begin, end, size)
                    held = {holder: stop - start for holder, (start, stop) in spans.items()}
                    # Its place in the flat weights of this rank.
                    start = max(begin - rank * size, 0)
                    own = (slice(start, start + held[rank]),) if rank in held else ()
                    direction = partial(_flat_direction, settings, parameter.shape, dtype)
                    registered.append(
                        HiddenMatrix(
                            name,
                            parameter.shape,
                            settings.decays(name),
                            run.scaling_of(name),
                            held,
                            weights,
                            own,
                            direction,
                        )
                    )
                begin = end
        return registered

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of the whole gradient before clipping; infinite if it overflowed."""
        return torch.as_tensor(self._optimizer.scaled_global_norm())

    def gradients(self, partitions: list[Partition]) -> list[Tensor]:
        """Return the reduced gradients of the partitions, one of every group."""
        averaged = self._optimizer.averaged_gradients
        return [
            partition.of(torch.cat([part.flatten() for part in averaged[group]]))
            for group, partition in enumerate(partitions)
        ]

    def set_gradients(self, values: list[Tensor]) -> None:
        """Replace the reduced gradients by values like those of `gradients`."""
        for group, value in enumerate(values):
            start = 0
            for part in self._optimizer.averaged_gradients[group]:
                piece = value[start : start + part.numel()]  # the last part may end in padding
                part.view(-1)[: len(piece)].copy_(piece)
                start += part.numel()

    def drop_gradients(self) -> None:
        """Forget the gradients of this step, as DeepSpeed does where they overflow."""
        self._optimizer.zero_grad()
        for gradients in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))

    def publish(self) -> None:
        """Copy this rank's weights to the model and gather all ranks'."""
        self._optimizer.update_lp_params()

    def settle(self) -> None:
        """Do nothing: the stream that updates weights gathers them, too."""

    def whole(self, _: Sequence[str], mine: Collection[str]) -> dict[str, Tensor]:
        """Return those of some parameters that this rank asks for: every rank has all, live."""
        return {name: parameter.detach() for parameter, name in self._names.items() if name in mine}

    def linears(self, names: frozenset[str]) -> Iterator[LinearPart]:
        """Yield linears by HF name, live."""
        for parameter, name in self._names.items():
            if name in names:
                yield LinearPart(name, (parameter.detach(),))

    def change_linears(self, names: frozenset[str], change: Change) -> Callable[[], None]:
        """Replace weights by what `change` returns; return what restores them."""
        return change_in_place(self.linears(names), change)


def _flat_direction(
    settings: MatrixOptimizer,
    shape: torch.Size,
    dtype: torch.dtype,
    flat: Tensor,
    states: States,
    step: GroupStep,
) -> Tensor:
    return settings.direction(flat.view(shape), dtype, states, step).flatten()
