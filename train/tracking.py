"""metrics.jsonl, the truth about a run, and environment.json, what it ran on. MLflow is a mirror of both."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from train.command import UserError
from train.run_directory import write_json

TRACKED_PACKAGES = (
    *("torch", "megatron-core", "deepspeed", "transformer-engine", "transformers", "tokenizers", "safetensors"),
    *("numpy", "mlflow", "gptqmodel", "llmcompressor", "bitsandbytes", "lm-eval"),
)
TRAINED = "learning_rate"  # every row of an update has it, of a skipped one as well
ROW_KEYS = {"step", "tokens", "attempt", "time"}  # say when and where a row was written; all others are figures


def environment() -> dict[str, Any]:
    """Commit, versions, command line and host of this process: what a number needs to be made again."""
    project = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        if shutil.which("git") is None:  # a machine that got the files otherwise
            return None
        command = ["git", "-C", str(project), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    versions = {}
    for package in TRACKED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": None if status is None else bool(status),
        "argv": sys.argv,
        "python": platform.python_version(),
        "packages": versions,
        "host": socket.gethostname(),
        "slurm_job": _slurm_job(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _slurm_job() -> str | None:
    """The job as squeue names it: of an array JOB_TASK; None outside SLURM."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def attempts(environment_json: Path) -> list[dict[str, Any]]:
    """What environment.json records, one entry per attempt; FileNotFoundError before the first."""
    try:
        recorded: list[dict[str, Any]] = json.loads(environment_json.read_text())["attempts"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(f"{environment_json} is damaged; move it away, it only records earlier attempts") from None
    return recorded


def record_attempt(environment_json: Path, **details: Any) -> int:
    """Appends this start to environment.json; returns the number of this attempt, counted from 1."""
    recorded = attempts(environment_json) if environment_json.exists() else []
    recorded.append(environment() | details)
    write_json(environment_json, {"attempts": recorded})
    return len(recorded)


def amend_attempt(environment_json: Path, attempt: int, **details: Any) -> None:
    """Adds details to the entry of an attempt."""
    recorded = attempts(environment_json)
    recorded[attempt - 1] |= details
    write_json(environment_json, {"attempts": recorded})


class MetricsWriter:
    """Appends rows to metrics.jsonl, one JSON object a line, flushed at once. Rank 0 owns it."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        if path.exists():
            self._cut_torn_line(path)
        self._file = path.open("a")

    @staticmethod
    def _cut_torn_line(path: Path) -> None:
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)

    def append(self, step: int, tokens: int, **values: float) -> None:
        """One row: step and tokens seen, then the named values."""
        row = {"step": step, "tokens": tokens, "attempt": self._attempt, "time": time.time(), **values}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Makes the rows survive a power loss: before a checkpoint that they belong to."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Syncs and closes the file."""
        self.sync()
        self._file.close()


def surviving_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in the order of the file, each figure of a step once. A torn last line is left out.

    Of a step that several attempts trained the last attempt's values count, and none of the others', whatever the order
    of the lines: an orphan of an earlier attempt may have written after it.
    """
    rows: list[dict[str, Any]] = []
    places: dict[int, list[tuple[int, int]]] = {}  # by step: attempt and index of its rows
    try:
        text = path.read_text() if path.exists() else ""
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; restore it or train the run again") from None
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                row = json.loads(line)
                places.setdefault(row["step"], []).append((row.get("attempt", 0), len(rows)))
                rows.append(row)
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
                raise UserError(f"{path}: '{line[:60].strip()}' is no row of metrics; remove that line") from None
    for of_step in places.values():
        if len(of_step) > 1:
            _strip(rows, of_step)
    return [row for row in rows if row.keys() - ROW_KEYS]


def _strip(rows: list[dict[str, Any]], of_step: list[tuple[int, int]]) -> None:
    """Takes from the rows of a step what a later attempt, or a later line of the same one, said anew."""
    trained = max((attempt for attempt, index in of_step if TRAINED in rows[index]), default=0)
    said: set[str] = set()
    for attempt, index in sorted(of_step, reverse=True):
        kept = rows[index].keys() - said - ROW_KEYS if attempt >= trained else set()
        said |= kept
        rows[index] = {key: value for key, value in rows[index].items() if key in ROW_KEYS or key in kept}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One row per step, rising: what `surviving_rows` says of it."""
    merged: dict[int, dict[str, Any]] = {}
    for row in sorted(surviving_rows(path), key=lambda row: (row["step"], row.get("attempt", 0))):
        merged.setdefault(row["step"], {}).update(row)
    return list(merged.values())
