"""The flat shards of the distributed optimizer (weights, states, slots) and their checkpoint form.

A data-parallel rank holds one stretch of all parameters laid end to end:

    parameters  |---- A ----|-- B --|------ C ------|
    ranks       |----- 0 -----|----- 1 -----|-- 2 --|

A checkpoint holds every parameter's state in the parameter's own shape. The rank where a parameter
begins, its owner, receives the rest of it from the ranks after it, and writes it: here rank 0
writes A and B, of which rank 1 sends the end. So every rank writes about as much as it holds, and
nothing is gathered. What this file reads of megatron-core's optimizer is listed in
`base.libraries.private_names`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from train.optimizers.stepping import GroupStepOptimizer

STATE = "optimizer.state."  # begins the checkpoint key of a part of a parameter's state
SLOT = "slot."  # follows it for a slot
EMBEDDING = "embedding.word_embeddings.weight"  # a parameter that every model has


@dataclass(frozen=True)
class Piece:
    """The part of one parameter on this rank."""

    parameter: torch.nn.Parameter
    start: int  # of the piece in the flat parameter
    stop: int
    owner: int  # data-parallel rank on which the parameter begins
    last: int  # data-parallel rank on which it ends
    ranks: tuple[tuple[int, int], ...]  # (start, stop) on each rank from the owner to the last
    inner: Tensor  # fp32, flat: what the inner optimizer updates, and its key for the states


class OptimizerState:
    """Main weights, optimizer states and slots of one rank.

    Attributes:
        pieces: this rank's parts of parameters, in the order of `weights`.
        inner_optimizer: that updates the pieces.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, states: tuple[str, ...], slot_names: list[str]
    ) -> None:
        self._part: Any = optimizer
        self.inner_optimizer: GroupStepOptimizer = self._part.optimizer
        self._states = states
        self._group = self._part.data_parallel_group_gloo  # pieces travel between CPUs
        self._rank = dist.get_rank(self._group)
        self.pieces = [
            piece for buffer in range(len(self._part.buffers)) for piece in self._pieces_of(buffer)
        ]
        self._slots = {
            name: {
                piece.parameter: torch.zeros_like(piece.inner, requires_grad=False)
                for piece in self.pieces
            }
            for name in slot_names
        }

    def _pieces_of(self, buffer_index: int) -> Iterator[Piece]:
        part = self._part
        buffer = part.buffers[buffer_index]
        (ranges_by_bucket,) = part.gbuf_ranges[buffer_index].values()
        for bucket, ranges in zip(buffer.buckets, ranges_by_bucket, strict=True):
            # mcore pads buckets so that all ranks hold equal stretches of them.
            stretch = bucket.grad_data.numel() // self._group.size()
            for parameter, places in ranges["param_map"].items():
                begin, end, _ = buffer.param_index_map[parameter]
                begin, end = begin - bucket.offset, end - bucket.offset
                owner, last = begin // stretch, (end - 1) // stretch
                # Where the parameter begins, the borders of ranks within it, and where it ends.
                bounds = [begin, *(stretch * rank for rank in range(owner + 1, last + 1)), end]
                group_index, order = part.model_param_group_index_map[parameter]
                yield Piece(
                    parameter,
                    places["param"].start,
                    places["param"].end,
                    owner,
                    last,
                    tuple((a - begin, b - begin) for a, b in itertools.pairwise(bounds)),
                    part.optimizer.param_groups[group_index]["params"][order],
                )

    def weights(self) -> list[Tensor]:
        """Return the fp32 main weights of this rank."""
        return [piece.inner.detach() for piece in self.pieces]

    def gradients(self) -> list[Tensor]:
        """Return the reduced gradients in the order of `weights`, once they are handed over."""
        return [_gradient(piece) for piece in self.pieces]

    def slot(self, name: str) -> list[Tensor]:
        """Return a slot in the order of `weights`."""
        return [self._slots[name][piece.parameter] for piece in self.pieces]

    def _tensors(self, piece: Piece) -> dict[str, Tensor]:
        """Return all state of a piece by its part of the checkpoint key, flat."""
        states = self.inner_optimizer.state[piece.inner]
        slots = {SLOT + name: tensors[piece.parameter] for name, tensors in self._slots.items()}
        return {
            "param": piece.inner.detach(),
            **{key: states[key] for key in self._states},
            **slots,
        }

    def to_save(self, model: Any) -> dict[str, Any]:
        """Return the optimizer's part of a checkpoint, for mcore to save.

        Args:
            model: sharded state dict of the model, made with `keep_vars`; it says how every
                parameter is split.
        """
        entries = _entries(model)
        state = {}
        for index, piece in enumerate(self.pieces):
            tensors = {key: self._joined(piece, flat) for key, flat in self._tensors(piece).items()}
            state[str(index)] = self._split_as(entries, piece, tensors)
        return state

    def spread(self, model: Any) -> None:
        """Let every weight of a sharded state dict be written by its owner."""
        owners = {id(piece.parameter): piece.owner for piece in self.pieces}
        for parameter, entry in _entries(model).items():
            # mcore writes the replica whose numbers are all 0: here that of the owner.
            entry.replica_id = (*entry.replica_id[:-1], int(owners.get(parameter) != self._rank))

    def to_load(self, model: Any, slots: list[str]) -> dict[str, Any]:
        """Return empty tensors for mcore to load into: weights, states, and `slots`.

        They hold the rows of a parameter in which this rank's piece is, not the whole parameter.
        The slots need not be this run's: a branch and its parent may have different averages.
        """
        entries = _entries(model)
        kinds = ("param", *self._states, *(SLOT + name for name in slots))
        return {
            str(index): {
                kind: list(_rows(entries[id(piece.parameter)], kind, piece)) for kind in kinds
            }
            for index, piece in enumerate(self.pieces)
        }

    def _split_as(
        self, entries: dict[int, Any], piece: Piece, tensors: dict[str, Tensor | None]
    ) -> dict[str, Any]:
        """Return a parameter's state split over ranks as the parameter is, written by its owner."""
        entry = entries[id(piece.parameter)]
        # 0, which is what makes mcore write it, on the owner alone.
        replica = (*entry.replica_id[:-1], self._rank - piece.owner)
        state = {}
        for key, tensor in tensors.items():
            if tensor is not None:
                changes: dict[str, Any] = {
                    "key": f"{STATE}{key}.{entry.key}",
                    "data": tensor,
                    "replica_id": replica,
                }
                if isinstance(entry, ShardedTensor):
                    changes["dtype"] = tensor.dtype
                state[key] = replace(entry, **changes)
        return state

    def _joined(self, piece: Piece, flat: Tensor) -> Tensor | None:
        """Return a whole parameter's state on its owner, live if all of it is there; else None."""
        if piece.owner == piece.last:
            return flat.view(piece.parameter.shape)
        # Two ranks come to the parameters they share in the same order, so messages need no tags.
        peers = dist.get_process_group_ranks(self._group)
        if self._rank != piece.owner:
            dist.send(flat.cpu(), peers[piece.owner], self._group)
            return None
        joined = torch.empty(piece.parameter.numel(), device="cpu")
        joined[piece.start : piece.stop] = flat
        for rank, (start, stop) in enumerate(piece.ranks[1:], piece.owner + 1):
            dist.recv(joined[start:stop], peers[rank], self._group)
        return joined.view(piece.parameter.shape)

    def assign(self, weight_of: Callable[[torch.nn.Parameter], Tensor]) -> None:
        """Set the main weights to what `weight_of` returns, in the shape of the parameter."""
        for piece in self.pieces:
            piece.inner.detach().copy_(
                weight_of(piece.parameter).flatten()[piece.start : piece.stop]
            )

    def load(self, state: dict[str, Any]) -> None:
        """Set the state to what mcore loaded into `to_load(...)`; other slots stay as they are."""
        for index, piece in enumerate(self.pieces):
            loaded = state[str(index)]
            before = piece.start % piece.parameter[0].numel()  # of the first row, another rank's
            for kind, flat in self._tensors(piece).items():
                if kind in loaded or not kind.startswith(SLOT):
                    rows = torch.cat([part.flatten() for part in loaded[kind]])
                    flat.copy_(rows[before : before + flat.numel()])


