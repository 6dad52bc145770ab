"""The starts of an element, which gives up after so many in a row without progress."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import write_json
from slurm.submission.record import SLURM


def restarts() -> int:
    """Return how often SLURM has queued this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _path(study_dir: Path, array: str, index: int) -> Path:
    return study_dir / SLURM / "starts" / f"{array}-{index}.json"


def starts_of(study_dir: Path, array: str, index: int) -> list[dict[str, Any]]:
    """Return the starts of an element: job, restart, host, time, and position of its work."""
    try:
        return list(json.loads(_path(study_dir, array, index).read_text()))
    except FileNotFoundError:
        return []


def record_start(study_dir: Path, array: str, index: int, position: int) -> None:
    """Record this start."""
    path = _path(study_dir, array, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    start = {
        "job": os.environ.get("SLURM_ARRAY_JOB_ID", ""),
        "restart": restarts(),
        "host": socket.gethostname(),
        "time": time.time(),
        "position": position,
    }
    write_json(path, [*starts_of(study_dir, array, index), start])


def _starts_of_this_job(study_dir: Path, array: str, index: int) -> list[dict[str, Any]]:
    job = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    return [start for start in starts_of(study_dir, array, index) if start["job"] == job]


def last_restart(study_dir: Path, array: str, index: int) -> int:
    """Return SLURM's count of restarts at the last recorded start of this job; 0 without one."""
    starts = _starts_of_this_job(study_dir, array, index)
    return max((start["restart"] for start in starts), default=0)


def check_progress(study_dir: Path, array: str, index: int, position: int, limit: int) -> None:
    """Raise UserError if the last `limit` starts of this job made no progress.

    Starts are counted, not hours: a run that is preempted daily for a month goes on, one that dies
    at once does not.
    """
    recent = _starts_of_this_job(study_dir, array, index)[-limit:]
    if len(recent) == limit and all(start["position"] >= position for start in recent):
        raise UserError(
            f"{limit} starts of {array}/{index} came no further; read this log for what ended them,"
            f" then 'python -m slurm retry {study_dir.name}'"
        )
