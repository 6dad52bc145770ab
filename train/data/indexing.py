"""A manifest of OLMo's raw token files, which are trained on in place: `python -m train index`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from base.errors import UserError
from base.files import check_fetched, write_sealed
from train.data.documents import TextFile, check_given_once
from train.data.manifest import NpyManifest, RawTokenFile

NUMPY_MAGIC = b"\x93NUMPY"
SAMPLE_TOKENS = 1 << 12  # looked at in the beginning, the middle and the end of a file
LEAST_SAMPLE = 64  # tokens: fewer may look like anything


def index(
    files: list[Path],
    prefix: Path,
    *,
    dtype: Literal["uint16", "uint32"],
    vocab_size: int,
    eos_token_id: int,
    tokenizer_sha256: str,
) -> NpyManifest:
    """Write the manifest of raw token files in the given order; the files stay where they are.

    Relative paths are recorded relative to the directory of the manifest. `vocab_size` is the
    largest id and one.

    Raises:
        UserError: a file that is missing, given twice or holds no such tokens, a dtype that does
            not hold the vocabulary, or a prefix of prepared text.
    """
    if eos_token_id >= vocab_size:
        raise UserError(
            f"--eos {eos_token_id} is outside the vocabulary of {vocab_size}; correct it"
        )
    if vocab_size - 1 > np.iinfo(dtype).max:
        raise UserError(
            f"--dtype {dtype} holds no token above {np.iinfo(dtype).max:,}, the tokenizer has them"
            f" up to {vocab_size - 1:,}; give the dtype that the files were written with"
        )
    if Path(f"{prefix}.bin").exists():
        raise UserError(f"{prefix}.bin was made by 'train prepare'; choose another --out")
    check_given_once([TextFile(path=path) for path in files])
    records = []
    for path in files:
        _check_raw(path, dtype)
        _check_sample(path, dtype, vocab_size)
        name = str(path) if path.is_absolute() else os.path.relpath(path, prefix.parent)
        records.append(RawTokenFile(path=name, bytes=path.stat().st_size))
    manifest = NpyManifest(
        dtype=dtype,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        tokens=sum(record.bytes for record in records) // np.dtype(dtype).itemsize,
        tokenizer_sha256=tokenizer_sha256,
        files=tuple(records),
    )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(Path(f"{prefix}.json"), manifest.model_dump(mode="json"))
    return manifest


def _check_raw(path: Path, dtype: str) -> None:
    """Raise UserError for anything but a headerless array of whole tokens."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; give OLMo's .npy token files one by one")
    check_fetched(path)
    with path.open("rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise UserError(f"{path} has a NumPy header; OLMo's are raw, write it with tofile")
    size = path.stat().st_size
    if size == 0 or size % np.dtype(dtype).itemsize:
        raise UserError(f"{path} has {size} bytes, no {dtype} tokens; correct --dtype")


def _check_sample(path: Path, dtype: str, vocab_size: int) -> None:
    """Raise UserError where some tokens of a file cannot be tokens of the type and vocabulary."""
    for sample in _samples(path, np.dtype(dtype)):
        largest = int(sample.max(initial=0))
        if largest >= vocab_size:
            raise UserError(
                f"{path} holds {largest:,} as {dtype}, the tokenizer has tokens up to"
                f" {vocab_size - 1:,}; correct --dtype or --tokenizer"
            )
        if len(sample) < LEAST_SAMPLE:
            continue
        # Tokens of 32 bits, little-endian, read as 16: the upper half of a common one is 0.
        if not sample[1::2].any() and sample[::2].any():
            raise UserError(
                f"every second {dtype} of {path} is 0, so its tokens have twice as many bits;"
                " correct --dtype"
            )
        if _is_text(sample.tobytes()):
            raise UserError(f"{path} holds text, no tokens; use 'python -m train prepare'")


def _samples(path: Path, dtype: np.dtype[Any]) -> Iterator[np.ndarray]:
    """Yield some tokens of the beginning, the middle and the end of a file."""
    size, width = path.stat().st_size, SAMPLE_TOKENS * dtype.itemsize
    with path.open("rb") as file:
        for start in (0, size // 2, size - width):
            file.seek(max(0, start) // 8 * 8)  # halves and quarters of a wider token stay in order
            yield np.frombuffer(file.read(width + 8), dtype)


def _is_text(content: bytes) -> bool:
    """Return whether bytes are ASCII without a zero, such as the page of a failed download.

    Real tokens of 16 or 32 bits are not: the upper half of a common one is zero.
    """
    return content.isascii() and b"\0" not in content
