"""A manifest of OLMo's raw token files, which are trained on in place: `python -m train index`."""

import os
from pathlib import Path
from typing import Literal

import numpy as np

from base.errors import UserError
from base.files import write_json
from train.data.manifest import NpyManifest, TokenFile

NUMPY_MAGIC = b"\x93NUMPY"


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

    Relative paths are recorded relative to the directory of the manifest.

    Raises:
        UserError: a file that is missing or holds no such tokens, or a prefix of prepared text.
    """
    if eos_token_id >= vocab_size:
        raise UserError(
            f"--eos {eos_token_id} is outside the vocabulary of {vocab_size}; correct it"
        )
    if Path(f"{prefix}.bin").exists():
        raise UserError(f"{prefix}.bin was made by 'train prepare'; choose another --out")
    records = []
    for path in files:
        _check_raw(path, dtype)
        name = str(path) if path.is_absolute() else os.path.relpath(path, prefix.parent)
        records.append(TokenFile(path=name, bytes=path.stat().st_size))
    manifest = NpyManifest(
        dtype=dtype,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
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
        raise UserError(f"{path} is not a file; give OLMo's .npy token files one by one")
    with path.open("rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise UserError(f"{path} has a NumPy header; OLMo's are raw, write it with tofile")
    size = path.stat().st_size
    if size == 0 or size % np.dtype(dtype).itemsize:
        raise UserError(f"{path} has {size} bytes, no {dtype} tokens; correct --dtype")
