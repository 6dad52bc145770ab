"""The starts of an element, and when it is given up.

What counts is starts that failed by themselves, in a row, without progress. One that was preempted
or lost its node says nothing against the element, and one that came further begins a new row.
"""

import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from base.frozen import Frozen
from slurm.states import JobState
from slurm.submission.lines import append_line, damaged, read_lines
from slurm.submission.record import SLURM, Element, Submission
from study.pipeline.step import Step
from train.run.directory import RunDirectory

Ending = Literal["complete", "partial", "failed", "asked", "stopped", "unfit"]
# States of an element that did not end by its own fault.
NO_FAULT = ("PREEMPTED", "NODE_FAIL", "CANCELLED", "BOOT_FAIL", "REVOKED")


class _Start(Frozen):
    """A line on a start: how it began, how it ended, or both."""

    job: str
    restart: int
    host: str = ""
    nodes: int | None = None
    time: float | None = None
    position: int | None = None
    ended: Ending | None = None
    until: float | None = None


def restarts() -> int:
    """Return how often SLURM has queued this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _path(study_dir: Path, element: Element) -> Path:
    array, index = element
    return study_dir / SLURM / "starts" / f"{array}-{index}.jsonl"


def starts_of(study_dir: Path, element: Element) -> list[dict[str, Any]]:
    """Return the starts of an element: job, restart, host, nodes, time and position of its work.

    One that could say how it ended has also `ended`, of `Ending`, and `until`, a time.
    """
    starts: dict[tuple[str, int], dict[str, Any]] = {}
    path = _path(study_dir, element)
    for line in read_lines(_Start, path):
        values = line.model_dump(exclude_none=True)
        starts.setdefault((line.job, line.restart), {}).update(values)
    for (job, restart), start in starts.items():
        if not {"nodes", "time", "position"} <= start.keys():
            raise damaged(path, f"no line says how start {restart} of {job} began")
    return list(starts.values())


def record_start(study_dir: Path, element: Element, job: str, nodes: int, position: int) -> None:
    """Record that this start begins."""
    start = {"job": job, "restart": restarts(), "host": socket.gethostname(), "nodes": nodes}
    append_line(_path(study_dir, element), start | {"time": time.time(), "position": position})


def record_end(study_dir: Path, element: Element, job: str, ending: Ending) -> None:
    """Record how this start ended."""
    end = {"job": job, "restart": restarts(), "ended": ending, "until": time.time()}
    append_line(_path(study_dir, element), end)


def position_of(study_dir: Path, steps: Iterable[Step]) -> int:
    """Return how far the work of steps is: the newest checkpoints, and the number of outputs."""
    position = 0
    for step in steps:
        position += sum((study_dir / output).is_file() for output in step.outputs)
        if step.kind == "train":
            run = RunDirectory(study_dir / step.run)
            position += max([0, *run.complete_steps(), *run.complete_restarts()])
    return position


def jobs_since_retry(submission: Submission, element: Element) -> list[str]:
    """Return the jobs of an element that were submitted since the last retry, as "JOB_INDEX"."""
    jobs = submission.jobs_of.get(element, [])
    since = [job.element_id(element[1]) for job in jobs if job.retries == submission.retries]
    return [job for job in since if job not in submission.replaced]


def failures(
    starts: Sequence[dict[str, Any]], jobs: Sequence[str], state: JobState | None, position: int
) -> int:
    """Return how many starts in a row, up to now, failed without progress.

    Args:
        starts: all starts of the element.
        jobs: of the element, since the last retry; the last one has ended.
        state: what SLURM knows of the last job.
        position: of the element's work now.
    """
    count = 0
    for job in reversed(jobs):
        own = [start for start in starts if start["job"] == job]
        newest = job == jobs[-1]
        if not own:  # it ended before it could record anything
            count += not (newest and state and state.state in NO_FAULT)
        for start in reversed(own):
            if start["position"] < position:
                return count
            ending = start.get("ended")
            if ending is None and newest and start is own[-1]:
                ending = "lost" if state and state.state in NO_FAULT else "failed"
            count += ending == "failed"
    return count


def was_stopped(starts: Sequence[dict[str, Any]], jobs: Sequence[str]) -> bool:
    """Return whether the user stopped the newest start since the last retry."""
    own = [start for start in starts if start["job"] in jobs]
    return bool(own) and own[-1].get("ended") == "stopped"