def odd_keys(saved: Iterable[str], unread: set[str]) -> set[str]:
    """Return the keys of a checkpoint that are unread, or are a weight without a main weight.

    The model's weights themselves may be unread: they follow from the main weights.
    """
    weights = {key for key in saved if not key.startswith(STATE)}
    prefix = f"{STATE}param."
    main = {key.removeprefix(prefix) for key in saved if key.startswith(prefix)}
    return (weights ^ main) | (unread - weights)


def _gradient(piece: Piece) -> Tensor:
    assert piece.inner.grad is not None
    return piece.inner.grad


def slots_in(keys: Iterable[str]) -> list[str]:
    """Return the names of the slots of a checkpoint with these keys."""
    prefix, suffix = f"{STATE}{SLOT}", f".{EMBEDDING}"
    return sorted(
        key[len(prefix) : -len(suffix)]
        for key in keys
        if key.startswith(prefix) and key.endswith(suffix)
    )


def _entries(model: Any) -> dict[int, Any]:
    """Return the entries of a sharded state dict by the identity of their parameter."""
    kinds = ShardedTensor | ShardedTensorFactory
    return {id(entry.data): entry for entry in nested_values(model) if isinstance(entry, kinds)}


def _rows(entry: Any, kind: str, piece: Piece) -> Iterator[ShardedTensor]:
    """Yield empty tensors for the rows of a parameter's state in which a piece of it is."""
    # mcore splits a fused parameter, gate and up, into one tensor of each, by rows.
    parts = [entry] if isinstance(entry, ShardedTensor) else nested_values(entry.build())
    width = piece.parameter[0].numel()
    before = 0  # elements of the parameter before the part
    for part in parts:
        # The rows of this part that the piece touches: down to, and up to, whole rows.
        first = max(piece.start - before, 0) // width
        last = -(-min(piece.stop - before, part.data.numel()) // width)
        before += part.data.numel()
        if first >= last:
            continue
        stacked = part.prepend_axis_num  # axes of layers, of which this is one
        shape = (*[1] * stacked, last - first, *part.data.shape[1:])
        offset = list(part.global_offset)
        offset[stacked] += first
        yield replace(
            part,
            key=f"{STATE}{kind}.{part.key}",
            data=torch.empty(shape, device="cpu"),
            dtype=torch.float32,
            local_shape=shape,
            global_offset=tuple(offset),
            axis_fragmentations=None,  # rows of any number
            prepend_axis_num=0,
        )
