"""Token files in Megatron's .bin/.idx format, and batches as a pure function of seed and step.

Shapes: T tokens of the file, D documents, B sequences of a batch, L tokens of a sequence.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from train.command import UserError, explain_validation
from train.frozen import Frozen
from train.run_directory import FileRecord, sha256_of

# The index: magic, version, dtype code, number of sequences and of document bounds, then lengths, byte offsets, bounds.
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[np.dtype[Any], int] = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}


class Manifest(Frozen):
    """PREFIX.json: what the token file holds, from what and by which tokenizer it was made. Written last."""

    vocab_size: int
    eos_token_id: int
    max_token_id: int
    documents: int
    tokens: int
    tokenizer_sha256: str
    bin: FileRecord
    idx: FileRecord
    sources: dict[str, FileRecord]


@dataclass(frozen=True)
class Corpus:
    """A token file, memory-mapped.

    Attributes:
        tokens_T: all tokens; every document ends with the end-of-text token.
        bounds_D: D + 1 offsets into `tokens_T`, document d is `tokens_T[bounds_D[d]:bounds_D[d + 1]]`.
    """

    prefix: Path
    manifest: Manifest
    tokens_T: np.ndarray
    bounds_D: np.ndarray

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, int64, its end-of-text token included."""
        tokens: np.ndarray = self.tokens_T[self.bounds_D[index] : self.bounds_D[index + 1]]
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

    def sequences(self, indices: np.ndarray, sequence_length: int) -> np.ndarray:
        """Sequences by index, int64 [B, L + 1]: inputs are [:, :-1], labels [:, 1:].

        Sequence i starts at token i x L and shares its last token with the next; documents are packed.
        """
        offsets = indices[:, None] * sequence_length + np.arange(sequence_length + 1)[None]
        tokens: np.ndarray = self.tokens_T[offsets]
        return tokens.astype(np.int64)


def write_index(path: Path, lengths_D: np.ndarray, dtype: np.dtype) -> None:
    """Writes PREFIX.idx for documents of these lengths, one sequence each."""
    offsets = np.concatenate([[0], np.cumsum(lengths_D[:-1], dtype=np.int64)]) * dtype.itemsize
    bounds = np.arange(len(lengths_D) + 1, dtype=np.int64)
    with path.open("wb") as file:
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[dtype], len(lengths_D), len(bounds)))
        for array in (lengths_D.astype(np.int32), offsets.astype(np.int64), bounds):
            file.write(array.tobytes())


def open_corpus(prefix: Path | str, verify_hashes: bool = False) -> Corpus:
    """Opens PREFIX.bin/.idx through its manifest; UserError for anything missing, truncated or edited."""
    prefix = Path(prefix)
    manifest_path = Path(f"{prefix}.json")
    try:
        manifest = Manifest.model_validate_json(manifest_path.read_text())
    except FileNotFoundError:
        raise UserError(f"{manifest_path} does not exist; make it with 'python -m train prepare'") from None
    except ValidationError as error:
        raise explain_validation(str(manifest_path), error) from None
    for record, path in ((manifest.bin, Path(f"{prefix}.bin")), (manifest.idx, Path(f"{prefix}.idx"))):
        if not path.is_file() or path.stat().st_size != record.bytes:
            raise UserError(f"{path} is missing or truncated; make it again with 'python -m train prepare'")
        if verify_hashes and sha256_of(path) != record.sha256:
            raise UserError(f"{path} was changed after it was prepared; make it again with 'python -m train prepare'")
    content = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, num_sequences, _ = INDEX_HEADER.unpack_from(content)
    dtypes: dict[int, np.dtype[Any]] = {value: key for key, value in DTYPE_CODES.items()}
    if magic != INDEX_MAGIC or version != 1 or code not in dtypes:
        raise UserError(f"{prefix}.idx is no Megatron index of 16 or 32 bit tokens; make it again with 'train prepare'")
    lengths_D = np.frombuffer(content, np.int32, num_sequences, INDEX_HEADER.size)
    bounds_D = np.concatenate([[0], np.cumsum(lengths_D, dtype=np.int64)])
    tokens_T: np.ndarray = np.memmap(f"{prefix}.bin", dtypes[code], mode="r")
    return Corpus(prefix, manifest, tokens_T, bounds_D)


def check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """UserError if the file holds a token the model has no embedding for."""
    if corpus.manifest.max_token_id >= vocab_size:
        raise UserError(
            f"{corpus.prefix} holds token {corpus.manifest.max_token_id}, outside the model's vocabulary of "
            f"{vocab_size}; prepare it with the model's tokenizer or raise model.vocab_size"
        )


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014): a fixed scrambling of 64-bit integers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random bijection of 0..size-1, evaluated only where asked: nothing of length `size` is stored.

    A balanced Feistel network over the next even power of two, walked until the image falls below `size`
    (Black and Rogaway 2002, 'Ciphers with arbitrary finite domains').
    """
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(epoch))
        keys = _mix(key + np.arange(1, 9, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), bool)
        while outside.any():
            left, right = values[outside] >> half_bits, values[outside] & half_mask
            for round_key in keys:
                left, right = right, left ^ (_mix(right + round_key) & half_mask)
            values[outside] = (left << half_bits) | right
            outside[outside] = values[outside] >= size
    return values.astype(np.int64)


def batch(corpus: Corpus, *, step: int, batch_size: int, sequence_length: int, seed: int) -> np.ndarray:
    """The batch of update `step` (from 1), int64 [B, L + 1]: a function of seed and step alone.

    Neither the world size nor the length of the run enters, so a cooldown sees the data of the run it came from. Every
    epoch visits every sequence once, in an order of its own.
    """
    size = corpus.num_sequences(sequence_length)
    positions = np.arange((step - 1) * batch_size, step * batch_size)
    epochs = positions // size
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = permute(positions[inside] % size, size, seed, int(epoch))
    return corpus.sequences(indices, sequence_length)
