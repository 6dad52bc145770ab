"""Hashes of files as ALGORITHM:HEX, so that a record says how it is checked.

BLAKE3 in our own records of weights and state: measured on a core with SHA instructions it hashes
4.0 GB/s where SHA-256 hashes 1.3. SHA-256 wherever others write or read the hash: the hub,
downloads, published files, and texts, whose hash names them.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from blake3 import blake3

Algorithm = Literal["blake3", "sha256"]
SEAL = "sha256"  # key of a record of ours: the hash of its other values
PATTERN = r"^(blake3|sha256):[0-9a-f]{64}$"


class Hasher(Protocol):
    """A hash of all bytes that it was updated with, in their order."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add bytes; other threads run meanwhile."""
        ...

    def hexdigest(self) -> str:
        """Return the hash, hexadecimal."""
        ...


def new_hasher(algorithm: Algorithm = "blake3") -> Hasher:
    """Return a hash of no bytes yet."""
    return blake3() if algorithm == "blake3" else hashlib.sha256()


def digest_of(path: Path, algorithm: Algorithm = "blake3") -> str:
    """Return the hash of a file's bytes as ALGORITHM:HEX."""
    new: Any = partial(new_hasher, algorithm)
    with path.open("rb") as file:
        hashed = hashlib.file_digest(file, new)
    return f"{algorithm}:{hashed.hexdigest()}"


def digest_of_json(content: Any) -> str:
    """Return the SHA-256 of JSON content, hexadecimal: of its values, however they are laid out.

    It is that of the text without spaces and with sorted keys.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return content with its seal: the hash of all of its values, by which a change is noticed."""
    assert SEAL not in content
    return {**content, SEAL: digest_of_json(content)}


def unsealed(content: Any) -> dict[str, Any]:
    """Return what was sealed; ValueError, in a few words, for anything else."""
    if not isinstance(content, dict) or SEAL not in content:
        raise ValueError(f"has no {SEAL} of its values: it is another file, or was changed")
    values = {key: value for key, value in content.items() if key != SEAL}
    if digest_of_json(values) != content[SEAL]:
        raise ValueError(f"was changed after it was written (its {SEAL} differs)")
    return values
