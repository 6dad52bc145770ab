"""Reading a megatron checkpoint of any TP, PP and DP by the row, without megatron, a model or a process group.

The shards are torch's distributed checkpoint format: `.metadata` says which box of which global tensor lies where, and
each box is a file of `torch.save` within a larger one. mcore stacks the layers of a model along a new first axis; here
every layer has tensors of its own, by the global names of `train.layout`.
"""

import pickle
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from ckpt_tools.formats.weights import Described, FileTensor
from train import layout
from train.command import UserError
from train.families import parameter_shapes
from train.settings import ModelConfig

METADATA = ".metadata"  # a pickle
OPTIMIZER = "optimizer.state."
MAIN = "param"  # the fp32 weights that the optimizer goes on from
MOMENTS = ("exp_avg", "exp_avg_sq")
SLOT = "slot."  # begins the name of a copy of the weights that an average is made from
FP8_SCALES = "._extra_state"  # within the keys of Transformer Engine's, which hold nothing here


class Box(NamedTuple):
    """A part of a tensor: its first corner, its shape, and where torch.save left it."""

    corner: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int
    layer: int = 0  # which of the layers that torch.save left there together


class ShardedTensors:
    """Every tensor of a checkpoint, weights and optimizer state. Hash-check it first: `.metadata` is a pickle.

    Attributes:
        tensors: what there is, by global name.
        boxes: what each is made of.
        objects: pickles of Transformer Engine by key, as (file, offset, length); they are never opened here.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.tensors: dict[str, Described] = {}
        self.boxes: dict[str, list[Box]] = defaultdict(list)
        self.objects: dict[str, tuple[Path, int, int]] = {}
        self._files: dict[Box, FileTensor] = {}
        metadata = FileSystemReader(checkpoint).read_metadata()
        shapes: dict[tuple[str, torch.Size], torch.Size] = {}
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                self._describe(key, stored)
                shapes |= {(key, chunk.offsets): chunk.sizes for chunk in stored.chunks}
            elif FP8_SCALES not in key:
                raise UserError(f"'{key}' is no tensor in the shards of {checkpoint}; give another checkpoint")
        for index, place in (metadata.storage_data or {}).items():
            if FP8_SCALES in index.fqn:
                self.objects[index.fqn] = self._file_of(place.relative_path), place.offset, place.length
            else:
                self._place(index, shapes[index.fqn, index.offset], place)
        for name, tensor in self.tensors.items():
            held = sum(torch.Size(box.shape).numel() for box in self.boxes[name])
            if held != torch.Size(tensor.shape).numel():
                raise UserError(f"'{name}' is not whole in the shards of {checkpoint}; give another checkpoint")

    def _describe(self, key: str, stored: TensorStorageMetadata) -> None:
        whole = Described(tuple(stored.size), stored.properties.dtype)
        if layout.LAYERS not in key:
            self.tensors[key] = whole
            return
        for layer in range(whole.shape[0]):
            self.tensors[_of_layer(key, layer)] = Described(whole.shape[1:], whole.dtype)

    def _place(self, index: MetadataIndex, shape: torch.Size, place: Any) -> None:
        corner, where = tuple(index.offset or ()), (self._file_of(place.relative_path), place.offset, place.length)
        if layout.LAYERS not in index.fqn:
            self.boxes[index.fqn].append(Box(corner, tuple(shape), *where))
            return
        for layer in range(shape[0]):
            name = _of_layer(index.fqn, corner[0] + layer)
            self.boxes[name].append(Box(corner[1:], tuple(shape[1:]), *where, layer))

    def _file_of(self, name: str) -> Path:
        if Path(name).name != name:
            raise UserError(f"{self.checkpoint} names '{name}', which is no file of it; give another checkpoint")
        return self.checkpoint / name

    def _opened(self, name: str, box: Box) -> FileTensor:
        """Where the numbers of a box begin: torch.save put them behind a description."""
        if box not in self._files:
            try:
                with box.path.open("rb") as file, FakeTensorMode():  # reads the description alone
                    tensor = torch.load(_create_file_view(file, box.offset, box.length), weights_only=True)  # type: ignore[arg-type]
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise UserError(f"{box.path} is damaged ({error}); give another checkpoint") from None
            contiguous = tensor.is_contiguous() and tensor.storage_offset() == 0
            described = Described(tuple(tensor.shape)[-len(box.shape) :], tensor.dtype)
            if not contiguous or described != (box.shape, self.tensors[name].dtype):
                raise UserError(f"'{name}' lies otherwise in {box.path} than `.metadata` says; give another checkpoint")
            first = box.offset + tensor.untyped_storage()._checkpoint_offset + box.layer * described.nbytes
            self._files[box] = FileTensor(box.path, first, *described)
        return self._files[box]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, gathered from its boxes."""
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
                target[(slice(None), *columns)] = file.read(begin - box.corner[0], end - box.corner[0])
        return rows


