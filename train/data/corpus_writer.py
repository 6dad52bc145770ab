"""The writer of Megatron's .bin/.idx and the manifest; nothing is held that grows with the text."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from base.errors import UserError
from base.files import FileRecord, fsync_path, record_files, write_json
from train.data.corpus import DTYPE_CODES, INDEX_HEADER, INDEX_MAGIC
from train.data.manifest import Manifest

COPY_BYTES = 1 << 22
INDEX_CHUNK_DOCUMENTS = 1 << 20


class Piece(NamedTuple):
    """A token file and the lengths of its documents."""

    path: Path
    sha256: str
    lengths_D: np.ndarray


def write_index(path: Path, lengths_D: np.ndarray, dtype: np.dtype) -> None:
    """Write PREFIX.idx for documents of these lengths, one sequence each."""
    documents = len(lengths_D)
    chunks = [
        slice(at, at + INDEX_CHUNK_DOCUMENTS) for at in range(0, documents, INDEX_CHUNK_DOCUMENTS)
    ]
    with path.open("wb") as file:
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[dtype], documents, documents + 1))
        for chunk in chunks:
            file.write(lengths_D[chunk].astype(np.int32).tobytes())
        offset = 0
        for chunk in chunks:
            ends = np.cumsum(lengths_D[chunk], dtype=np.int64)
            file.write(
                (offset + np.concatenate([[0], ends[:-1]]) * dtype.itemsize)
                .astype(np.int64)
                .tobytes()
            )
            offset += int(ends[-1]) * dtype.itemsize
        for start in range(0, documents + 1, INDEX_CHUNK_DOCUMENTS):
            file.write(
                np.arange(
                    start, min(start + INDEX_CHUNK_DOCUMENTS, documents + 1), dtype=np.int64
                ).tobytes()
            )


def join_pieces(
    pieces: Iterable[Piece], directory: Path, dtype: np.dtype[Any]
) -> dict[str, FileRecord]:
    """Write the pieces one after the other as `bin` and `idx`; UserError for a changed piece."""
    with (directory / "bin").open("wb") as joined, (directory / "lengths").open("wb") as lengths:
        for piece in pieces:
            digest = hashlib.sha256()
            with piece.path.open("rb") as file:
                while content := file.read(COPY_BYTES):
                    digest.update(content)
                    joined.write(content)
            if digest.hexdigest() != piece.sha256:
                raise UserError(
                    f"{piece.path} was changed after it was written; delete it and prepare again"
                )
            for at in range(0, len(piece.lengths_D), COPY_BYTES):
                lengths.write(piece.lengths_D[at : at + COPY_BYTES].astype(np.int32).tobytes())
    write_index(
        directory / "idx",
        np.memmap(directory / "lengths", np.int32, mode="r").view(np.ndarray),
        dtype,
    )
    (directory / "lengths").unlink()
    return record_files(directory)


def commit_corpus(prefix: Path, directory: Path, manifest: Manifest) -> None:
    """Move `bin` and `idx` to PREFIX and write the manifest, last."""
    Path(f"{prefix}.json").unlink(missing_ok=True)  # an old manifest must not vouch for new tokens
    for suffix in ("bin", "idx"):
        os.replace(directory / suffix, f"{prefix}.{suffix}")
    fsync_path(prefix.parent)
    write_json(Path(f"{prefix}.json"), manifest.model_dump(mode="json"))
