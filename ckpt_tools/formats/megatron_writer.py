"""Writing a megatron checkpoint as the engine would at a given layout, without megatron, a model or a process group.

The files are the engine's own, byte for byte; which rank writes what is said in `ckpt_tools.formats.megatron_boxes`.
"""

import hashlib
import io
import json
import os
import pickle
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_tools.formats.hf_writer import CHUNK_BYTES
from ckpt_tools.formats.megatron_boxes import IN_LAYER, Box, boxes_of_ranks, object_layer, object_rank
from ckpt_tools.formats.megatron_shards import FP8_SCALES, METADATA
from ckpt_tools.formats.parallel import each
from ckpt_tools.formats.weights import Weights
from train import layout
from train.command import Progress
from train.run_directory import FileRecord, record_file
from train.settings import ModelConfig, ParallelConfig

SHARDS = "__{rank}_0.distcp"
COMMON, FORMAT_JSON = "common.pt", "metadata.json"
FORMAT = {
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}


class _Place(NamedTuple):
    """Where a box or an object lies in a rank's file."""

    of: MetadataIndex
    offset: int
    length: int


class _Written(NamedTuple):
    """The file of one rank, and where everything lies in it."""

    record: FileRecord
    places: list[_Place]


def empty_objects(model: ModelConfig) -> dict[str, bytes]:
    """What mcore's linears save for Transformer Engine's sake, by key: nothing."""
    content = io.BytesIO()
    torch.save([None], content)
    linears = [name.removesuffix(".weight") for name in IN_LAYER if ".linear_" in name and ".post_norm" not in name]
    layers = model.num_hidden_layers
    return {
        f"{layout.LAYERS}{linear}{FP8_SCALES}/shard_{layer}_{layers}": content.getvalue()
        for layer in range(layers)
        for linear in linears
    }


def write_shards(
    directory: Path,
    source: Weights,
    model: ModelConfig,
    parallel: ParallelConfig,
    data: int,
    *,
    common: dict[str, Any],
    objects: Mapping[str, bytes],
    processes: int,
    label: str | None = None,
) -> dict[str, FileRecord]:
    """Writes every tensor of `source` as the engine would at a layout; each process holds one box at a time.

    Args:
        directory: an empty one.
        source: tensors by global megatron name, layers apart: the weights, and what the optimizer keeps, if it does.
        model: their architecture, which the layout divides.
        parallel: tensor, pipeline and virtual_pipeline of the layout.
        data: data-parallel size of the layout.
        common: what all ranks share, "steps" where there is optimizer state.
        objects: Transformer Engine's pickles by key.
        processes: at once; the files do not depend on it.
        label: of a progress bar over the files; None: there is none.

    Returns:
        Size and SHA-256 of every file, synced to disk. A rank that has nothing to write has no file.
    """
    boxes = boxes_of_ranks(list(source.tensors), model, parallel, data)
    objects_of: list[dict[str, bytes]] = [{} for _ in boxes]
    for key in sorted(objects, key=object_layer):
        objects_of[object_rank(key, model, parallel, data)][key] = objects[key]
    ranks = [rank for rank in range(len(boxes)) if boxes[rank] or objects_of[rank]]
    names = [SHARDS.format(rank=rank) for rank in ranks]

    def write(rank: int) -> _Written:
        return _write_file(directory / SHARDS.format(rank=rank), boxes[rank], objects_of[rank], source)

    written: dict[str, _Written] = {}
    with Progress(label, total=len(ranks)) if label else nullcontext() as progress:
        for index, file_written in each(write, ranks, processes):
            written[names[index]] = file_written
            if progress:
                progress.advance()
    places = {name: written[name].places for name in names}
    metadata = _metadata(source, model, [box for rank in ranks for box in boxes[rank]], places)
    with (directory / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
    torch.save(common, directory / COMMON)
    (directory / FORMAT_JSON).write_text(json.dumps(FORMAT))
    files = {name: rank_file.record for name, rank_file in written.items()}
    return files | {name: record_file(directory / name) for name in (METADATA, COMMON, FORMAT_JSON)}


class _HashedFile(io.BufferedWriter):
    """A new file that is hashed as it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.digest = hashlib.sha256()

    def write(self, content: Any) -> int:
        """Writes bytes."""
        self.digest.update(content)
        return super().write(content)


def _write_file(path: Path, boxes: list[Box], objects: dict[str, bytes], source: Weights) -> _Written:
    places = []
    with _HashedFile(path) as file:
        for key, content in objects.items():
            places.append(_Place(MetadataIndex(key), file.tell(), file.write(content)))
        for box in boxes:
            offset = file.tell()
            torch.save(_read(box, source), file)
            places.append(_Place(box.stored, offset, file.tell() - offset))
        file.flush()
        os.fsync(file.fileno())
        return _Written(FileRecord(bytes=file.tell(), sha256=file.digest.hexdigest()), places)


def _read(box: Box, source: Weights) -> Tensor:
    """The numbers of a box, some rows at a time, in the shape in which it is stored."""
    described = source.tensors[box.name]
    tensor = torch.empty(box.shape, dtype=described.dtype)
    columns = tuple(slice(left, left + width) for left, width in zip(box.corner[1:], box.shape[1:], strict=True))
    step = max(1, CHUNK_BYTES // described.row_bytes)
    for start in range(0, box.shape[0], step):
        stop = min(start + step, box.shape[0])
        rows = source.read(box.name, box.corner[0] + start, box.corner[0] + stop)
        tensor[start:stop] = rows[(slice(None), *columns)]
    return tensor.view((1,) * (len(box.stored.offset or ()) - len(box.shape)) + box.shape)


def _metadata(source: Weights, model: ModelConfig, boxes: list[Box], places: dict[str, list[_Place]]) -> Metadata:
    """What `.metadata` says: every box of every tensor, and where it lies."""
    described: dict[str, Any] = {}
    for box in boxes:
        index, tensor = box.stored, source.tensors[box.name]
        assert index.offset is not None
        layers = (model.num_hidden_layers,) if layout.LAYERS in index.fqn else ()
        size, extent = torch.Size((*layers, *tensor.shape)), torch.Size((*(1 for _ in layers), *box.shape))
        if index.fqn not in described:
            described[index.fqn] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [])
        described[index.fqn].chunks.append(ChunkStorageMetadata(index.offset, extent))
    stored = {}
    for name, written in places.items():
        for index, offset, length in written:
            stored[index] = _StorageInfo(name, offset, length)
            if index.offset is None:
                described[index.fqn] = BytesStorageMetadata()
    return Metadata(described, storage_data=stored, storage_meta=StorageMeta())
