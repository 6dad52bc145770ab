"""The writer of Megatron's .bin/.idx and the manifest; nothing is held that grows with the text."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from base.files import FileRecord, fsync_path, record_files, write_sealed
from train.data.corpus import DTYPE_CODES, INDEX_HEADER, INDEX_MAGIC
from train.data.manifest import Manifest

CHUNK_DOCUMENTS = 1 << 20


def join_pieces(
    pieces: Sequence[tuple[Path, np.ndarray]], directory: Path, dtype: np.dtype[Any]
) -> dict[str, FileRecord]:
    """Write token files, each with the lengths of its documents, end to end as `bin` and `idx`."""
    with (directory / "bin").open("wb") as joined:
        for path, _ in pieces:
            with path.open("rb") as file:
                shutil.copyfileobj(file, joined)
    _write_index(directory / "idx", [lengths_D for _, lengths_D in pieces], dtype)
    return record_files(directory, "sha256")  # the identity of the tokens


def _write_index(path: Path, lengths: list[np.ndarray], dtype: np.dtype[Any]) -> None:
    """Write the index of documents of these lengths, one sequence each."""

    def chunks() -> Iterator[np.ndarray]:
        for lengths_D in lengths:
            for at in range(0, len(lengths_D), CHUNK_DOCUMENTS):
                yield lengths_D[at : at + CHUNK_DOCUMENTS]

    documents = sum(map(len, lengths))
    with path.open("wb") as file:
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[dtype], documents, documents + 1))
        for lengths_D in chunks():
            file.write(lengths_D.astype(np.int32).tobytes())

        offset = 0
        for lengths_D in chunks():
            ends_D = offset + np.cumsum(lengths_D, dtype=np.int64) * dtype.itemsize
            file.write(np.concatenate([[offset], ends_D[:-1]]).astype(np.int64).tobytes())
            offset = int(ends_D[-1])

        for start in range(0, documents + 1, CHUNK_DOCUMENTS):
            stop = min(start + CHUNK_DOCUMENTS, documents + 1)
            file.write(np.arange(start, stop, dtype=np.int64).tobytes())


def commit_corpus(prefix: Path, directory: Path, manifest: Manifest) -> None:
    """Move `bin` and `idx` to PREFIX and write the manifest, last."""
    Path(f"{prefix}.json").unlink(missing_ok=True)  # an old manifest must not vouch for new tokens
    for suffix in ("bin", "idx"):
        os.replace(directory / suffix, f"{prefix}.{suffix}")
    fsync_path(prefix.parent)
    write_sealed(Path(f"{prefix}.json"), manifest.model_dump(mode="json"))
