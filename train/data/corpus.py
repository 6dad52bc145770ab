"""Token files: Megatron's .bin/.idx, mapped or written, and OLMo's raw .npy files read in place.

`train.run_data` reads batches of them. In writing nothing is held that grows with the text.

Shapes: T tokens of a file, D documents, B sequences of a batch, L tokens of a sequence.
"""

import functools
import mmap
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from base.errors import UserError
from base.files import FileRecord, fsync_path, record_files, write_sealed
from train.data.manifest import (
    HASHED_AT_START_BYTES,
    REMAKE,
    Manifest,
    NpyManifest,
    check_files,
    read_manifest,
)

# The index: magic, version, dtype code, number of sequences and of document bounds, then lengths,
# byte offsets, bounds.
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[np.dtype[Any], int] = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}

Tokens = NDArray[np.int64]


class TokenMap:
    """A token file in memory, of which only the pages that are asked for are read.

    The kernel would read megabytes ahead for a sequence of a few kilobytes. All sequences of a
    batch are requested at once, for the disk to fetch them side by side.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        size = path.stat().st_size
        if not size or size % dtype.itemsize:
            raise UserError(
                f"{path} has {size} bytes, no {dtype.name} tokens; restore it, or make it again"
            )
        with path.open("rb") as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._pages.madvise(mmap.MADV_RANDOM)
        self.tokens_T: np.ndarray = np.frombuffer(self._pages, dtype)

    def request(self, start: int, count: int) -> None:
        """Start to fetch tokens [start, start + count), without waiting for them."""
        item_bytes = self.tokens_T.itemsize
        # madvise takes the beginning of a page.
        first = start * item_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._pages.madvise(mmap.MADV_WILLNEED, first, (start + count) * item_bytes - first)


@dataclass(frozen=True)
class Corpus:
    """A token file of packed documents with an index of where each begins.

    Sequence i starts at token i x L and shares its last token with the next.

    Attributes:
        tokens: all of them; every document ends with the end-of-text token.
        lengths_D: tokens of each document.
    """

    prefix: Path
    manifest: Manifest
    tokens: TokenMap
    lengths_D: np.ndarray
    last_label_counts: bool = True

    @property
    def tokens_T(self) -> np.ndarray:  # noqa: N802  shape suffix
        """Return all tokens."""
        return self.tokens.tokens_T

    @functools.cached_property
    def bounds_D(self) -> np.ndarray:  # noqa: N802  shape suffix
        """Return D + 1 offsets: document d is `tokens_T[bounds_D[d]:bounds_D[d + 1]]`."""
        bounds_D = np.concatenate([[0], np.cumsum(self.lengths_D, dtype=np.int64)])
        if bounds_D[-1] != len(self.tokens_T) or (len(self.lengths_D) and self.lengths_D.min() < 0):
            raise UserError(
                f"{self.prefix}.idx gives documents that do not add up to the"
                f" {len(self.tokens_T)} tokens of {self.prefix}.bin; {REMAKE}"
            )
        return bounds_D

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document, int64, its end-of-text token included."""
        start, stop = self.bounds_D[index : index + 2].tolist()
        self.tokens.request(start, stop - start)
        tokens: np.ndarray = self.tokens_T[start:stop]
        return tokens.astype(np.int64)

    def num_sequences(self, sequence_length: int) -> int:
        """Return the number of sequences of L inputs and L labels; UserError for none."""
        count = (len(self.tokens_T) - 1) // sequence_length
        if count < 1:
            raise UserError(
                f"{self.prefix} holds {len(self.tokens_T)} tokens, fewer than one sequence of"
                f" {sequence_length} + 1; prepare more text or shorten the sequence"
            )
        return count

    def sequences(self, indices_B: Tokens, sequence_length: int) -> Tokens:
        """Return sequences by index, int64 [B, L + 1]: inputs are [:, :-1], labels [:, 1:]."""
        width = sequence_length + 1
        # Neighbours overlap by a token: the last label of one is the first input of the next.
        starts = (indices_B * sequence_length).tolist()
        for start in starts:
            self.tokens.request(start, width)
        sequences_BL = np.empty((len(starts), width), np.int64)
        for row, start in enumerate(starts):
            sequences_BL[row] = self.tokens_T[start : start + width]
        return sequences_BL


