"""The equal parts of two trainings of a run: figures of steps, tensors of checkpoints."""

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from base.files import sha256_of
from tests.runs import environment
from train.run.directory import PROBE, RunDirectory, step_of
from train.run.metrics import read_metrics
from train.running.watchdog import Heartbeat, LoopPhase

OF_THIS_MACHINE = {
    *("time", "attempt", "tokens_per_second", "model_flops_per_second", "memory_bytes"),
    *("save_seconds", "save_stall_seconds", "probe_seconds", "quarantined"),
}


def shard_hashes(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of the files that hold tensors."""
    paths = [
        path for path in sorted(checkpoint.iterdir()) if path.suffix in (".distcp", ".safetensors")
    ]
    assert paths, checkpoint
    return {path.name: sha256_of(path) for path in paths if path.name != PROBE}


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what depends on the machine."""
    rows = read_metrics(RunDirectory(run_dir).metrics)
    return [
        {key: value for key, value in row.items() if key not in OF_THIS_MACHINE} for row in rows
    ]


def assert_same(run: RunDirectory, other: RunDirectory, *steps: int) -> None:
    """Two runs have equal figures, and equal tensors in their checkpoints of some steps."""
    rows, expected = numbers(run.path), numbers(other.path)
    differing = [pair for pair in zip(rows, expected, strict=False) if pair[0] != pair[1]]
    assert rows == expected, (len(rows), len(expected), differing[:2])
    for step in steps:
        hashes = (shard_hashes(each.checkpoint(step)) for each in (run, other))
        assert len({tuple(sorted(files.items())) for files in hashes}) == 1, step


def copy_until(step: int, whole: RunDirectory, path: Path) -> RunDirectory:
    """A copy of a run that died after the checkpoint of a step, before it saved another."""
    copy = RunDirectory(shutil.copytree(whole.path, path))
    for checkpoint in copy.checkpoints.iterdir():
        if step_of(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    return copy


def tree(directory: Path) -> dict[str, str]:
    """Every file below a directory with its hash."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256_of(path) for path in paths}


def flip_a_byte(path: Path) -> None:
    """Damages a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def kill(process: subprocess.Popen) -> None:
    """Kill -9 a command and every process it started, which torchrun puts into sessions."""
    family = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)  # or torchrun might start another meanwhile
        family += psutil.Process(process.pid).children(recursive=True)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            member.kill()
    process.wait()


@contextlib.contextmanager
def started(
    command: list[str], variables: dict[str, str] | None = None, **kwargs: Any
) -> Iterator[subprocess.Popen]:
    """A running command, killed with all its processes at the end of the block."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment() | (variables or {}), **pipes, **kwargs)
    try:
        yield process
    finally:
        kill(process)
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def saves(directory: RunDirectory, rank: int, step: int) -> bool:
    """Return whether a rank has agreed with the others on a step and is about to save."""
    with contextlib.suppress(OSError, ValueError):
        beat = Heartbeat(*json.loads(directory.heartbeat(rank).read_text()))
        return beat.phase == LoopPhase.SAVE and beat.step == step
    return False


def last_step(run_dir: Path) -> int:
    """The last step in metrics.jsonl; 0 for none."""
    rows = read_metrics(RunDirectory(run_dir).metrics)
    return int(rows[-1]["step"]) if rows else 0
