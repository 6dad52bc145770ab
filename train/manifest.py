"""PREFIX.json: what a token file, or a list of them, holds and was made from, and whether its files are still those."""

import hashlib
import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from train.command import Progress, UserError, explain_validation
from train.frozen import Frozen
from train.run_directory import FileRecord, sha256_of, write_json
from train.share import Share

# Hashing runs at some 500 MB/s on one core: a corpus up to this size is hashed at every start, a larger one on demand.
HASHED_AT_START_BYTES = 256 << 20
NUMPY_MAGIC = b"\x93NUMPY"
SCAN_TOKENS = 1 << 24
REMAKE = "make it again with 'python -m train prepare'"


class Manifest(Frozen):
    """Of PREFIX.bin and PREFIX.idx, written last."""

    kind: Literal["bin"] = "bin"
    vocab_size: int
    eos_token_id: int
    max_token_id: int
    documents: int
    tokens: int
    tokenizer_sha256: str
    bin: FileRecord
    idx: FileRecord
    sources: dict[str, FileRecord] = Field(
        description="files by path; a part of a dataset by name, with its texts' hash"
    )
    share: Share | None = Field(default=None, description="of the sources' documents; None: all")

    @property
    def sha256(self) -> str:
        """Identity of the tokens: the hash of the token file."""
        return self.bin.sha256


class TokenFile(Frozen):
    """One raw token file."""

    path: str = Field(description="starts at the manifest's directory unless absolute")
    bytes: int
    sha256: str | None = Field(description="None: it was indexed without --hash")


class NpyManifest(Frozen):
    """Of OLMo's token files, which lie elsewhere: raw little-endian arrays without a header, though called .npy."""

    kind: Literal["npy"] = "npy"
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    eos_token_id: int
    max_token_id: int | None = Field(description="None: indexed without --scan; every batch is checked instead")
    tokens: int
    tokenizer_sha256: str
    files: tuple[TokenFile, ...]

    @property
    def sha256(self) -> str:
        """Identity of the tokens: a hash of dtype, file names, sizes and, where they were taken, hashes, in order."""
        files = [(Path(file.path).name, file.bytes, file.sha256) for file in self.files]
        return hashlib.sha256(json.dumps([self.dtype, files]).encode()).hexdigest()


def read_manifest(prefix: Path) -> Manifest | NpyManifest:
    """Reads PREFIX.json; UserError if it is missing, damaged or no manifest."""
    path = Path(f"{prefix}.json")
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; make it with 'python -m train prepare' or 'python -m train index'"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); make the token file again") from None
    kind = NpyManifest if isinstance(content, dict) and content.get("kind") == "npy" else Manifest
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise explain_validation(str(path), error) from None


def token_files(prefix: Path, manifest: Manifest | NpyManifest) -> list[tuple[Path, int, str | None]]:
    """Path, size in bytes and, where recorded, SHA-256 of every file the manifest vouches for."""
    if isinstance(manifest, Manifest):
        records = (("bin", manifest.bin), ("idx", manifest.idx))
        return [(Path(f"{prefix}.{suffix}"), record.bytes, record.sha256) for suffix, record in records]
    return [(prefix.parent / file.path, file.bytes, file.sha256) for file in manifest.files]


def check_files(prefix: Path, manifest: Manifest | NpyManifest, verify_hashes: bool) -> None:
    """UserError for the first file that is missing, has another size or, if asked for, another hash."""
    remake = REMAKE if isinstance(manifest, Manifest) else "restore it, or index the files as they are now"
    for path, size, sha256 in token_files(prefix, manifest):
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path} is missing or truncated; {remake}")
        if verify_hashes and sha256 and sha256_of(path) != sha256:
            raise UserError(f"{path} was changed after it was prepared; {remake}")


def is_hashed_at_start(prefix: Path, manifest: Manifest | NpyManifest) -> bool:
    """Whether the files are, together, small enough to be hashed whenever a run starts."""
    return sum(size for _, size, _ in token_files(prefix, manifest)) <= HASHED_AT_START_BYTES


def verify(prefix: Path) -> int:
    """Hashes every file of a corpus, whatever its size; UserError for the first damage.

    Returns:
        How many bytes were found to be what the manifest says.
    """
    manifest = read_manifest(prefix)
    files = token_files(prefix, manifest)
    if any(sha256 is None for _, _, sha256 in files):
        raise UserError(f"{prefix}.json records no hashes; index the files again with --hash")
    check_files(prefix, manifest, verify_hashes=True)
    return sum(size for _, size, _ in files)


def index(
    files: list[Path],
    prefix: Path,
    *,
    dtype: Literal["uint16", "uint32"],
    vocab_size: int,
    eos_token_id: int,
    tokenizer_sha256: str,
    hashes: bool = False,
    scan: bool = False,
) -> NpyManifest:
    """Writes the manifest of raw token files, which stay where they are, in the given order.

    Args:
        files: arrays without a header.
        prefix: PREFIX of the PREFIX.json to write; relative file paths are recorded relative to its directory.
        dtype: of a token.
        vocab_size: of the tokenizer.
        eos_token_id: the token that ends a document.
        tokenizer_sha256: of the tokenizer.json that made the tokens.
        hashes: reads every file to record its SHA-256.
        scan: reads every file to record the largest token.
    """
    if eos_token_id >= vocab_size:
        raise UserError(f"--eos {eos_token_id} is outside the tokenizer's vocabulary of {vocab_size}; correct it")
    if Path(f"{prefix}.bin").exists():
        raise UserError(f"{prefix}.bin was made by 'python -m train prepare'; choose another --out for the index")
    item_bytes = np.dtype(dtype).itemsize
    records, max_token_id = [], -1
    with Progress("index", total=len(files)) as progress:
        for path in files:
            if not path.is_file():
                raise UserError(f"{path} is no file; give OLMo's .npy token files one by one")
            size = path.stat().st_size
            with path.open("rb") as file:
                if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
                    raise UserError(
                        f"{path} starts with a NumPy header; OLMo's token files are raw, write it with tofile"
                    )
            if size == 0 or size % item_bytes:
                raise UserError(
                    f"{path} has {size} bytes, which is no positive number of {dtype} tokens; correct --dtype"
                )
            if scan:
                tokens_T = np.memmap(path, dtype, mode="r").view(np.ndarray)
                largest = max(int(tokens_T[at : at + SCAN_TOKENS].max()) for at in range(0, len(tokens_T), SCAN_TOKENS))
                max_token_id = max(max_token_id, largest)
            name = str(path) if path.is_absolute() else os.path.relpath(path, prefix.parent)
            records.append(TokenFile(path=name, bytes=size, sha256=sha256_of(path) if hashes else None))
            progress.advance()
    manifest = NpyManifest(
        dtype=dtype,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        max_token_id=max_token_id if scan else None,
        tokens=sum(record.bytes for record in records) // item_bytes,
        tokenizer_sha256=tokenizer_sha256,
        files=tuple(records),
    )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(f"{prefix}.json"), manifest.model_dump(mode="json"))
    return manifest
