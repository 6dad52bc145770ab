"""The flat shards of the distributed optimizer (weights, states, slots) and their checkpoint form.

A data-parallel rank holds one stretch of all parameters laid end to end:

    parameters  |---- A ----|-- B --|------ C ------|
    ranks       |----- 0 -----|----- 1 -----|-- 2 --|

So it is in every bucket of gradients, of which a model on GPUs has dozens.

A checkpoint holds every parameter's state in the parameter's own shape. A rank writes and reads its
stretch of a matrix as up to three boxes: the end of a row, whole rows, the beginning of a row.

    A, 4 rows   |-------|-------|-------|-------|
    ranks       |------- 0 --------|---- 1 ------
    boxes       |-------|-------|--|----|-------|

So every rank writes what it holds, and nothing is sent. At any other layout a rank reads what it
then holds.
What this file reads of megatron-core's optimizer is listed in `base.libraries.private_names`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from base.ranks import spans_of_ranks
from train.model.megatron_names import EMBEDDING
from train.optimizers.stepping import GroupStepOptimizer

STATE = "optimizer.state."  # begins the checkpoint key of a part of a parameter's state
SLOT = "slot."  # follows it for a slot
MATRIX = "matrix."  # follows it for a state of a whole matrix, before its key and the HF name
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter on this rank."""

    parameter: torch.nn.Parameter
    start: int  # of the piece in the flat parameter
    stop: int
    owner: int  # data-parallel rank on which the parameter begins
    ranks: tuple[tuple[int, int], ...]  # (start, stop) on each rank from the owner on
    inner: Tensor  # fp32, flat: what the inner optimizer updates, and its key for the states


class OptimizerState:
    """Main weights, optimizer states and slots of one rank.

    Attributes:
        pieces: this rank's parts of parameters, in the order of `weights`.
        inner_optimizer: that updates the pieces.
        of_matrices: states of the whole matrices that this rank computes, by HF name.
    """

    def __init__(self, optimizer: DistributedOptimizer, slot_names: list[str]) -> None:
        self._part: Any = optimizer
        self.inner_optimizer: GroupStepOptimizer = self._part.optimizer
        self.of_matrices: dict[str, dict[str, Tensor]] = {}
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
            for parameter, places in ranges["param_map"].items():
                by_rank = self._ranges(buffer, bucket, parameter)
                group_index, order = part.model_param_group_index_map[parameter]
                yield Piece(
                    parameter,
                    places["param"].start,
                    places["param"].end,
                    min(by_rank),
                    tuple(by_rank.values()),
                    part.optimizer.param_groups[group_index]["params"][order],
                )

    def _ranges(
        self, buffer: Any, bucket: Any, parameter: torch.nn.Parameter
    ) -> dict[int, tuple[int, int]]:
        """Return (start, stop) in the flat parameter, by the data-parallel ranks that hold it."""
        # mcore pads buckets so that all ranks hold equal stretches of them.
        stretch = bucket.grad_data.numel() // self._part.data_parallel_group.size()
        begin, end, _ = buffer.param_index_map[parameter]
        return spans_of_ranks(begin - bucket.offset, end - bucket.offset, stretch)

    def ranges(self) -> Iterator[tuple[torch.nn.Parameter, dict[int, tuple[int, int]]]]:
        """Yield every parameter of this stage, in one order on all ranks, and who holds it."""
        for buffer in self._part.buffers:
            for parameter, (_, _, bucket) in buffer.param_index_map.items():
                yield parameter, self._ranges(buffer, buffer.buckets[bucket], parameter)

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
        return {"param": piece.inner.detach(), **states, **slots}

    def to_save(self, model: Any) -> dict[str, Any]:
        """Return the optimizer's part of a checkpoint, for mcore to save: live tensors.

        Args:
            model: sharded state dict of the model, made with `keep_vars`; it says how every
                parameter is split.
        """
        entries = _entries(model)
        of_pieces = {
            str(index): {
                kind: list(_boxes(entries[id(piece.parameter)], f"{STATE}{kind}.", piece, flat))
                for kind, flat in self._tensors(piece).items()
            }
            for index, piece in enumerate(self.pieces)
        }
        return of_pieces | {"matrices": self._of_matrices_to_save()}

    def _of_matrices_to_save(self) -> dict[str, list[ShardedTensor]]:
        # Every tensor rank has them all; the first one writes.
        replica = parallel_state.get_tensor_model_parallel_rank()
        return {
            name: [
                ShardedTensor.from_rank_offsets(
                    f"{STATE}{MATRIX}{key}.{name}", tensor, replica_id=replica
                )
                for key, tensor in states.items()
            ]
            for name, states in self.of_matrices.items()
        }

    def weights_to_save(self, model: Any) -> dict[str, Any]:
        """Return the model's part of a checkpoint: all ranks have all weights, each saves its part.

        Args:
            model: sharded state dict of the model, made with `keep_vars`.
        """
        entries = _entries(model)
        state = {}
        for index, piece in enumerate(self.pieces):
            weights = piece.parameter.detach().flatten()[piece.start : piece.stop]
            state[str(index)] = list(_boxes(entries[id(piece.parameter)], "", piece, weights))
        return state

    def to_load(self, model: Any, slots: list[str]) -> dict[str, Any]:
        """Return the live tensors for mcore to load into: weights, states, and those of `slots`.

        Other slots stay as they are: a branch and its parent may have different averages.
        """
        kept = {SLOT + name for name in self._slots} - {SLOT + name for name in slots}
        return {
            index: {kind: boxes for kind, boxes in kinds.items() if kind not in kept}
            for index, kinds in self.to_save(model).items()
        }

    def assign(self, weight_of: Callable[[torch.nn.Parameter], Tensor]) -> None:
        """Set the main weights to what `weight_of` returns, in the shape of the parameter."""
        for piece in self.pieces:
            piece.inner.detach().copy_(
                weight_of(piece.parameter).flatten()[piece.start : piece.stop]
            )


