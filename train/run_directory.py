"""Where the files of a run lie, how a file or directory is committed, and how it is checked before it is read."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError

from train.command import UserError, explain_validation
from train.frozen import Frozen

CHECKPOINT_JSON = "checkpoint.json"
PROBE = "probe.safetensors"
PROBE_SEQUENCES, PROBE_TOKENS = 2, 32  # what an engine computes for it, or less where sequences are shorter
PROBE_OUTPUTS = "outputs/"  # begins what a module put out there, before its HF name
MODEL_WEIGHTS = "model.safetensors"  # whole, by HF name: in HF directories and in DeepSpeed checkpoints
IMPORTED_FROM = "hf"  # directory of an imported checkpoint: configuration and tokenizer of its source


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Makes the bytes of a file, or the names in a directory, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """An empty file beside `path` that takes its name, synced, when the block ends well and vanishes otherwise."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    aside = Path(name)
    try:
        yield aside
        fsync_path(aside)
        aside.chmod(0o644)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON aside, syncs it and renames it: the file is there whole or not at all. NaN and infinity raise."""
    try:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise UserError(f"{path} was not written, a figure is not finite ({error}); check the checkpoint") from None
    with replaced_file(path) as aside:
        aside.write_text(text)


def _claim(aside: Path) -> int:
    """Makes `aside` an empty directory that this process alone writes to; returns the descriptor of its lock.

    What a killed process left there goes: its lock ended with it.
    """
    while True:
        aside.mkdir(exist_ok=True)
        descriptor = os.open(aside, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"another process is writing {aside}; wait until it ends and run again") from None
        if aside.exists() and os.path.samestat(os.fstat(descriptor), aside.stat()):
            break
        os.close(descriptor)  # its writer renamed it between our mkdir and our lock
    for left in aside.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return descriptor


@contextmanager
def scratch_directory(aside: Path) -> Iterator[Path]:
    """An empty directory of this process alone, removed at the end; UserError while another process holds it."""
    lock = _claim(aside)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


@contextmanager
def committed_directory(path: Path) -> Iterator[Path]:
    """An empty directory beside `path` that takes its name when the block ends well and vanishes otherwise.

    Whatever lay at `path` is replaced: callers ask `path`'s JSON first whether it is already complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(path.parent / f".{path.name}.partial") as aside:
        yield aside
        fsync_path(aside)
        if path.exists():  # moved away first: a kill while it is removed must not leave half of it at its place
            replaced = aside.with_suffix(".replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(path, replaced)
            os.rename(aside, path)
            shutil.rmtree(replaced)
        else:
            os.rename(aside, path)
        fsync_path(path.parent)


class FileRecord(Frozen):
    """Size and hash of one file of a directory."""

    bytes: int
    sha256: str


def record_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, which is synced to disk first."""
    fsync_path(path)
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_of(path))


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Size and SHA-256 of every file below `directory`, by relative path; each is synced to disk first."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): record_file(path) for path in paths}


def check_inside(source: Path, names: Iterable[str]) -> None:
    """UserError if a path that `source` lists, relative to its directory, climbs out of it."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{source} names '{name}', which lies elsewhere; restore it")


def first_damage(directory: Path, records: dict[str, FileRecord]) -> str | None:
    """The first recorded file that is missing, truncated or edited, and how; None for a directory that is whole."""
    for name, record in records.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != record.bytes:
            return f"{path} has {path.stat().st_size} bytes instead of {record.bytes}"
        if sha256_of(path) != record.sha256:
            return f"{path} was changed after it was written (its SHA-256 differs)"
    return None


def verify_files(directory: Path, records: dict[str, FileRecord], next_action: str) -> None:
    """UserError naming the first damage of the directory and what to do about it."""
    damage = first_damage(directory, records)
    if damage:
        raise UserError(f"{damage}; {next_action}")


