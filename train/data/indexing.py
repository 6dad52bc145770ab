"""A manifest of OLMo's raw token files, which are trained on in place: `python -m train index`."""

import os
from pathlib import Path
from typing import Literal

import numpy as np

from base.errors import UserError
from base.files import sha256_of, write_json
from base.progress import Progress
from train.data.manifest import NpyManifest, TokenFile

NUMPY_MAGIC = b"\x93NUMPY"
CHUNK_TOKENS = 1 << 24


def index(
    files: list[Path],
    prefix: Path,
    *,
    dtype: Literal["uint16", "uint32"],
    vocab_size: int,
    eos_token_id: int,
    tokenizer_sha256: str,
    hashes: bool = False,
) -> NpyManifest:
    """Write the manifest of raw token files in the given order; the files stay where they are.

    Args:
        files: arrays without a header.
        prefix: PREFIX of the PREFIX.json to write; relative file paths are recorded relative to its
            directory.
        dtype: of a token.
        vocab_size: of the tokenizer.
        eos_token_id: the token that ends a document.
        tokenizer_sha256: of the tokenizer.json that made the tokens.
        hashes: read every file to record its SHA-256 and the largest token.

    Raises:
        UserError: a file that is missing or holds no such tokens, or a prefix of prepared text.
    """
    if eos_token_id >= vocab_size:
        raise UserError(
            f"--eos {eos_token_id} is outside the tokenizer's vocabulary of {vocab_size};"
            " correct it"
        )
    if Path(f"{prefix}.bin").exists():
        raise UserError(
            f"{prefix}.bin was made by 'python -m train prepare'; choose another --out for the"
            " index"
        )
    records, largest = [], -1
    with Progress("index", total=len(files)) as progress:
        for path in files:
            _check_raw(path, dtype)
            name = str(path) if path.is_absolute() else os.path.relpath(path, prefix.parent)
            sha256 = None
            if hashes:
                sha256, largest = sha256_of(path), max(largest, _largest_token(path, dtype))
            records.append(TokenFile(path=name, bytes=path.stat().st_size, sha256=sha256))
            progress.advance()
    manifest = NpyManifest(
        dtype=dtype,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        max_token_id=largest if hashes else None,
        tokens=sum(record.bytes for record in records) // np.dtype(dtype).itemsize,
        tokenizer_sha256=tokenizer_sha256,
        files=tuple(records),
    )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(f"{prefix}.json"), manifest.model_dump(mode="json"))
    return manifest


def _check_raw(path: Path, dtype: str) -> None:
    """Raise UserError for anything but a headerless array of whole tokens."""
    if not path.is_file():
        raise UserError(f"{path} is no file; give OLMo's .npy token files one by one")
    with path.open("rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise UserError(
                f"{path} starts with a NumPy header; OLMo's token files are raw, write it with"
                " tofile"
            )
    size = path.stat().st_size
    if size == 0 or size % np.dtype(dtype).itemsize:
        raise UserError(
            f"{path} has {size} bytes, which is no positive number of {dtype} tokens; correct"
            " --dtype"
        )


def _largest_token(path: Path, dtype: str) -> int:
    tokens_T = np.memmap(path, dtype, mode="r").view(np.ndarray)
    return max(
        int(tokens_T[at : at + CHUNK_TOKENS].max()) for at in range(0, len(tokens_T), CHUNK_TOKENS)
    )
