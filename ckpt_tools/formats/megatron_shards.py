"""Reader of megatron checkpoints of any TP, PP and DP by the row, without megatron or a model.

The shards are torch's distributed checkpoint format: `.metadata` gives the place of each box of
each global tensor, and each box is a file of `torch.save` within a larger one. mcore stacks the
layers of a model along a new first axis; here every layer has tensors of its own, by the global
names of `train.model.megatron_names`.
"""

import pickle
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from base.errors import UserError
from ckpt_tools.formats.weights import Described, FileTensor
from train.model import megatron_names
from train.model.config import ModelConfig
from train.model.families import parameter_shapes

OPTIMIZER = "optimizer.state."
MAIN = f"{OPTIMIZER}param."  # begins the keys of the fp32 weights that the optimizer continues from
FP8_SCALES = "._extra_state"  # within the keys of Transformer Engine's objects, never opened here


class Box(NamedTuple):
    """A part of a tensor: its first corner, its shape, and its place in a file of torch.save."""

    corner: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int
    layer: int = 0  # which of the layers that torch.save left there together


class ShardedTensors:
    """Every tensor of a checkpoint, weights and optimizer state.

    Check its hashes first: `.metadata` is a pickle.

    Attributes:
        tensors: shape and type of each, by global name.
        boxes: the parts of each.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.tensors: dict[str, Described] = {}
        self.boxes: dict[str, list[Box]] = defaultdict(list)
        self._files: dict[Box, FileTensor] = {}
        metadata = FileSystemReader(checkpoint).read_metadata()
        shapes: dict[tuple[str, torch.Size], torch.Size] = {}
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                self._describe(key, stored)
                shapes |= {(key, chunk.offsets): chunk.sizes for chunk in stored.chunks}
            elif FP8_SCALES not in key:
                raise UserError(
                    f"'{key}' is no tensor in the shards of {checkpoint}; give another checkpoint"
                )
        for index, place in (metadata.storage_data or {}).items():
            if FP8_SCALES not in index.fqn:
                self._place(index, shapes[index.fqn, index.offset], place)
        for name, tensor in self.tensors.items():
            held = sum(torch.Size(box.shape).numel() for box in self.boxes[name])
            if held != torch.Size(tensor.shape).numel():
                raise UserError(
                    f"'{name}' is not whole in the shards of {checkpoint}; give another checkpoint"
                )

    def _describe(self, key: str, stored: TensorStorageMetadata) -> None:
        whole = Described(tuple(stored.size), stored.properties.dtype)
        if megatron_names.LAYERS not in key:
            self.tensors[key] = whole
            return
        for layer in range(whole.shape[0]):
            self.tensors[_of_layer(key, layer)] = Described(whole.shape[1:], whole.dtype)

    def _place(self, index: MetadataIndex, shape: torch.Size, place: Any) -> None:
        corner = tuple(index.offset or ())
        where = self._file_of(place.relative_path), place.offset, place.length
        if megatron_names.LAYERS not in index.fqn:
            self.boxes[index.fqn].append(Box(corner, tuple(shape), *where))
            return
        for layer in range(shape[0]):
            name = _of_layer(index.fqn, corner[0] + layer)
            self.boxes[name].append(Box(corner[1:], tuple(shape[1:]), *where, layer))

    def _file_of(self, name: str) -> Path:
        if Path(name).name != name:
            raise UserError(
                f"{self.checkpoint} names '{name}', which is no file of it; give another checkpoint"
            )
        return self.checkpoint / name

    def _opened(self, name: str, box: Box) -> FileTensor:
        """Return the numbers of a box, which torch.save wrote after a description of them."""
        if box in self._files:
            return self._files[box]
        try:
            with box.path.open("rb") as file, FakeTensorMode():  # reads the description alone
                view: Any = _create_file_view(file, box.offset, box.length)
                tensor = torch.load(view, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{box.path} is damaged ({error}); give another checkpoint") from None
        contiguous = tensor.is_contiguous() and tensor.storage_offset() == 0
        described = Described(tuple(tensor.shape)[-len(box.shape) :], tensor.dtype)
        if not contiguous or described != (box.shape, self.tensors[name].dtype):
            raise UserError(
                f"'{name}' is not in {box.path} as `.metadata` says; give another checkpoint"
            )
        before: int = tensor.untyped_storage()._checkpoint_offset
        first = box.offset + before + box.layer * described.nbytes
        self._files[box] = FileTensor(box.path, first, *described)
        return self._files[box]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, gathered from its boxes."""
        shape, dtype = self.tensors[name]
        rows = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        for box in self.boxes[name]:
            begin, end = max(start, box.corner[0]), min(stop, box.corner[0] + box.shape[0])
            if begin >= end:
                continue
            file, target = self._opened(name, box), rows[begin - start : end - start]
            if box.shape[1:] == shape[1:]:
                file.read_into(target, begin - box.corner[0])
            else:
                spans = zip(box.corner[1:], box.shape[1:], strict=True)
                columns = tuple(slice(left, left + width) for left, width in spans)
                target[(slice(None), *columns)] = file.read(
                    begin - box.corner[0], end - box.corner[0]
                )
        return rows


def _of_layer(key: str, layer: int) -> str:
    """Return the global name of one layer's part of a stacked key."""
    return key.replace(megatron_names.LAYERS, f"{megatron_names.LAYERS}{layer}.", 1)


class MegatronWeights:
    """The weights of a hash-checked megatron checkpoint by HF name.

    Args:
        checkpoint: its directory.
        model: whose keys it must hold, no more and no less.
        main: the fp32 weights of the optimizer instead of those that the model computed with.

    Raises:
        UserError: a key or a shape is not the model's, a key is missing, or there are no main
            weights.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig, *, main: bool = False) -> None:
        self._stored = ShardedTensors(checkpoint)
        names = megatron_names.megatron_names(model.num_hidden_layers)
        prefix = MAIN if main else ""
        if main and not any(name.startswith(MAIN) for name in self._stored.tensors):
            raise UserError(
                f"{checkpoint} holds no fp32 main weights; export it without --weights main"
            )
        self._check_keys({prefix + name for name in names}, prefix)
        self._rows: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        described: dict[str, Described] = {}
        for name in names:
            whole = self._stored.tensors[prefix + name]
            shape = megatron_names.whole_shape(name, model)
            if whole.shape != shape:
                self._refuse(f"'{prefix}{name}' is {whole.shape}, the model needs {shape}")
            for hf_name, spans in megatron_names.hf_rows(name, model).items():
                self._rows[hf_name] = prefix + name, spans
                count = sum(stop - start for start, stop in spans)
                described[hf_name] = Described((count, *whole.shape[1:]), whole.dtype)
        self._tensors = {name: described[name] for name in parameter_shapes(model)}

    def _check_keys(self, wanted: set[str], prefix: str) -> None:
        """Raise UserError for a key that is missing, or unknown beside the optimizer's state."""
        for key in sorted(self._stored.tensors.keys() ^ wanted):
            if key in wanted:
                self._refuse(f"key '{key}' is missing from the shards")
            if not prefix and not key.startswith(OPTIMIZER):
                self._refuse(f"unknown key '{key}' in the shards")

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(
            f"{problem}: {self._stored.checkpoint} is no checkpoint of the model in its"
            " checkpoint.json; give another"
        )

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Shape and type of every HF tensor, in the order of the model."""
        return self._tensors

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
