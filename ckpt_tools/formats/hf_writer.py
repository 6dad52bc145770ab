"""Writer of safetensors shards with an index, some rows at a time, hashed on their way to disk."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from base.digests import new_hasher
from base.files import FileRecord, record_file, write_json
from ckpt_tools.formats.hf_weights import HEADER_DTYPES
from ckpt_tools.formats.parallel import ahead, default_threads, each
from ckpt_tools.formats.weights import Described, Weights, bytes_of
from train.run.directory import MODEL_INDEX, MODEL_WEIGHTS

SHARD_BYTES = 1 << 30  # written by one process; a larger tensor is a shard of its own
CHUNK_BYTES = 1 << 20  # of a tensor at once: read, summed, hashed and written in the cache


@dataclass(frozen=True)
class Shard:
    """A safetensors file to write: its name, and its tensors in their order."""

    name: str
    tensors: Mapping[str, Described]

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """Yield name and rows [start, stop) of `CHUNK_BYTES` after `CHUNK_BYTES`."""
        for name, tensor in self.tensors.items():
            rows = tensor.shape[0] if tensor.shape else 1
            step = max(1, CHUNK_BYTES // max(tensor.row_bytes, 1))
            for start in range(0, rows, step):
                yield name, start, min(start + step, rows)

    def header(self) -> bytes:
        """Return the beginning of the file: the header's length, then the header, in 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
        # Blanks at the end let the numbers begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def write_weights(
    directory: Path, weights: Weights, *, shard_bytes: int = SHARD_BYTES
) -> dict[str, FileRecord]:
    """Write all weights as `model.safetensors`, or as shards with their index.

    The bytes do not depend on the number of threads. Threads write a shard each; the others read
    ahead of them, up to two pieces each of `CHUNK_BYTES` of a tensor.
    """
    shards = {shard.name: shard for shard in _divide(weights.tensors, shard_bytes)}
    # A long shard that begins last would keep one thread busy after all others.
    largest_first = sorted(shards, key=lambda name: -shards[name].nbytes)
    # Where shards are fewer than cores, the other cores read ahead of the writers.
    readers = max(1, default_threads() // len(shards))
    files = each(lambda name: write_shard(directory, shards[name], weights, readers), largest_first)
    if list(shards) != [MODEL_WEIGHTS]:
        total = {"total_size": sum(shard.nbytes for shard in shards.values())}
        places = {name: shard.name for shard in shards.values() for name in shard.tensors}
        write_json(
            directory / MODEL_INDEX, {"metadata": total, "weight_map": dict(sorted(places.items()))}
        )
        files[MODEL_INDEX] = record_file(directory / MODEL_INDEX)
    return files


def _divide(tensors: Mapping[str, Described], shard_bytes: int) -> list[Shard]:
    """Cut tensors, in their order, into shards of at most `shard_bytes`."""
    groups: list[dict[str, Described]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.nbytes
    count = len(groups)
    if count == 1:
        return [Shard(MODEL_WEIGHTS, groups[0])]
    return [
        Shard(f"model-{number:05d}-of-{count:05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def write_shard(directory: Path, shard: Shard, weights: Weights, readers: int) -> FileRecord:
    """Write one file, hashed on the way, while threads read; return its size and hash.

    It is not synced to disk: it can be written again, and readers compare its hash.
    """
    hasher, header = new_hasher(), shard.header()
    with (directory / shard.name).open("wb", buffering=0) as file:
        file.write(header)
        hasher.update(header)
        for payload in ahead(
            lambda piece: _payload(weights, shard, piece), shard.pieces(), readers
        ):
            hasher.update(payload)
            # An unbuffered write may take less than it is given.
            while payload:
                payload = payload[file.write(payload) :]
    return FileRecord(bytes=len(header) + shard.nbytes, digest=f"blake3:{hasher.hexdigest()}")


def _payload(weights: Weights, shard: Shard, piece: tuple[str, int, int]) -> memoryview:
    """Return the bytes of some rows, in the type of the file."""
    rows = weights.read(*piece).to(shard.tensors[piece[0]].dtype)
    return bytes_of(rows.contiguous())
