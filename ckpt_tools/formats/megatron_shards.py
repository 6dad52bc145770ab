"""Reader of megatron checkpoints of any TP, PP and DP by the row, without megatron or a model.

The shards are torch's distributed checkpoint format: `.metadata` gives the place of each box of
each global tensor, and each box is a file of `torch.save` within a larger one. mcore stacks the
layers of a model along a new first axis; here every layer has tensors of its own, by the global
names of `train.model.megatron_names`.

How a row is found, for linear_qkv of 4 layers at TP 2 and PP 2:

    global tensor [layer, row, column]      one box, as its ranks saved it
      layer 0 | tp0 | tp1 |                   __0_0.distcp
      layer 1 | tp0 | tp1 |  <- pp 0          +------ offset ------------------------+
      layer 2 | tp0 | tp1 |                   | torch.save: description, numbers ... |
      layer 3 | tp0 | tp1 |  <- pp 1          +--------------------------------------+
                                                            ^ _checkpoint_offset
    box of (pp 0, tp 1): corner (0, R/2, 0), shape (2, R/2, C). Here it becomes a box of layer 0,
    corner (R/2, 0), and one of layer 1, whose numbers begin R/2 x C entries further on.

Source: torch/distributed/checkpoint/filesystem.py (the view of a file), and
megatron/core/dist_checkpointing/mapping.py (corners, the prepended axis of layers).
"""

import pickle
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from base.errors import UserError
from ckpt_tools.formats.dcp_metadata import read_metadata
from ckpt_tools.formats.weights import Described, FileTensor, check_tensors
from train.model import megatron_names
from train.model.config import ModelConfig
from train.model.families import parameter_shapes

OPTIMIZER = "optimizer.state."
FP8_SCALES = "._extra_state"  # within the keys of Transformer Engine's objects, never opened here


class Box(NamedTuple):
    """A part of a tensor: its first corner, its shape, and its place in a file of torch.save."""

    corner: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int
    layer: int  # which of the layers that torch.save left there together


class ShardedTensors:
    """Every tensor of a checkpoint, weights and optimizer state.

    Check its hashes first.

    Attributes:
        tensors: shape and type of each, by global name.
        boxes: the parts of each.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.tensors: dict[str, Described] = {}
        self.boxes: dict[str, list[Box]] = defaultdict(list)
        self._files: dict[Box, FileTensor] = {}
        self._lock = threading.Lock()
        metadata = read_metadata(checkpoint)
        stored = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if FP8_SCALES not in key
        }
        sizes: dict[tuple[str, torch.Size], torch.Size] = {}
        for key, value in stored.items():
            if not isinstance(value, TensorStorageMetadata):
                raise _damaged(checkpoint, f"'{key}' is no tensor")
            whole = Described(tuple(value.size), value.properties.dtype)
            for layer in _layers(key, whole.shape):
                shape = whole.shape if layer is None else whole.shape[1:]
                self.tensors[_of_layer(key, layer)] = Described(shape, whole.dtype)
            sizes |= {(key, chunk.offsets): chunk.sizes for chunk in value.chunks}
        for index, place in (metadata.storage_data or {}).items():
            if index.fqn not in stored:
                continue
            if Path(place.relative_path).name != place.relative_path:
                raise _damaged(checkpoint, f"'{place.relative_path}' is no file of it")
            where = checkpoint / place.relative_path, place.offset, place.length
            corner = tuple(index.offset or ())
            self._place(index.fqn, corner, tuple(sizes[index.fqn, index.offset]), where)
        for name, tensor in self.tensors.items():
            entries = sum(torch.Size(box.shape).numel() for box in self.boxes[name])
            if entries != torch.Size(tensor.shape).numel():
                raise _damaged(checkpoint, f"'{name}' is not whole")

    def _place(
        self,
        key: str,
        corner: tuple[int, ...],
        shape: tuple[int, ...],
        where: tuple[Path, int, int],
    ) -> None:
        """Note a box, or its part of every layer."""
        for layer in _layers(key, shape):
            if layer is None:
                self.boxes[key].append(Box(corner, shape, *where, 0))
            else:
                name = _of_layer(key, corner[0] + layer)
                self.boxes[name].append(Box(corner[1:], shape[1:], *where, layer))

    def _opened(self, name: str, box: Box) -> FileTensor:
        """Return the numbers of a box, which torch.save wrote after a description of them."""
        if box in self._files:
            return self._files[box]
        try:
            # Reads the description alone, in one thread at a time.
            with self._lock, box.path.open("rb") as file, FakeTensorMode():
                view: Any = _create_file_view(file, box.offset, box.length)
                tensor = torch.load(view, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise _damaged(box.path, str(error)) from None
        contiguous = tensor.is_contiguous() and tensor.storage_offset() == 0
        stored = Described(tuple(tensor.shape)[-len(box.shape) :], tensor.dtype)
        if not contiguous or stored != Described(box.shape, self.tensors[name].dtype):
            raise _damaged(box.path, f"'{name}' is not there as `.metadata` says")
        before: int = tensor.untyped_storage()._checkpoint_offset
        first = box.offset + before + box.layer * stored.nbytes
        self._files[box] = FileTensor(stored.shape, stored.dtype, box.path, first)
        return self._files[box]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, gathered from its boxes."""
        tensor = self.tensors[name]
        rows = torch.empty((stop - start, *tensor.shape[1:]), dtype=tensor.dtype)
        for box in self.boxes[name]:
            begin, end = max(start, box.corner[0]), min(stop, box.corner[0] + box.shape[0])
            if begin >= end:
                continue
            file, target = self._opened(name, box), rows[begin - start : end - start]
            if box.shape[1:] == tensor.shape[1:]:
                file.read_into(target, begin - box.corner[0])
            else:
                spans = zip(box.corner[1:], box.shape[1:], strict=True)
                columns = tuple(slice(left, left + width) for left, width in spans)
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

    Args:
        checkpoint: its directory.
        model: whose keys it must hold, no more and no less.

    Attributes:
        tensors: shape and type of every HF tensor, in the order of the model.
        files: names of those that hold them.

    Raises:
        UserError: a key or a shape is not the model's, or a key is missing.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig) -> None:
        self._stored = ShardedTensors(checkpoint)
        stored = {
            name: tensor
            for name, tensor in self._stored.tensors.items()
            if not name.startswith(OPTIMIZER)
        }
        names = megatron_names.megatron_names(model.num_hidden_layers)
        wanted = {name: megatron_names.whole_shape(name, model) for name in names}
        check_tensors(stored, wanted, checkpoint, "give another checkpoint")
        self.files = sorted({box.path.name for name in names for box in self._stored.boxes[name]})
        self._rows: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        described: dict[str, Described] = {}
        for name in names:
            for hf_name, spans in megatron_names.hf_rows(name, model).items():
                self._rows[hf_name] = name, spans
                count = sum(stop - start for start, stop in spans)
                described[hf_name] = Described((count, *wanted[name][1:]), stored[name].dtype)
        self.tensors = {name: described[name] for name in parameter_shapes(model)}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of an HF tensor from their places in the fused one."""
        whole, spans = self._rows[name]
        parts, before = [], 0
        for first, last in spans:
            begin, end = max(start - before, 0), min(stop - before, last - first)
            if begin < end:
                parts.append(self._stored.read(whole, first + begin, first + end))
            before += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)
