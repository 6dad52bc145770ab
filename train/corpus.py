"""Token files, memory-mapped: Megatron's .bin/.idx, and OLMo's raw .npy files read in place.

Shapes: T tokens of a file, D documents, B sequences of a batch, L tokens of a sequence.
"""

import functools
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from train.command import UserError
from train.manifest import Manifest, NpyManifest, check_files, is_hashed_at_start, read_manifest

# The index: magic, version, dtype code, number of sequences and of document bounds, then lengths, byte offsets, bounds.
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[np.dtype[Any], int] = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}

Tokens = NDArray[np.int64]


class Extent(NamedTuple):
    """The sequences of a corpus that lie in one file: numbers [first, stop)."""

    path: Path
    sha256: str | None
    first: int
    stop: int


class TokenSource(Protocol):
    """What a run reads sequences from."""

    @property
    def prefix(self) -> Path:
        """The corpus's name on disk."""
        ...

    @property
    def manifest(self) -> Manifest | NpyManifest:
        """What the files hold."""
        ...

    @property
    def last_label_counts(self) -> bool:
        """Whether the label of a sequence's last input is a token of the file; it is filler otherwise."""
        ...

    def num_sequences(self, sequence_length: int) -> int:
        """How many sequences of L inputs there are; UserError if not even one."""
        ...

    def read(self, indices_B: Tokens, tokens_BS: Tokens, rows_B: Tokens) -> None:
        """Copies sequences, by index, into rows of `tokens_BS`, int64 [any, L + 1]."""
        ...

    def extents(self, sequence_length: int) -> list[Extent]:
        """Which sequences lie in which file."""
        ...


class TokenMap:
    """A token file in memory: pages are read when asked for, and none around them.

    The kernel's reading ahead, up to megabytes for each few kilobytes of a random sequence, is off; what a batch needs
    is requested at once, for the disk to fetch side by side.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        with path.open("rb") as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._pages.madvise(mmap.MADV_RANDOM)
        self.tokens_T: np.ndarray = np.frombuffer(self._pages, dtype)

    def request(self, start: int, count: int) -> None:
        """Starts to fetch tokens [start, start + count) and does not wait."""
        item_bytes = self.tokens_T.itemsize
        first = start * item_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._pages.madvise(mmap.MADV_WILLNEED, first, (start + count) * item_bytes - first)


@dataclass(frozen=True)
class Corpus:
    """A token file of packed documents with an index of where each begins.

    Sequence i starts at token i x L and shares its last token with the next.

    Attributes:
        tokens: all of them; every document ends with the end-of-text token.
        lengths_D: tokens of each document.
        offsets_D: where each document begins in the file, in bytes.
    """

    prefix: Path
    manifest: Manifest
    tokens: TokenMap
    lengths_D: np.ndarray
    offsets_D: np.ndarray
    last_label_counts: bool = True

    @property
    def tokens_T(self) -> np.ndarray:  # noqa: N802  shape suffix
        """All tokens."""
        return self.tokens.tokens_T

    @functools.cached_property
    def bounds_D(self) -> np.ndarray:  # noqa: N802  shape suffix
        """D + 1 offsets into `tokens_T`, int64: document d is `tokens_T[bounds_D[d]:bounds_D[d + 1]]`."""
        return np.concatenate([[0], np.cumsum(self.lengths_D, dtype=np.int64)])

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, int64, its end-of-text token included."""
        start, count = int(self.offsets_D[index]) // self.tokens_T.itemsize, int(self.lengths_D[index])
        self.tokens.request(start, count)
        tokens: np.ndarray = self.tokens_T[start : start + count]
        return tokens.astype(np.int64)

    def num_sequences(self, sequence_length: int) -> int:
        """How many sequences of L inputs and L labels the file holds; UserError if not even one."""
        count = (len(self.tokens_T) - 1) // sequence_length
        if count < 1:
            raise UserError(
                f"{self.prefix} holds {len(self.tokens_T)} tokens, fewer than one sequence of {sequence_length} + 1; "
                f"prepare more text or shorten the sequence"
            )
        return count

    def sequences(self, indices_B: np.ndarray, sequence_length: int) -> np.ndarray:
        """Sequences by index, int64 [B, L + 1]: inputs are [:, :-1], labels [:, 1:]."""
        tokens_BS = np.empty((len(indices_B), sequence_length + 1), np.int64)
        self.read(indices_B, tokens_BS, np.arange(len(indices_B)))
        return tokens_BS

    def read(self, indices_B: Tokens, tokens_BS: Tokens, rows_B: Tokens) -> None:
        """Copies sequences, by index, into rows of `tokens_BS`; one contiguous slice each, as fast as memory allows."""
        width = tokens_BS.shape[1]
        starts = (indices_B * (width - 1)).tolist()
        for start in starts:
            self.tokens.request(start, width)
        tokens_T = self.tokens_T
        for row, start in zip(rows_B.tolist(), starts, strict=True):
            tokens_BS[row] = tokens_T[start : start + width]

    def extents(self, sequence_length: int) -> list[Extent]:
        """The one token file."""
        path = Path(os.path.realpath(f"{self.prefix}.bin"))
        return [Extent(path, self.manifest.sha256, 0, self.num_sequences(sequence_length))]


