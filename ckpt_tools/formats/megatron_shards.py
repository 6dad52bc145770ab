"""Reader of megatron checkpoints of any TP, PP and DP by the row, without megatron or a model.

The format is torch's distributed checkpoint (torch.distributed.checkpoint.filesystem) as written by
megatron-core (megatron.core.dist_checkpointing). mcore stacks the layers of a model along a new
first axis, and every rank saves boxes of the stacked tensor. For TP 2, PP 2 and 4 layers:

    decoder.layers.self_attention.linear_qkv.weight   [4 layers, 12 rows, 8 columns]

                  rows 0..5      rows 6..11        box          corner      shape
                +--------------+--------------+    PP 0, TP 0   (0, 0, 0)   (2, 6, 8)
    layers 0, 1 | PP 0, TP 0   | PP 0, TP 1   |    PP 0, TP 1   (0, 6, 0)   (2, 6, 8)
                +--------------+--------------+    PP 1, TP 0   (2, 0, 0)   (2, 6, 8)
    layers 2, 3 | PP 1, TP 0   | PP 1, TP 1   |    PP 1, TP 1   (2, 6, 0)   (2, 6, 8)
                +--------------+--------------+

linear_proj and linear_fc2 are cut along columns instead. `.metadata` gives file, offset and length
of each box. A box is a zip file of `torch.save` within a larger file, and its numbers are row after
row, layer after layer:

    __1_0.distcp
    | box | description | layer 0: rows 6..11 | layer 1: rows 6..11 | zip directory | box | ..
          ^ offset      ^ + _checkpoint_offset                                      ^ + length
                                              ^ + one layer, 6 x 8 numbers

Here every layer has tensors of its own, by the global names of `train.model.megatron_names`: the
box above becomes `Box`es of layers 0 and 1 with corner (6, 0) and shape (6, 8).
"""

import threading
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from base.errors import UserError
from ckpt_tools.formats.weights import Described, FileTensor, check_tensors
from train.model import megatron_names
from train.model.config import MOST_LAYERS, ModelConfig, parameter_shapes
from train.run.dcp_boxes import find_numbers
from train.run.dcp_metadata import read_metadata

OPTIMIZER = "optimizer.state."
FP8_SCALES = "._extra_state"  # within the keys of Transformer Engine's objects, never opened here


class Box(NamedTuple):
    """A part of a tensor: its first corner, its shape, and its place in a file of torch.save."""

    corner: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int
    layer: int  # its index among the layers of one torch.save file


