"""Logs of a submitted study, by names of its submission: no typed text enters a path."""

import difflib
import os
import re
from pathlib import Path

from base.errors import UserError
from slurm.status.overview import logs_of, look
from slurm.submission.record import Submission, existing_submission


def listed(study_dir: Path) -> list[str]:
    """Return a line for each element that failed or runs: situation, name, log."""
    found = [
        f"{element.situation} {element.name} {element.log}"
        for element in look(study_dir).elements
        if element.situation in ("failed", "running", "started")
    ]
    return found or ["nothing failed and nothing runs; give a step, an array or ARRAY/INDEX"]


def chosen_log(study_dir: Path, which: str) -> Path | list[str]:
    """Return the newest log of a step, ARRAY/INDEX or small array; of a larger array, lines.

    Raises:
        UserError: the submission knows no such name, or nothing of it has started.
    """
    submission = existing_submission(study_dir)
    elements = _elements(submission, which)
    logs = {
        (array, index): logs_of(study_dir, submission, array, index) for array, index in elements
    }
    started = {f"{array}/{index}": paths[-1] for (array, index), paths in logs.items() if paths}
    if not started:
        raise UserError(
            f"{which} has no log, nothing of it has started; see 'python -m slurm status"
            f" {study_dir.name}'"
        )
    if len(elements) > 1:
        return [f"{name} {path}" for name, path in started.items()]
    return next(iter(started.values()))


def _elements(submission: Submission, which: str) -> list[tuple[str, int]]:
    """Return the elements that a name stands for."""
    arrays = submission.job_arrays
    array, _, index = which.rpartition("/")
    if (
        array in arrays
        and re.fullmatch(r"\d{1,9}", index, re.ASCII)
        and int(index) < len(arrays[array].elements)
    ):
        return [(array, int(index))]
    if which in arrays:
        return [(which, index) for index in range(len(arrays[which].elements))]
    steps = {
        step: (one.name, number)
        for one in arrays.values()
        for number, own in enumerate(one.elements)
        for step in own
    }
    if which in steps:
        return [steps[which]]
    near = difflib.get_close_matches(which, [*arrays, *steps], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(
        f"{which!r:.120} is no step, array or ARRAY/INDEX of what was"
        f" submitted{hint or '; see status'}"
    )


def tail_lines(log: Path, count: int) -> str:
    """Return the last lines of a log, read from its end."""
    size, content = 2**16, b""
    with log.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        while content.count(b"\n") <= count and len(content) < length:
            file.seek(max(0, length - size))
            content = file.read(length - file.tell())
            size *= 4
    return b"".join(content.splitlines(keepends=True)[-count:]).decode(errors="replace")
