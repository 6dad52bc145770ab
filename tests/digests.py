"""The BLAKE3 of a file, computed whole, for comparison with records."""

from pathlib import Path

from blake3 import blake3


def blake3_of(path: Path) -> str:
    """The hash as records write it."""
    return f"blake3:{blake3(path.read_bytes()).hexdigest()}"
