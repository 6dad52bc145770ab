"""Files and directories that are there whole or not at all, and their hashes."""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic import Field
from safetensors import SafetensorError

from base.digests import PATTERN, Algorithm, digest_of, sealed
from base.errors import UserError
from base.frozen import Frozen
from base.sharing import is_shared

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
POLL_SECONDS = 0.1  # between attempts at a lock that another process holds
PATIENCE_SECONDS = 3600.0  # for a lock whose holders do some minutes of work


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, hexadecimal."""
    return digest_of(path, "sha256").removeprefix("sha256:")


def file_identity(path: Path) -> tuple[int, int] | Path:
    """Return what all paths of one file have in common, links included; a path that is not there.

    >>> file_identity(Path("base/files.py")) == file_identity(Path("base/../base/files.py"))
    True
    """
    try:
        status = path.stat()
    except OSError:
        return path
    return status.st_dev, status.st_ino


def check_fetched(path: Path) -> None:
    """Raise UserError for the pointer that Git LFS leaves in the place of a file."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(
                f"{path} is a Git LFS pointer, the file itself was not fetched; run 'git lfs pull'"
                " where it is from"
            )


def fsync_path(path: Path) -> None:
    """Sync the bytes of a file, or the names in a directory, to survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_to_readers(path: Path) -> None:
    """Give a file the mode of a new one; safetensors makes them for their owner alone."""
    status = Path("/proc/self/status").read_text()  # os.umask() would change it for a moment
    umask = int(status.partition("\nUmask:")[2].split()[0], 8)
    path.chmod(0o666 & ~umask)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block that names no file, as that of a full disk.

    Errors of files that safetensors reports in words are raised as the OSError that they are.
    """
    try:
        yield
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        raise
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replaced_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield an empty file that replaces `path`, synced, if the block ends well.

    Its mode is by the umask. A private one is closed to all but the owner and the group that shares
    its directory.
    """
    mode = 0o666
    if private:
        mode = 0o660 if is_shared(path.parent) else 0o600
    # A name of its own: two processes may write the same file at once.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with naming(path):
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL, mode))
    try:
        with naming(path):
            yield unfinished
            # Content before name: after a power loss `path` must not name an empty file.
            fsync_path(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, content: Any, *, private: bool = False) -> None:
    """Write JSON to a new file that replaces `path`, whole or not at all; UserError for NaN."""
    try:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise UserError(
            f"{path} was not written, a figure is not finite ({error}); check the checkpoint"
        ) from None
    with replaced_file(path, private=private) as unfinished:
        unfinished.write_text(text)


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record: JSON that seals itself, whole or not at all."""
    write_json(path, sealed(content))


def take_lock(file: IO[Any], patience_seconds: float = 0.0) -> bool:
    """Return whether this process now holds the lock of an open file, until it is closed.

    Raises:
        UserError: the filesystem has no locks.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        # Polled, as flock itself has no timeout.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise OSError(error.errno, error.strerror, file.name) from None
            raise UserError(
                f"{file.name} cannot be locked ({error.strerror}); have its filesystem mounted with"
                " flock, or use another directory"
            ) from None
        else:
            return True


def freed(path: Path) -> str:
    """Return in words when a lock that another process holds will be free.

    The end of a process frees its locks. Those of a node that died are kept for a while by most
    filesystems, and by NFS 3 until the node is back.
    """
    return f"wait until it ends and run again, or if its node is gone for good, move {path} away"


@contextmanager
def locked(
    path: Path, patience_seconds: float = PATIENCE_SECONDS, holder: str = "another process is at it"
) -> Iterator[None]:
    """Hold the lock of a file; UserError says what its `holder` does, after the patience."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("a") as lock:
        if not take_lock(lock, patience_seconds):
            raise UserError(f"{holder}; {freed(path)}")
        yield


@contextmanager
def scratch_directory(unfinished: Path) -> Iterator[Path]:
    """Yield an empty directory of this process alone, removed at the end.

    Files that a killed process left there are removed: its lock ended with it. The lock is that of
    a file beside the directory: on NFS and Lustre, the lock of a directory holds on one node alone.
    """
    with _lock_beside(unfinished) as lock:
        try:
            remove_directory(unfinished)
            unfinished.mkdir()
            with naming(unfinished.parent):
                yield unfinished
        finally:
            with suppress(OSError):
                remove_directory(unfinished)
            # Still held: who has opened it by now sees in `_lock_beside` that it is gone.
            lock.unlink()


@contextmanager
def _lock_beside(directory: Path) -> Iterator[Path]:
    """Hold the lock of DIRECTORY.lock, a file that its holder removes."""
    path = directory.with_name(f"{directory.name}.lock")
    while True:
        with path.open("a") as lock:
            if not take_lock(lock):
                raise UserError(f"another process is writing {directory}; {freed(path)}")
            # Else its holder removed it between our open and our lock.
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                yield path
                return


@contextmanager
def committed_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `path` if the block ends well.

    Callers look first whether `path` holds its JSON, that is, is already complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(unfinished_of(path)) as unfinished:
        yield unfinished
        replace_directory(path, unfinished)


def unfinished_of(path: Path) -> Path:
    """Return the place of a directory until it is complete."""
    return path.parent / f".{path.name}.partial"


def replace_directory(path: Path, unfinished: Path) -> None:
    """Rename a directory to its place, from which what was there is removed."""
    fsync_path(unfinished)
    # Moved away first: a kill during removal must not leave half of it at its place.
    replaced = unfinished.with_suffix(".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        os.rename(path, replaced)
    os.rename(unfinished, path)
    shutil.rmtree(replaced, ignore_errors=True)
    fsync_path(path.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory with its content, if it is there.

    It is renamed first. After a rename whose answer was lost a node may have the old name cached,
    of what has another name by now: a server renames nothing by such a name.
    """
    removed = path.with_name(f"{path.name}.removed")
    if removed.exists():  # half of it, by a process that was killed
        shutil.rmtree(removed)
    with suppress(FileNotFoundError):
        os.rename(path, removed)
        shutil.rmtree(removed)


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