def _of_layer(key: str, layer: int) -> str:
    """The global name of one layer's part of a stacked key."""
    return key.replace(layout.LAYERS, f"{layout.LAYERS}{layer}.", 1)


def optimizer_part(name: str, weights: Mapping[str, object]) -> tuple[str, str] | None:
    """'exp_avg' and the weight's name, for a tensor of the optimizer; None for any other name."""
    if name.startswith(OPTIMIZER):
        rest = name.removeprefix(OPTIMIZER)
        for part in (MAIN, *MOMENTS):
            if rest.removeprefix(f"{part}.") in weights and rest.startswith(f"{part}."):
                return part, rest.removeprefix(f"{part}.")
        for marker in (layout.LAYERS, *layout.OUTSIDE_LAYERS):
            part, found, _ = rest.partition(f".{marker}")
            if found and part.startswith(SLOT) and rest.removeprefix(f"{part}.") in weights:
                return part, rest.removeprefix(f"{part}.")
    return None


def check_names(stored: ShardedTensors, model: ModelConfig) -> None:
    """UserError unless the names and shapes are those of this model and of the optimizer's state, whole or none.

    A checkpoint of an average holds no state of an optimizer.
    """
    next_action = f"{stored.checkpoint} is no checkpoint of the model in its checkpoint.json; give another"
    shapes = {name: layout.whole_shape(name, model) for name in layout.megatron_names(model.num_hidden_layers)}
    parts: dict[str, set[str]] = defaultdict(set)
    for name, tensor in stored.tensors.items():
        part, weight = optimizer_part(name, shapes) or ("", name)
        if weight not in shapes:
            raise UserError(f"unknown key '{name}' in the shards: {next_action}")
        if tensor.shape != shapes[weight]:
            raise UserError(
                f"'{name}' is {tensor.shape} in the shards, the model needs {shapes[weight]}: {next_action}"
            )
        parts[part].add(weight)
    wanted = {"", *parts, *((MAIN, *MOMENTS) if len(parts) > 1 else ())}
    for part in sorted(wanted):
        missing = sorted(shapes.keys() - parts[part])
        if missing:
            key = f"{OPTIMIZER}{part}.{missing[0]}" if part else missing[0]
            raise UserError(f"key '{key}' is missing from the shards: {next_action}")


class MegatronWeights:
    """The weights of a hash-checked megatron checkpoint by HF name.

    Args:
        checkpoint: its directory.
        model: whose keys it must hold, no more and no less.
        main: the fp32 weights of the optimizer instead of those that the model computed with.

    Raises:
        UserError: a key or a shape is not the model's, a key is missing, or there are no main weights.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig, *, main: bool = False) -> None:
        self._stored = ShardedTensors(checkpoint)
        check_names(self._stored, model)
        prefix = f"{OPTIMIZER}{MAIN}." if main else ""
        self._rows: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        described: dict[str, Described] = {}
        for name in layout.megatron_names(model.num_hidden_layers):
            if prefix + name not in self._stored.tensors:
                raise UserError(f"{checkpoint} holds no fp32 main weights; export it without --weights main")
            whole = self._stored.tensors[prefix + name]
            for hf_name, spans in layout.hf_rows(name, model).items():
                self._rows[hf_name] = prefix + name, spans
                count = sum(stop - start for start, stop in spans)
                described[hf_name] = Described((count, *whole.shape[1:]), whole.dtype)
        self._tensors = {name: described[name] for name in parameter_shapes(model)}

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every HF tensor, in the order of the model."""
        return self._tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of an HF tensor, from wherever they lie in the fused one."""
        whole, spans = self._rows[name]
        parts, before = [], 0
        for first, last in spans:
            begin, end = max(start - before, 0), min(stop - before, last - first)
            if begin < end:
                parts.append(self._stored.read(whole, first + begin, first + end))
            before += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)