def odd_keys(saved: dict[str, Shape], wanted: dict[str, Shape]) -> list[str]:
    """Return the keys that only a checkpoint or only this run has, or that differ in their shape.

    The model's weights may be in the checkpoint alone, since they follow from the main weights, if
    each has a main weight. So may slots: a branch need not have the averages of its parent.

    Args:
        saved: shapes of all tensors of the checkpoint.
        wanted: shapes of those that are to be read.
    """
    weights = {key for key in saved if not key.startswith(STATE)}
    prefix = f"{STATE}param."
    main = {key.removeprefix(prefix) for key in saved if key.startswith(prefix)}
    unread = {key for key in saved.keys() - wanted.keys() - weights if not _is_slot(key)}
    unfit = {key for key, shape in wanted.items() if saved.get(key) != shape}
    return sorted(unread | unfit | (weights ^ main))


def _is_slot(key: str) -> bool:
    return key.startswith(STATE + SLOT)


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


def _boxes(entry: Any, prefix: str, piece: Piece, flat: Tensor) -> Iterator[ShardedTensor]:
    """Yield a piece of a parameter, which ranks may split, as boxes of the whole tensor.

    Args:
        entry: of the parameter in the model's sharded state dict.
        prefix: begins the checkpoint key.
        piece: says where in the flat parameter the values are.
        flat: the values.
    """
    # mcore splits a fused parameter, gate and up, into one tensor of each, by rows.
    parts = [entry] if isinstance(entry, ShardedTensor) else nested_values(entry.build())
    before = 0  # elements of the parameter before the part
    for part in parts:
        width = part.data[0].numel()
        start, stop = max(piece.start, before), min(piece.stop, before + part.data.numel())
        for begin, end in _row_spans(start - before, stop - before, width):
            values = flat[before + begin - piece.start : before + end - piece.start]
            yield _box(part, prefix, divmod(begin, width), values)
        before += part.data.numel()


def _row_spans(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield a stretch of a flat matrix cut where its first whole row begins and its last one ends.

    From 3 to 38 in rows of 10 that is 3 to 10, 10 to 30 and 30 to 38; from 3 to 5, all of it.
    """
    first = min(-(-start // width) * width, stop)
    last = max(stop // width * width, first)
    bounds = (start, first, last, stop)
    yield from ((begin, end) for begin, end in itertools.pairwise(bounds) if begin < end)


def _box(part: ShardedTensor, prefix: str, corner: tuple[int, int], flat: Tensor) -> ShardedTensor:
    """Return a box of this rank's part of a tensor: some whole rows, or a part of one.

    Args:
        part: of the model's sharded state dict, of a vector or a matrix.
        prefix: begins the checkpoint key.
        corner: row and column in the part where the box begins.
        flat: its values.
    """
    axes = part.data.ndim
    rows = max(1, flat.numel() // part.data[0].numel())
    stacked = part.prepend_axis_num  # axes of layers, of which this is one
    shape = (*[1] * stacked, *(rows, flat.numel() // rows)[:axes])
    offset = [*[0] * stacked, *corner[:axes]]
    return replace(
        part,
        key=f"{prefix}{part.key}",
        data=flat.view(shape),
        dtype=flat.dtype,
        local_shape=shape,
        global_offset=tuple(a + b for a, b in zip(part.global_offset, offset, strict=True)),
        axis_fragmentations=None,  # no grid
        # The replica 0, on one rank alone, is what mcore writes.
        replica_id=(*part.replica_id[:-1], 0),
        prepend_axis_num=0,
    )
