"""The flat shards of the distributed optimizer (weights, states, slots) and their checkpoint form.

A data-parallel rank holds one stretch of all parameters laid end to end:

    parameters  |---- A ----|-- B --|------ C ------|
    ranks       |----- 0 -----|----- 1 -----|-- 2 --|

So it is in every bucket of gradients, of which a model on GPUs has dozens.

A checkpoint holds every parameter's state in the parameter's own shape, cut by rows:

    rows of A   |--|--|--|--|--|
    ranks       |---- 0 ---|- 1

Every rank writes the rows that begin on it; of the row that its stretch ends in, the ranks after it
send the rest. So every rank writes what it holds, but for a row, and nothing is gathered. What this
file reads of megatron-core's optimizer is listed in `base.libraries.private_names`.
"""

import bisect
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

    @property
    def width(self) -> int:
        """The elements of a row of the parameter; 1 of a vector."""
        return self.parameter[0].numel()

    @property
    def rows(self) -> tuple[int, int]:
        """The rows that begin on this rank, as a stretch of the flat parameter."""
        return -(-self.start // self.width) * self.width, -(-self.stop // self.width) * self.width

    @property
    def border(self) -> int:
        """The end of those rows that are wholly here: of the last one, others may hold a part."""
        return max(self.rows[0], self.stop // self.width * self.width)

    def rank_of(self, element: int) -> int:
        """Return the data-parallel rank that holds an element of the flat parameter."""
        starts = [start for start, _ in self.ranks]
        return self.owner + bisect.bisect_right(starts, element) - 1


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
        tensors = [self._tensors(piece) for piece in self.pieces]
        border_rows = self._border_rows([list(by_kind.values()) for by_kind in tensors])
        state = {}
        for index, (piece, row) in enumerate(zip(self.pieces, border_rows, strict=True)):
            entry, start = entries[id(piece.parameter)], piece.rows[0]
            state[str(index)] = {
                kind: [
                    *_rows(
                        entry, key, start, flat[start - piece.start : piece.border - piece.start]
                    ),
                    *_rows(entry, key, piece.border, row[number]),
                ]
                for number, (kind, flat) in enumerate(tensors[index].items())
                for key in [f"{STATE}{kind}."]
            }
        return state

    def weights_to_save(self, model: Any) -> dict[str, Any]:
        """Return the model's part of a checkpoint: all ranks have all weights, each saves its rows.

        Args:
            model: sharded state dict of the model, made with `keep_vars`.
        """
        entries = _entries(model)
        state = {}
        for index, piece in enumerate(self.pieces):
            weights = piece.parameter.detach().flatten()[slice(*piece.rows)]
            state[str(index)] = list(
                _rows(entries[id(piece.parameter)], "", piece.rows[0], weights)
            )
        return state

    def _border_rows(self, tensors: list[list[Tensor]]) -> list[Tensor]:
        """Return the last row that begins in each piece, for each of its tensors, on the CPU.

        Args:
            tensors: of each piece, flat.

        Returns:
            [tensors, elements of a row], or without elements where the piece ends with its row.
        """
        peers = dist.get_process_group_ranks(self._group)
        operations, parts = [], []
        border_rows = []
        for piece, flats in zip(self.pieces, tensors, strict=True):
            start, stop = piece.rows
            # The end of a row that began on a rank before. Two ranks come to the rows they share in
            # the same order, so messages need no tags.
            tail = min(start, piece.stop) - piece.start
            if tail:
                sent = torch.stack([flat[:tail].cpu() for flat in flats])
                owner = piece.rank_of(start - piece.width)
                operations.append(dist.P2POp(dist.isend, sent, peers[owner], self._group))

            row = torch.empty(len(flats), stop - piece.border)
            border_rows.append(row)
            if not row.numel():
                continue
            here = piece.stop - piece.border
            for flat, values in zip(flats, row, strict=True):
                values[:here] = flat[flat.numel() - here :]
            for rank in range(piece.rank_of(piece.stop), piece.rank_of(stop - 1) + 1):
                begin, end = piece.ranks[rank - piece.owner]
                part = torch.empty(len(flats), min(end, stop) - begin)
                operations.append(dist.P2POp(dist.irecv, part, peers[rank], self._group))
                parts.append((row[:, begin - piece.border : min(end, stop) - piece.border], part))

        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for target, part in parts:
            target.copy_(part)
        return border_rows

    def to_load(self, model: Any, slots: list[str]) -> dict[str, Any]:
        """Return empty tensors for mcore to load into: weights, states, and `slots`.

        They hold the rows of a parameter in which this rank's piece is, not the whole parameter.
        The slots need not be this run's: a branch and its parent may have different averages.
        """
        entries = _entries(model)
        kinds = ("param", *self._states, *(SLOT + name for name in slots))
        state = {}
        for index, piece in enumerate(self.pieces):
            # Down to, and up to, whole rows.
            start, stop = piece.start // piece.width * piece.width, piece.rows[1]
            state[str(index)] = {
                kind: list(
                    _rows(
                        entries[id(piece.parameter)],
                        f"{STATE}{kind}.",
                        start,
                        torch.empty(stop - start),
                    )
                )
                for kind in kinds
            }
        return state

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
            before = piece.start % piece.width  # of the first row, another rank's
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


def _rows(entry: Any, prefix: str, start: int, flat: Tensor) -> Iterator[ShardedTensor]:
    """Yield whole rows of a parameter as it is split over ranks, each part by one writer.

    Args:
        entry: of the parameter in the model's sharded state dict.
        prefix: begins the checkpoint key.
        start: of the rows in the flat parameter.
        flat: their values.
    """
    # mcore splits a fused parameter, gate and up, into one tensor of each, by rows.
    parts = [entry] if isinstance(entry, ShardedTensor) else nested_values(entry.build())
    before = 0  # elements of the parameter before the part
    for part in parts:
        width = part.data[0].numel()
        begin = max(start, before)
        end = min(start + flat.numel(), before + part.data.numel())
        first = (begin - before) // width
        before += part.data.numel()
        if begin >= end:
            continue
        stacked = part.prepend_axis_num  # axes of layers, of which this is one
        shape = (*[1] * stacked, (end - begin) // width, *part.data.shape[1:])
        offset = list(part.global_offset)
        offset[stacked] += first
        yield replace(
            part,
            key=f"{prefix}{part.key}",
            data=flat[begin - start : end - start].view(shape),
            dtype=flat.dtype,
            local_shape=shape,
            global_offset=tuple(offset),
            axis_fragmentations=None,  # rows of any number
            # The replica 0, on one rank alone, is what mcore writes.
            replica_id=(*part.replica_id[:-1], 0),
            prepend_axis_num=0,
        )