@dataclass(frozen=True)
class NpyCorpus:
    """OLMo's token files, cut as OLMo cuts them (allenai/OLMo, olmo/data/memmap_dataset.py).

    A sequence is L tokens of one file; what is left at a file's end is dropped. It has L - 1 labels, so the last of its
    L columns of labels is filler, the end-of-text token, and does not count.
    """

    prefix: Path
    manifest: NpyManifest
    last_label_counts: bool = False
    _opened: dict[int, TokenMap] = field(default_factory=dict)

    def num_sequences(self, sequence_length: int) -> int:
        """How many sequences of L tokens all files hold; UserError if not even one."""
        count = int(self._stops(sequence_length)[-1])
        if count < 1:
            raise UserError(
                f"no file of {self.prefix} holds a sequence of {sequence_length} tokens; shorten the sequence"
            )
        return count

    def read(self, indices_B: Tokens, tokens_BS: Tokens, rows_B: Tokens) -> None:
        """Copies sequences, by index, into rows of `tokens_BS`; a file is mapped when first read from."""
        length = tokens_BS.shape[1] - 1
        stops = self._stops(length)
        files = np.searchsorted(stops, indices_B, side="right")
        starts = ((indices_B - np.concatenate([[0], stops])[files]) * length).tolist()
        maps = [self._map(file) for file in files.tolist()]
        for tokens, start in zip(maps, starts, strict=True):
            tokens.request(start, length)
        tokens_BS[rows_B, length] = self.manifest.eos_token_id
        for row, tokens, start in zip(rows_B.tolist(), maps, starts, strict=True):
            tokens_BS[row, :length] = tokens.tokens_T[start : start + length]

    def extents(self, sequence_length: int) -> list[Extent]:
        """Every file in order."""
        stops = [0, *self._stops(sequence_length).tolist()]
        return [
            Extent(Path(os.path.realpath(self.prefix.parent / file.path)), file.sha256, start, stop)
            for file, start, stop in zip(self.manifest.files, stops[:-1], stops[1:], strict=True)
        ]

    def _stops(self, sequence_length: int) -> Tokens:
        """Behind each file's last sequence, the number of the next."""
        item_bytes = np.dtype(self.manifest.dtype).itemsize
        sizes = np.array([file.bytes for file in self.manifest.files], np.int64)
        stops: Tokens = np.cumsum(sizes // (item_bytes * sequence_length))
        return stops

    def _map(self, file: int) -> TokenMap:
        if file not in self._opened:
            path = self.prefix.parent / self.manifest.files[file].path
            self._opened[file] = TokenMap(path, np.dtype(self.manifest.dtype))
        return self._opened[file]


def _map_bin(prefix: Path, manifest: Manifest) -> Corpus:
    index = Path(f"{prefix}.idx")
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    dtypes: dict[int, np.dtype[Any]] = {value: key for key, value in DTYPE_CODES.items()}
    if len(header) < INDEX_HEADER.size:
        raise UserError(f"{index} is truncated; make it again with 'python -m train prepare'")
    magic, version, code, documents, _ = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC or version != 1 or code not in dtypes:
        raise UserError(f"{index} is no Megatron index of 16 or 32 bit tokens; make it again with 'train prepare'")
    lengths_D = np.memmap(index, np.int32, "r", INDEX_HEADER.size, (documents,)).view(np.ndarray)
    offsets_at = INDEX_HEADER.size + lengths_D.nbytes
    offsets_D = np.memmap(index, np.int64, "r", offsets_at, (documents,)).view(np.ndarray)
    return Corpus(prefix, manifest, TokenMap(Path(f"{prefix}.bin"), dtypes[code]), lengths_D, offsets_D)


def open_source(prefix: Path | str, verify_hashes: bool = False) -> Corpus | NpyCorpus:
    """Opens a corpus of either kind through its manifest; UserError for anything missing, truncated or edited.

    Nothing is read that grows with the corpus: sizes are checked, hashes only where the files are small.
    """
    prefix = Path(prefix)
    manifest = read_manifest(prefix)
    check_files(prefix, manifest, verify_hashes and is_hashed_at_start(prefix, manifest))
    return _map_bin(prefix, manifest) if isinstance(manifest, Manifest) else NpyCorpus(prefix, manifest)


def open_corpus(prefix: Path | str, verify_hashes: bool = False) -> Corpus:
    """Opens PREFIX.bin/.idx, the kind whose documents can be told apart; UserError as `open_source`."""
    corpus = open_source(prefix, verify_hashes)
    if isinstance(corpus, NpyCorpus):
        raise UserError(f"{prefix} lists OLMo's token files, which are for training; give text made by 'train prepare'")
    return corpus


def check_vocabulary(corpus: Corpus | NpyCorpus, vocab_size: int) -> None:
    """UserError if the files are known to hold a token the model has no embedding for."""
    largest = corpus.manifest.max_token_id
    if largest is not None and largest >= vocab_size:
        raise UserError(
            f"{corpus.prefix} holds token {largest}, outside the model's vocabulary of "
            f"{vocab_size}; prepare it with the model's tokenizer or raise model.vocab_size"
        )