@dataclass(frozen=True)
class NpyCorpus:
    """OLMo's token files, cut as OLMo cuts them (allenai/OLMo, olmo/data/memmap_dataset.py).

    A sequence is L tokens of one file; the remainder at a file's end is dropped. It has L - 1
    labels, so the last of its L columns of labels is filler, the end-of-text token, and does not
    count.
    """

    prefix: Path
    manifest: NpyManifest
    last_label_counts: bool = False
    _maps: dict[int, TokenMap] = field(default_factory=dict)

    def num_sequences(self, sequence_length: int) -> int:
        """Return the number of sequences of L tokens in all files; UserError for none."""
        count = int(self._stops(sequence_length)[-1])
        if count < 1:
            raise UserError(
                f"no file of {self.prefix} holds {sequence_length} tokens; shorten the sequence"
            )
        return count

    def sequences(self, indices_B: Tokens, sequence_length: int) -> Tokens:
        """Return sequences by index, int64 [B, L + 1]; a file is mapped when first read from."""
        stops = self._stops(sequence_length)
        # The first file whose end lies beyond the index: files too short for one are skipped.
        files = np.searchsorted(stops, indices_B, side="right")
        starts = ((indices_B - np.concatenate([[0], stops])[files]) * sequence_length).tolist()
        maps = [self._map(file) for file in files.tolist()]
        for tokens, start in zip(maps, starts, strict=True):
            tokens.request(start, sequence_length)
        sequences_BL = np.full(
            (len(starts), sequence_length + 1), self.manifest.eos_token_id, np.int64
        )
        for row, (tokens, start) in enumerate(zip(maps, starts, strict=True)):
            sequences_BL[row, :-1] = tokens.tokens_T[start : start + sequence_length]
        return sequences_BL

    @functools.cached_property
    def _sizes(self) -> Tokens:
        """Return the tokens of each file; there are thousands of files, and a batch every step."""
        sizes = np.array([file.bytes for file in self.manifest.files], np.int64)
        return sizes // np.dtype(self.manifest.dtype).itemsize

    def _stops(self, sequence_length: int) -> Tokens:
        """Return the number of sequences up to the end of each file."""
        stops: Tokens = np.cumsum(self._sizes // sequence_length)
        return stops

    def _map(self, file: int) -> TokenMap:
        if file not in self._maps:
            path = self.prefix.parent / self.manifest.files[file].path
            self._maps[file] = TokenMap(path, np.dtype(self.manifest.dtype))
        return self._maps[file]


TokenSource = Corpus | NpyCorpus


def _map_bin(prefix: Path, manifest: Manifest) -> Corpus:
    index = Path(f"{prefix}.idx")
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    dtypes: dict[int, np.dtype[Any]] = {value: key for key, value in DTYPE_CODES.items()}
    if len(header) < INDEX_HEADER.size:
        raise UserError(f"{index} is truncated; {REMAKE}")
    magic, version, code, documents, bounds = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC or version != 1 or code not in dtypes:
        raise UserError(f"{index} is not a Megatron index of 16 or 32 bit tokens; {REMAKE}")
    # A length and an offset of each document, and the bounds.
    expected = INDEX_HEADER.size + documents * (4 + 8) + bounds * 8
    if index.stat().st_size != expected:
        raise UserError(
            f"{index} says it holds {documents} documents, which would be {expected} bytes, and has"
            f" {index.stat().st_size}; {REMAKE}"
        )
    lengths_D = np.memmap(index, np.int32, "r", INDEX_HEADER.size, (documents,)).view(np.ndarray)
    return Corpus(prefix, manifest, TokenMap(Path(f"{prefix}.bin"), dtypes[code]), lengths_D)


def open_source(prefix: Path | str, verify_hashes: bool = False) -> TokenSource:
    """Open a corpus of either kind; UserError for a missing, truncated or edited small file."""
    prefix = Path(prefix)
    manifest = read_manifest(prefix)
    small = isinstance(manifest, Manifest) and manifest.bin.bytes <= HASHED_AT_START_BYTES
    check_files(prefix, manifest, verify_hashes and small)
    match manifest:
        case Manifest():
            return _map_bin(prefix, manifest)
        case NpyManifest():
            return NpyCorpus(prefix, manifest)
        case _:
            assert_never(manifest)


def open_corpus(prefix: Path | str, verify_hashes: bool = False) -> Corpus:
    """Open PREFIX.bin/.idx, the kind with an index of documents; UserError as `open_source`."""
    corpus = open_source(prefix, verify_hashes)
    if isinstance(corpus, NpyCorpus):
        raise UserError(
            f"{prefix} lists OLMo's files, which are for training; give text of 'train prepare'"
        )
    return corpus


def check_vocabulary(corpus: TokenSource, vocab_size: int) -> None:
    """Raise UserError if the files are known to hold a token without an embedding."""
    largest = corpus.manifest.max_token_id
    if largest is not None and largest >= vocab_size:
        raise UserError(
            f"{corpus.prefix} holds token {largest}, outside the model's vocabulary of "
            f"{vocab_size}; prepare it with the model's tokenizer or raise model.vocab_size"
        )


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

        # Where each document begins, in bytes.
        offset = 0
        for lengths_D in chunks():
            ends_D = offset + np.cumsum(lengths_D, dtype=np.int64) * dtype.itemsize
            file.write(np.concatenate([[offset], ends_D[:-1]]).astype(np.int64).tobytes())
            offset = int(ends_D[-1])

        # The bounds of documents in sequences: each is one sequence, so they count up.
        for start in range(0, documents + 1, CHUNK_DOCUMENTS):
            stop = min(start + CHUNK_DOCUMENTS, documents + 1)
            file.write(np.arange(start, stop, dtype=np.int64).tobytes())


def commit_corpus(prefix: Path, directory: Path, manifest: Manifest) -> None:
    """Move `bin` and `idx` to PREFIX and write the manifest, last."""
    Path(f"{prefix}.json").unlink(missing_ok=True)  # an old manifest must not vouch for new tokens
    for suffix in ("bin", "idx"):
        os.replace(directory / suffix, f"{prefix}.{suffix}")
    # The tokens have their names on the disk before the manifest vouches for them.
    fsync_path(prefix.parent)
    write_sealed(Path(f"{prefix}.json"), manifest.model_dump(mode="json"))
