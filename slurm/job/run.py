"""One job: its element, then the submission of what can start because of it."""

import os
from pathlib import Path

import typer

from base.errors import UserError
from slurm.job.advancing import advance_at_end
from slurm.job.element import RECORD_SECONDS, Element
from slurm.job.supervision import say
from slurm.submission.advance import adopt
from slurm.submission.record import existing_submission, submitting
from slurm.submission.starts import Ending


def is_recorded(study_dir: Path, array: str, index: int, job: str) -> bool:
    """Return whether this job is the newest that was submitted for the element.

    The command that submitted it may still be at it, or may have been killed before it recorded
    the answer of sbatch.
    """

    def newest() -> str | None:
        return existing_submission(study_dir).element_ids.get((array, index))

    if newest() == job:
        return True
    with submitting(study_dir, RECORD_SECONDS):
        adopt(study_dir)
    return newest() == job


def run_element(study_dir: Path, array: str, index: int, stop_file: Path) -> None:
    """Run one element and submit what comes after it, as `python -m slurm job` does.

    Raises:
        typer.Exit: a command failed.
    """
    parent, task = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    job = f"{parent}_{task}"  # the plain id of the last element would be the whole array's
    ended: Ending = "failed"
    try:
        if not is_recorded(study_dir, array, index, job):
            say(f"another job runs {array}/{index}, or it was cancelled: this one, {job}, leaves")
            return
        ended = Element(study_dir, array, index, stop_file, job).run()
    # Whatever it is, others may start now, and this element again.
    except Exception as error:
        say(f"error: {error}")
        if not isinstance(error, (UserError, OSError)):
            raise
    finally:
        advance_at_end(study_dir, job)
    if ended in ("failed", "unfit"):
        raise typer.Exit(1)
