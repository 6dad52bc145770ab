"""Files and directories that are there whole or not at all, and their hashes."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field

from base.digests import PATTERN, Algorithm, digest_of
from base.errors import UserError
from base.frozen import Frozen


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, hexadecimal."""
    return digest_of(path, "sha256").removeprefix("sha256:")


def fsync_path(path: Path) -> None:
    """Sync the bytes of a file, or the names in a directory, to survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield an empty file that replaces `path`, synced, if the block ends well."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        yield unfinished
        fsync_path(unfinished)
        unfinished.chmod(0o644)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a new file that replaces `path`, whole or not at all; UserError for NaN."""
    try:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise UserError(
            f"{path} was not written, a figure is not finite ({error}); check the checkpoint"
        ) from None
    with replaced_file(path) as unfinished:
        unfinished.write_text(text)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which the end of its process frees; other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_directory(unfinished: Path) -> Iterator[Path]:
    """Yield an empty directory of this process alone, removed at the end.

    What a killed process left there goes: its lock ended with it.
    """
    while True:
        unfinished.mkdir(exist_ok=True)
        lock = os.open(unfinished, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"another process is writing {unfinished}; wait until it ends and run again"
            ) from None
        if unfinished.exists() and os.path.samestat(os.fstat(lock), unfinished.stat()):
            break
        os.close(lock)  # its writer renamed it between our mkdir and our lock
    try:
        for left in unfinished.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.close(lock)


@contextmanager
def committed_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `path` if the block ends well.

    Callers look first whether `path` holds its JSON, that is, is already complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(path.parent / f".{path.name}.partial") as unfinished:
        yield unfinished
        fsync_path(unfinished)
        # Moved away first: a kill during removal must not leave half of it at its place.
        replaced = unfinished.with_suffix(".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            os.rename(path, replaced)
        os.rename(unfinished, path)
        shutil.rmtree(replaced, ignore_errors=True)
        fsync_path(path.parent)


class FileRecord(Frozen):
    """Size and hash of one file of a directory."""

    bytes: int
    digest: str = Field(pattern=PATTERN)  # ALGORITHM:HEX

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the hash."""
        return "sha256" if self.digest.startswith("sha256:") else "blake3"


def hash_file(path: Path, algorithm: Algorithm = "blake3") -> FileRecord:
    """Return size and hash of a file."""
    return FileRecord(bytes=path.stat().st_size, digest=digest_of(path, algorithm))


def record_file(path: Path, algorithm: Algorithm = "blake3") -> FileRecord:
    """Return size and hash of a file, which is synced to disk first."""
    fsync_path(path)
    return hash_file(path, algorithm)


def record_files(directory: Path, algorithm: Algorithm = "blake3") -> dict[str, FileRecord]:
    """Return size and hash of every file of a directory, synced first, by relative path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): record_file(path, algorithm) for path in paths}


def check_inside(source: Path, names: Iterable[str]) -> None:
    """Raise UserError if a relative path that `source` lists climbs out of its directory."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{source} names '{name}', which is outside its directory; restore it")


def first_damage(directory: Path, records: dict[str, FileRecord]) -> str | None:
    """Return the first damage of recorded files: missing, truncated or edited; else None."""
    for name, record in records.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != record.bytes:
            return f"{path} has {path.stat().st_size} bytes instead of {record.bytes}"
        if digest_of(path, record.algorithm) != record.digest:
            return f"{path} was changed after it was written (its hash differs)"
    return None


def verify_files(directory: Path, records: dict[str, FileRecord], next_action: str) -> None:
    """Raise UserError for the first damage of recorded files, with the next action."""
    damage = first_damage(directory, records)
    if damage:
        raise UserError(f"{damage}; {next_action}")
