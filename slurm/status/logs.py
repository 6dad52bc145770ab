"""Logs of a submitted study, by names of its submission: no typed text enters a path."""

from collections import deque
from pathlib import Path

from base.errors import UserError, printable
from base.names import nearest
from slurm.status.overview import look
from slurm.submission.record import Submission, existing_submission, log_of


def log_lines(study_dir: Path) -> list[str]:
    """Return a line for each element that failed or runs: situation, name, log."""
    lines = [
        f"{element.situation} {element.name} {element.log}"
        for element in look(study_dir).elements
        if element.situation in ("failed", "running", "started")
    ]
    return lines or ["nothing failed and nothing runs; give a step, an array or ARRAY/INDEX"]


def newest_logs(study_dir: Path, which: str) -> dict[str, Path]:
    """Return the newest log of each started element of a step, ARRAY/INDEX or array.

    Raises:
        UserError: the submission knows no such name, or nothing of it has started.
    """
    submission = existing_submission(study_dir)
    logs = {
        f"{job.array}/{index}": path
        for job in submission.jobs
        for index in job.indices
        if (path := log_of(study_dir, job.array, f"{job.id}_{index}")).exists()
    }
    newest = {name: logs[name] for name in _elements(submission, which) if name in logs}
    if not newest:
        raise UserError(
            f"{which} has no log, nothing of it has started; see 'python -m slurm status"
            f" {study_dir.name}'"
        )
    return newest


def _elements(submission: Submission, which: str) -> list[str]:
    """Return the elements that a name means, each as ARRAY/INDEX."""
    by_name: dict[str, list[str]] = {}
    for array in submission.job_arrays.values():
        for index, steps in enumerate(array.elements):
            element = f"{array.name}/{index}"
            by_name.setdefault(array.name, []).append(element)
            by_name |= {name: [element] for name in (element, *steps)}
    if which in by_name:
        return by_name[which]
    near = nearest(which, by_name)
    hint = f"did you mean {near}?" if near else "see status"
    raise UserError(
        f"{which!r:.120} is not a step, array or ARRAY/INDEX of what was submitted; {hint}"
    )


def last_lines(log: Path, count: int) -> str:
    """Return the last lines of a log."""
    with log.open("rb") as file:
        return printable(b"".join(deque(file, count)).decode(errors="replace"))
