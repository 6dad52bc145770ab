"""Writer of safetensors shards with an index, some rows at a time, hashed on their way to disk."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from base.files import FileRecord, record_file, write_json
from base.progress import Progress
from ckpt_tools.formats.hf_weights import HEADER_DTYPES, INDEX_JSON
from ckpt_tools.formats.parallel import each
from ckpt_tools.formats.weights import Described, Weights, bytes_of
from train.run.directory import MODEL_WEIGHTS

SHARD_BYTES = 1 << 30  # written by one process; a larger tensor is a shard of its own
CHUNK_BYTES = 4 << 20  # in memory at once; larger pieces leave the caches, mapped anew each time


@dataclass(frozen=True)
class Shard:
    """A safetensors file to write: its name, its tensors in their order, and its metadata."""

    name: str
    tensors: dict[str, Described]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def header(self) -> bytes:
        """Return the beginning of the file: the header's length, then the header, in 8 bytes."""
        entries: dict[str, object] = {"__metadata__": self.metadata}
        offset = 0
        for name, tensor in self.tensors.items():
            span = [offset, offset + tensor.nbytes]
            entries[name] = {
                "dtype": HEADER_DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": span,
            }
            offset += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def divide(tensors: dict[str, Described], shard_bytes: int) -> list[Shard]:
    """Cut tensors in order into shards of at most `shard_bytes`; depends on nothing else."""
    groups: list[dict[str, Described]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.nbytes
    if len(groups) == 1:
        return [Shard(MODEL_WEIGHTS, groups[0])]
    count = len(groups)
    return [
        Shard(f"model-{number:05d}-of-{count:05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def write_weights(
    directory: Path,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    processes: int = 1,
    shard_bytes: int = SHARD_BYTES,
    label: str | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> dict[str, FileRecord]:
    """Write all weights as `model.safetensors`, or as shards with their index.

    The bytes do not depend on the number of processes; each holds `CHUNK_BYTES` of a tensor at a
    time.

    Args:
        directory: an empty one.
        weights: what to write, in its order.
        dtype: that every tensor is converted to; None: as it is.
        processes: at once.
        shard_bytes: of one file at most.
        label: of a progress bar over the files; None: there is none.
        meanwhile: called in this process once the others are at work.

    Returns:
        Size and SHA-256 of every file.
    """
    described = {
        name: Described(tensor.shape, dtype or tensor.dtype)
        for name, tensor in weights.tensors.items()
    }
    return write_files(
        directory,
        divide(described, shard_bytes),
        weights,
        processes=processes,
        label=label,
        meanwhile=meanwhile,
    )


def write_files(
    directory: Path,
    shards: list[Shard],
    weights: Weights,
    *,
    processes: int = 1,
    label: str | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> dict[str, FileRecord]:
    """Write the given shards, and their index unless all is in `model.safetensors`."""
    files: dict[str, FileRecord] = {}
    largest_first = sorted(shards, key=lambda shard: -shard.nbytes)
    with Progress(label, total=len(shards)) if label else nullcontext() as progress:
        written = each(
            lambda shard: write_shard(directory, shard, weights),
            largest_first,
            processes,
            meanwhile,
        )
        for index, record in written:
            files[largest_first[index].name] = record
            if progress:
                progress.advance()
    if [shard.name for shard in shards] != [MODEL_WEIGHTS]:
        total = {"total_size": sum(shard.nbytes for shard in shards)}
        places = {name: shard.name for shard in shards for name in shard.tensors}
        write_json(
            directory / INDEX_JSON, {"metadata": total, "weight_map": dict(sorted(places.items()))}
        )
        files[INDEX_JSON] = record_file(directory / INDEX_JSON)
    return files


def write_shard(directory: Path, shard: Shard, weights: Weights) -> FileRecord:
    """Write one file and return its size and SHA-256.

    It is not synced to disk: it can be made again, and whoever reads it compares its hash.
    """
    digest, header = hashlib.sha256(), shard.header()
    with (directory / shard.name).open("wb", buffering=0) as file:
        file.write(header)
        digest.update(header)
        for name, tensor in shard.tensors.items():
            rows = tensor.shape[0] if tensor.shape else 1
            step = max(1, CHUNK_BYTES // max(tensor.row_bytes, 1))
            for start in range(0, rows, step):
                chunk = weights.read(name, start, min(start + step, rows)).to(tensor.dtype)
                payload = bytes_of(chunk.contiguous())
                digest.update(payload)
                while payload:
                    payload = payload[file.write(payload) :]
    return FileRecord(bytes=len(header) + shard.nbytes, sha256=digest.hexdigest())