class ShardedTensors:
    """Every tensor of a checkpoint, weights and optimizer state. Check its hashes first."""

    def __init__(self, checkpoint: Path) -> None:
        self.tensors: dict[str, Described] = {}
        self.boxes: dict[str, list[Box]] = defaultdict(list)
        self._files: dict[Box, FileTensor] = {}
        self._lock = threading.Lock()
        metadata = read_metadata(checkpoint)

        # Shapes of the tensors, and of the boxes that each is cut into.
        sizes: dict[tuple[str, torch.Size], torch.Size] = {}
        for key, value in metadata.state_dict_metadata.items():
            if FP8_SCALES in key:
                continue
            if not isinstance(value, TensorStorageMetadata):
                raise _damaged(checkpoint, f"'{key}' is not a tensor")
            # Before a name is made for each layer: a damaged size could ask for billions of them.
            if megatron_names.LAYERS in key and not 0 < next(iter(value.size), 0) <= MOST_LAYERS:
                raise _damaged(checkpoint, f"'{key}' stacks no layers of a model")
            self._add_tensors(key, Described(tuple(value.size), value.properties.dtype))
            sizes |= {(key, chunk.offsets): chunk.sizes for chunk in value.chunks}

        # The place of each box in the files.
        for index, storage in (metadata.storage_data or {}).items():
            # Objects such as FP8 scales are in the files as well, but are no tensors with boxes.
            if (index.fqn, index.offset) not in sizes:
                continue
            storage_bytes = checkpoint / storage.relative_path, storage.offset, storage.length
            corner = tuple(index.offset or ())
            self._add_boxes(index.fqn, corner, tuple(sizes[index.fqn, index.offset]), storage_bytes)

        # Boxes do not overlap, so a tensor is complete if they hold as many numbers as it has.
        for name, tensor in self.tensors.items():
            count = sum(torch.Size(box.shape).numel() for box in self.boxes[name])
            if count != torch.Size(tensor.shape).numel():
                raise _damaged(checkpoint, f"'{name}' is not whole")

    def _add_tensors(self, key: str, stacked: Described) -> None:
        """Note a tensor, or the tensor of each layer in a stacked one."""
        for layer in _layers(key, stacked.shape):
            shape = stacked.shape if layer is None else stacked.shape[1:]
            self.tensors[_of_layer(key, layer)] = Described(shape, stacked.dtype)

    def _add_boxes(
        self,
        key: str,
        corner: tuple[int, ...],
        shape: tuple[int, ...],
        storage_bytes: tuple[Path, int, int],
    ) -> None:
        """Note a box, or the box of each layer in a stacked one."""
        for layer in _layers(key, shape):
            if layer is None:
                self.boxes[key].append(Box(corner, shape, *storage_bytes, 0))
            else:
                # Layers count from the box's corner; within its file, from 0.
                name = _of_layer(key, corner[0] + layer)
                self.boxes[name].append(Box(corner[1:], shape[1:], *storage_bytes, layer))

    def _numbers(self, name: str, box: Box) -> FileTensor:
        """Return the numbers of a box, which torch.save wrote after a description of them."""
        # Two threads may both miss it, and then note the same numbers twice.
        if box in self._files:
            return self._files[box]
        try:
            with self._lock:
                tensor, first_byte = find_numbers(box.path, box.offset, box.length)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  a damaged zip file raises nearly anything
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            raise _damaged(box.path, reason) from None

        # A file of stacked layers has one axis more, before those of the box.
        described = Described(tuple(tensor.shape)[-len(box.shape) :], tensor.dtype)
        expected = Described(box.shape, self.tensors[name].dtype)
        if not tensor.is_contiguous() or described != expected:
            raise _damaged(box.path, f"'{name}' is not there as `.metadata` says")

        first_byte += box.layer * described.nbytes
        self._files[box] = FileTensor(described.shape, described.dtype, box.path, first_byte)
        return self._files[box]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, gathered from its boxes."""
        tensor = self.tensors[name]
        rows = torch.empty((stop - start, *tensor.shape[1:]), dtype=tensor.dtype)
        for box in self.boxes[name]:
            begin, end = max(start, box.corner[0]), min(stop, box.corner[0] + box.shape[0])
            if begin >= end:
                continue
            file, target = self._numbers(name, box), rows[begin - start : end - start]
            # Whole rows are read straight to their place, without a copy.
            if box.shape[1:] == tensor.shape[1:]:
                file.read_into(target, begin - box.corner[0])
            else:  # cut along columns: its rows are not contiguous in the tensor
                spans = zip(box.corner[1:], box.shape[1:], strict=True)
                columns = tuple(slice(first, first + width) for first, width in spans)
                target[(slice(None), *columns)] = file.read(
                    begin - box.corner[0], end - box.corner[0]
                )
        return rows


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(f"{path} is damaged ({problem}); give another checkpoint")


def _layers(key: str, shape: tuple[int, ...]) -> list[int] | list[None]:
    """Return the layers that are stacked in a key's tensor; None alone where none are."""
    return list(range(shape[0])) if megatron_names.LAYERS in key else [None]


def _of_layer(key: str, layer: int | None) -> str:
    """Return the global name of one layer's part of a stacked key."""
    if layer is None:
        return key
    return key.replace(megatron_names.LAYERS, f"{megatron_names.LAYERS}{layer}.", 1)


class MegatronWeights:
    """The weights of a megatron checkpoint, whose `.metadata` was hash-checked, by HF name.

    Raises:
        UserError: a key or a shape is not the model's, or a key is missing.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig) -> None:
        self._stored = ShardedTensors(checkpoint)
        stored_weights = {
            name: tensor
            for name, tensor in self._stored.tensors.items()
            if not name.startswith(OPTIMIZER)
        }
        names = megatron_names.megatron_names(model)
        shapes = {name: megatron_names.whole_shape(name, model) for name in names}
        check_tensors(stored_weights, shapes, checkpoint, "give another checkpoint")
        self.files = sorted({box.path.name for name in names for box in self._stored.boxes[name]})

        # The rows of each HF tensor in a fused one, such as q in linear_qkv.
        self._rows: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        described: dict[str, Described] = {}
        for name in names:
            for hf_name, spans in megatron_names.hf_rows(name, model).items():
                self._rows[hf_name] = name, spans
                count = sum(stop - start for start, stop in spans)
                shape, dtype = (count, *shapes[name][1:]), stored_weights[name].dtype
                described[hf_name] = Described(shape, dtype)
        self.tensors = {name: described[name] for name in parameter_shapes(model)}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of an HF tensor from their places in the fused one."""
        fused_name, spans = self._rows[name]
        parts, before = [], 0  # rows of the HF tensor in earlier spans
        for first, last in spans:
            # The part of [start, stop) in this span, counted from the span's first row.
            begin, end = max(start - before, 0), min(stop - before, last - first)
            if begin < end:
                parts.append(self._stored.read(fused_name, first + begin, first + end))
            before += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)