class CheckpointRecord(Frozen):
    """checkpoint.json, written last: a checkpoint without it does not exist."""

    run: str
    fingerprint: str
    step: int
    tokens: int
    learning_rate: float
    train_loss: float | None  # nats per token of the last step; None before the first and for an average
    held_out_loss: float | None  # nats per token; None where a restart checkpoint was not evaluated
    engine: str
    precision: str
    world_size: int
    layout: dict[str, int]  # tensor, pipeline, data
    attempt: int
    data_sha256: dict[str, str]  # of the tokens: train, held_out
    model: dict[str, Any]
    average: dict[str, Any] | None = None  # kind, interval_steps, window or decay, steps; None: as training left them
    imported: dict[str, Any] | None = None  # source, revision, hashes, if it was made from an HF directory
    average_starts: dict[str, int] = Field(default={})  # by average: the step behind which its first member may lie
    accepted: tuple[tuple[float, float], ...] = ()  # losses and gradient norms that the next spike is told by
    files: dict[str, FileRecord]


def step_name(step: int) -> str:
    """Directory name of a step: step00012000."""
    return f"step{step:08d}"


def _complete_steps(parent: Path) -> list[int]:
    names = [path.parent.name for path in parent.glob(f"step*/{CHECKPOINT_JSON}")]
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"step\d{8,}", name))


class RunDirectory:
    """The paths of one run. Names are made and found here and nowhere else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_json = path / "run.json"
        self.environment_json = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.ranks = path / "ranks.jsonl"
        self.status_json = path / "status.json"
        self.stop_file = path / "STOP"
        self.checkpoints = path / "checkpoints"
        self.restarts = path / "restarts"
        self.quarantine = path / "quarantine"
        self.hf = path / "hf"

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after update `step`."""
        return self.checkpoints / step_name(step)

    def complete_steps(self) -> list[int]:
        """Steps whose checkpoint is complete, rising; averages and restart checkpoints do not count."""
        return _complete_steps(self.checkpoints)

    def restart(self, step: int) -> Path:
        """Directory of the restart checkpoint after update `step`."""
        return self.restarts / step_name(step)

    def complete_restarts(self) -> list[int]:
        """Steps whose restart checkpoint is complete, rising."""
        return _complete_steps(self.restarts)

    def average_name(self, name: str, step: int) -> str:
        """Directory name of an average as of update `step`: lawa5x500-step00012000."""
        return f"{name}-{step_name(step)}"

    def average_checkpoint(self, name: str, step: int) -> Path:
        """Directory of the checkpoint of an average, named as in `RunConfig.averages`, as of update `step`."""
        return self.checkpoints / self.average_name(name, step)

    def resolve(self, path: str) -> Path:
        """A path of run.json, which starts at the run directory whether that exists yet or not."""
        return Path(os.path.normpath(self.path.absolute() / path))


def read_checkpoint_record(checkpoint: Path) -> CheckpointRecord:
    """Reads checkpoint.json without touching the shards."""
    path = checkpoint / CHECKPOINT_JSON
    try:
        record = CheckpointRecord.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{checkpoint} holds no {CHECKPOINT_JSON}: it is no complete checkpoint; give another"
        ) from None
    except (ValidationError, UnicodeDecodeError) as error:
        if isinstance(error, ValidationError):
            raise explain_validation(str(path), error) from None
        raise UserError(f"{path} is not text; delete {checkpoint} to go on from the checkpoint before it") from None
    check_inside(path, record.files)
    return record


def verify_checkpoint(checkpoint: Path) -> CheckpointRecord:
    """The record of a checkpoint whose every file has the recorded size and hash; UserError otherwise.

    Sharded checkpoints hold pickles (`.metadata`, `common.pt`): nothing opens them before this has passed.
    """
    record = read_checkpoint_record(checkpoint)
    verify_files(checkpoint, record.files, f"restore it, or delete {checkpoint} to go on from the checkpoint before it")
    return record
