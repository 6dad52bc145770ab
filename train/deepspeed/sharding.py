"""Where DeepSpeed keeps fp32 weights, their AdamW state and their gradients: elsewhere at every ZeRO stage.

The rest of the engine knows only what is here: which range of which parameter this rank holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor
from torch.nn.utils import get_total_norm


class Piece(NamedTuple):
    """A range of one parameter, flattened."""

    name: str  # in HF's terms
    start: int
    length: int


@dataclass(frozen=True)
class Partition:
    """Consecutive fp32 weights of one decay group that this rank keeps, without padding.

    Attributes:
        owner: the tensor that AdamW updates and keeps its state by.
        begin: where the partition starts in the flattened owner.
        pieces: what lies in it, in order.
        counted: False for a further copy of what another rank holds.
    """

    owner: Tensor
    begin: int
    pieces: tuple[Piece, ...]
    decayed: bool
    counted: bool

    def of(self, flat: Tensor) -> Tensor:
        """The partition's range of the owner, or of a tensor of its shape; live."""
        return flat.detach().view(-1)[self.begin : self.begin + sum(piece.length for piece in self.pieces)]


class Sharding(Protocol):
    """One way to keep weights and gradients. Every rank calls every method."""

    def partitions(self) -> list[Partition]:
        """What this rank holds."""
        ...

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient, before clipping; infinite if any of it overflowed."""
        ...

    def drop_gradients(self) -> None:
        """Forgets the gradients of this step; weights and AdamW state are not touched."""
        ...

    def publish(self) -> None:
        """Makes the model compute with the fp32 weights."""
        ...


def _flat_pieces(group: list[tuple[str, int]], rank_start: int, rank_stop: int) -> tuple[Piece, ...]:
    """What [rank_start, rank_stop) cuts out of parameters (name, numel) laid end to end; padding follows the last."""
    pieces, offset = [], 0
    for name, numel in group:
        start, stop = max(rank_start - offset, 0), min(rank_stop - offset, numel)
        if start < stop:
            pieces.append(Piece(name, start, stop - start))
        offset += numel
    return tuple(pieces)


class Replicated:
    """Stage 0: AdamW updates the parameters themselves, on every rank alike."""

    def __init__(self, parameters: dict[str, Tensor], decays: Callable[[str], bool]) -> None:
        self._parameters, self._decays = parameters, decays

    def partitions(self) -> list[Partition]:
        """Every parameter, counted on rank 0."""
        return [
            Partition(parameter, 0, (Piece(name, 0, parameter.numel()),), self._decays(name), dist.get_rank() == 0)
            for name, parameter in self._parameters.items()
        ]

    def gradient_norm(self) -> float:
        """L2 norm of the reduced gradients."""
        norm = get_total_norm([parameter.grad for parameter in self._parameters.values() if parameter.grad is not None])
        return float(norm)

    def drop_gradients(self) -> None:
        """Forgets the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def publish(self) -> None:
        """Nothing to do: the model computes with what AdamW updates."""


class Flat:
    """Stages 1 and 2: each decay group lies end to end in one tensor, cut evenly over the ranks."""

    def __init__(self, optimizer: Any, parameters: dict[str, Tensor], decays: Callable[[str], bool]) -> None:
        self._optimizer = optimizer
        self._names, self._decays = {parameter: name for name, parameter in parameters.items()}, decays

    def _groups(self) -> list[tuple[list[Tensor], Tensor]]:
        """Parameters and this rank's fp32 weights of every group."""
        assert not any(any(padding) for padding in self._optimizer.round_robin_bit16_padding)
        return list(
            zip(self._optimizer.round_robin_bit16_groups, self._optimizer.single_partition_of_fp32_groups, strict=True)
        )

    def partitions(self) -> list[Partition]:
        """One range of every group."""
        partitions = []
        for parameters, weights in self._groups():
            start = dist.get_rank() * weights.numel()
            group = [(self._names[parameter], parameter.numel()) for parameter in parameters]
            pieces = _flat_pieces(group, start, start + weights.numel())
            partitions.append(Partition(weights, 0, pieces, self._decays(group[0][0]), counted=True))
        return partitions

    def gradient_norm(self) -> float:
        """L2 norm of the partitions' gradients over all ranks."""
        return float(self._optimizer.scaled_global_norm())

    def drop_gradients(self) -> None:
        """What DeepSpeed does with a gradient that overflowed."""
        self._optimizer.zero_grad()
        for gradients in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))

    def publish(self) -> None:
        """Casts this rank's weights to the model's precision and gathers all ranks'."""
        self._optimizer.update_lp_params()


class FlatBF16(Flat):
    """Stage 1 in bf16, where DeepSpeed accumulates fp32 gradients in an optimizer of its own."""

    def _groups(self) -> list[tuple[list[Tensor], Tensor]]:
        return list(zip(self._optimizer.bf16_groups, self._optimizer.fp32_groups_flat_partition, strict=True))

    def gradient_norm(self) -> float:
        """L2 norm of the reduced gradients, which every rank holds whole."""
        return float(get_total_norm(self._optimizer.fp32_groups_gradients_flat))

    def drop_gradients(self) -> None:
        """Zeroes the accumulators."""
        self._optimizer.zero_grad()


class Parameterwise:
    """Stage 3: every parameter is cut over the ranks for itself; what a rank holds of a group lies end to end."""

    def __init__(self, optimizer: Any, parameters: dict[str, Tensor], decays: Callable[[str], bool]) -> None:
        self._optimizer = optimizer
        self._names, self._decays = {parameter: name for name, parameter in parameters.items()}, decays

    def partitions(self) -> list[Partition]:
        """One range of every parameter, a partition each, for there is padding between them."""
        partitions, rank = [], dist.get_rank()
        for parameters, weights in zip(
            self._optimizer.fp16_groups, self._optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            begin = 0
            for parameter in parameters:
                name, size = self._names[parameter], parameter.partition_numel()
                pieces = _flat_pieces([(name, parameter.ds_numel)], rank * size, (rank + 1) * size)
                partitions.append(Partition(weights, begin, pieces, self._decays(name), counted=True))
                begin += size
            assert begin == weights.numel()
        return partitions

    def gradient_norm(self) -> float:
        """L2 norm of the partitions' gradients over all ranks."""
        return float(combine_grad_norm_groups(self._optimizer._get_norm_groups()))

    def drop_gradients(self) -> None:
        """What DeepSpeed does with a gradient that overflowed."""
        self._optimizer._pre_step()
        self._optimizer.zero_grad()
        self._optimizer.averaged_gradients = {}

    def publish(self) -> None:
        """Casts this rank's weights to the model's precision; small parameters are gathered again."""
        optimizer = self._optimizer
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def sharding_of(engine: DeepSpeedEngine, parameters: dict[str, Tensor], decays: Callable[[str], bool]) -> Sharding:
    """How this engine shards its parameters, given by HF name; `decays` says by name whether weight decay applies."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        return Replicated(parameters, decays)
    if stage == 3:
        return Parameterwise(optimizer, parameters, decays)
    return (FlatBF16 if isinstance(optimizer, BF16_Optimizer) else Flat)(optimizer, parameters, decays)
