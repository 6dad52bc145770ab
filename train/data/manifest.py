"""PREFIX.json: content, origin and hashes of a token file, or of a list of OLMo's.

A token file may hold a share of a text: documents chosen by their content alone. Every document has
a place among a million, by a hash. Equal documents have the same place, so two shares without a
common place have no document in common, however often the text repeats itself.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal, Self, assert_never

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from base.digests import digest_of
from base.errors import UserError
from base.files import FileRecord
from base.frozen import Frozen
from base.reading import as_model, read_sealed

PLACES = 1_000_000


def place_of(content: bytes) -> int:
    """Return the place of a document among `PLACES`.

    Example:
        >>> place_of(b"a document")
        665275
    """
    # 64 bits of the hash: places are then equally likely, to one part in 10^13.
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % PLACES


class Share(Frozen):
    """The documents with places [first, stop)."""

    first: int = Field(ge=0)
    stop: int = Field(le=PLACES)

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if self.first >= self.stop:
            raise ValueError(f"share {self} is empty")
        return self

    def __str__(self) -> str:
        """Return the share as --share takes it."""
        return f"{self.first}-{self.stop}"

    def holds(self, content: bytes) -> bool:
        """Return whether a document is of this share."""
        return self.first <= place_of(content) < self.stop

    def overlaps(self, other: "Share") -> bool:
        """Return whether a document can be of both."""
        return self.first < other.stop and other.first < self.stop


EVERYTHING = Share(first=0, stop=PLACES)


def parse_share(text: str) -> Share:
    """Return '0-20000' as a share; UserError for anything that is none.

    Example: 2% and another 3%, without a document in common.
        >>> parse_share("0-20000").overlaps(parse_share("20000-50000"))
        False
    """
    first, _, stop = text.partition("-")
    try:
        return Share.model_validate({"first": first, "stop": stop})
    except ValidationError:
        raise UserError(
            f"--share {text} is not a share FIRST-STOP of {PLACES} places; write 0-20000 for 2%"
        ) from None


# Hashing runs at some 500 MB/s on one core: a corpus up to this size is hashed at every start, a
# larger one on demand.
HASHED_AT_START_BYTES = 256 << 20
SpecialTokens = Literal["split", "parse"]
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
        description="files by path, those of a dataset by name; one on the hub has the hash of its"
        " tokens"
    )
    share: Share | None = Field(default=None, description="of the sources' documents; None: all")
    special_tokens: SpecialTokens = Field(
        default="split",
        description="those typed in a text: split as ordinary text, or parsed as such",
    )
    typed_special_tokens: int = Field(
        default=0, description="so many of them; those of sources that are token files not counted"
    )

    @property
    def sha256(self) -> str:
        """Return the identity of the tokens: the hash of the token file."""
        return self.bin.digest.removeprefix("sha256:")


class RawTokenFile(Frozen):
    """One raw token file."""

    path: str = Field(description="starts at the manifest's directory unless absolute")
    bytes: int


class NpyManifest(Frozen):
    """The record of OLMo's token files: raw little-endian arrays, headerless though called .npy.

    They are terabytes and nobody has read them: they have no hashes, and every batch is checked for
    tokens outside the vocabulary.
    """

    kind: Literal["npy"] = "npy"
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    eos_token_id: int
    max_token_id: None = None
    tokens: int
    tokenizer_sha256: str
    files: tuple[RawTokenFile, ...]

    @property
    def sha256(self) -> str:
        """Return a hash of dtype, file names and sizes, in order: the tokens' identity."""
        # Without directories: files that were moved hold the same tokens.
        files = [(Path(file.path).name, file.bytes, None) for file in self.files]
        return hashlib.sha256(json.dumps([self.dtype, files]).encode()).hexdigest()


_ANY_MANIFEST: TypeAdapter[Manifest | NpyManifest] = TypeAdapter(
    Annotated[Manifest | NpyManifest, Field(discriminator="kind")]
)


def read_manifest(prefix: Path) -> Manifest | NpyManifest:
    """Read PREFIX.json; UserError if it is missing, no manifest, or was changed."""
    path = Path(f"{prefix}.json")
    try:
        return as_model(_ANY_MANIFEST, read_sealed(path, f"{REMAKE} or 'index'"), path)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; make it with 'python -m train prepare' or 'index'"
        ) from None


def token_files(
    prefix: Path, manifest: Manifest | NpyManifest
) -> list[tuple[Path, int, str | None]]:
    """Return path, size in bytes and, where recorded, `sha256:HEX` of every file of a manifest."""
    match manifest:
        case NpyManifest():
            return [(prefix.parent / file.path, file.bytes, None) for file in manifest.files]
        case Manifest():
            records = {"bin": manifest.bin, "idx": manifest.idx}
            return [
                (Path(f"{prefix}.{suffix}"), record.bytes, record.digest)
                for suffix, record in records.items()
            ]
        case _:
            assert_never(manifest)


def check_files(prefix: Path, manifest: Manifest | NpyManifest, verify_hashes: bool) -> int:
    """Return the bytes of all files; UserError for one missing, or of another size or hash."""
    remake = REMAKE if isinstance(manifest, Manifest) else "restore it, or index the files again"
    files = token_files(prefix, manifest)
    for path, size, digest in files:
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path} is missing or truncated; {remake}")
        if verify_hashes and digest and digest_of(path, "sha256") != digest:
            raise UserError(f"{path} was changed after it was prepared; {remake}")
    return sum(size for _, size, _ in files)


def verify(prefix: Path) -> int:
    """Hash every file of a corpus; return their bytes. UserError for the first damage."""
    manifest = read_manifest(prefix)
    if isinstance(manifest, NpyManifest):
        raise UserError(f"{prefix} lists OLMo's files, which have no hashes; give prepared text")
    return check_files(prefix, manifest, verify_hashes=True)
