"""PREFIX.json: content, origin and hashes of a token file, or of a list of OLMo's."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from base.errors import UserError, explain_validation
from base.files import FileRecord, sha256_of
from base.frozen import Frozen
from train.data.share import Share

# Hashing runs at some 500 MB/s on one core: a corpus up to this size is hashed at every start, a
# larger one on demand.
HASHED_AT_START_BYTES = 256 << 20
REMAKE = "make it again with 'python -m train prepare'"


class Manifest(Frozen):
    """The record of PREFIX.bin and PREFIX.idx, written last."""

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
        """Return the identity of the tokens: the hash of the token file."""
        return self.bin.sha256


class TokenFile(Frozen):
    """One raw token file."""

    path: str = Field(description="starts at the manifest's directory unless absolute")
    bytes: int
    sha256: str | None = Field(description="None: it was indexed without --hash")


class NpyManifest(Frozen):
    """The record of OLMo's token files: raw little-endian arrays, headerless though called .npy."""

    kind: Literal["npy"] = "npy"
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    eos_token_id: int
    max_token_id: int | None = Field(
        description="None: indexed without --hash; every batch is checked instead"
    )
    tokens: int
    tokenizer_sha256: str
    files: tuple[TokenFile, ...]

    @property
    def sha256(self) -> str:
        """Return a hash of dtype, file names, sizes and hashes, in order: the tokens' identity."""
        files = [(Path(file.path).name, file.bytes, file.sha256) for file in self.files]
        return hashlib.sha256(json.dumps([self.dtype, files]).encode()).hexdigest()


def read_manifest(prefix: Path) -> Manifest | NpyManifest:
    """Read PREFIX.json; UserError if it is missing, damaged or no manifest."""
    path = Path(f"{prefix}.json")
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; make it with 'python -m train prepare' or 'python -m train"
            " index'"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); make the token file again") from None
    kind = NpyManifest if isinstance(content, dict) and content.get("kind") == "npy" else Manifest
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise explain_validation(str(path), error) from None


def token_files(
    prefix: Path, manifest: Manifest | NpyManifest
) -> list[tuple[Path, int, str | None]]:
    """Return path, size in bytes and, where recorded, SHA-256 of every file of a manifest."""
    if isinstance(manifest, Manifest):
        records = (("bin", manifest.bin), ("idx", manifest.idx))
        return [
            (Path(f"{prefix}.{suffix}"), record.bytes, record.sha256) for suffix, record in records
        ]
    return [(prefix.parent / file.path, file.bytes, file.sha256) for file in manifest.files]


def check_files(prefix: Path, manifest: Manifest | NpyManifest, verify_hashes: bool) -> None:
    """Raise UserError for the first file that is missing, or has another size or hash."""
    remake = (
        REMAKE
        if isinstance(manifest, Manifest)
        else "restore it, or index the files as they are now"
    )
    for path, size, sha256 in token_files(prefix, manifest):
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path} is missing or truncated; {remake}")
        if verify_hashes and sha256 and sha256_of(path) != sha256:
            raise UserError(f"{path} was changed after it was prepared; {remake}")


def is_hashed_at_start(prefix: Path, manifest: Manifest | NpyManifest) -> bool:
    """Return whether the files are small enough to be hashed whenever a run starts."""
    return sum(size for _, size, _ in token_files(prefix, manifest)) <= HASHED_AT_START_BYTES


def verify(prefix: Path) -> int:
    """Hash every file of a corpus; return their bytes. UserError for the first damage."""
    manifest = read_manifest(prefix)
    files = token_files(prefix, manifest)
    if any(sha256 is None for _, _, sha256 in files):
        raise UserError(f"{prefix}.json records no hashes; index the files again with --hash")
    check_files(prefix, manifest, verify_hashes=True)
    return sum(size for _, size, _ in files)
