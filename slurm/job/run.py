"""One job: its element, then the submission of what can start because of it."""

import os
import time
from pathlib import Path

import typer

from base.errors import UserError
from slurm.job.advancing import advance_at_end
from slurm.job.element import Element
from slurm.job.supervision import say
from slurm.submission.advance import adopt
from slurm.submission.record import existing_submission, submitting
from slurm.submission.starts import Ending

PAUSE_SECONDS = 30.0  # after a failure: a full disk or a lost mount may recover


def is_recorded(study_dir: Path, array: str, index: int, job: str) -> bool:
    """Return whether this job is the newest that was submitted for the element.

    The command that submitted it may still be at it, or may have been killed before it recorded
    the answer of sbatch.
    """

    def newest() -> str | None:
        return existing_submission(study_dir).element_ids.get((array, index))

    if newest() == job:
        return True
    with submitting(study_dir):
        adopt(study_dir)
    return newest() == job


def run_element(study_dir: Path, array: str, index: int, stop_file: Path) -> None:
    """Run one element and submit what comes after it, as `python -m slurm job` does.

    Raises:
        typer.Exit: a command failed.
    """
    parent, task = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    job = f"{parent}_{task}"  # the plain id of the last element would be the whole array's
    ending: Ending = "failed"
    try:
        if is_recorded(study_dir, array, index, job):
            ending = Element(study_dir, array, index, stop_file, job).run()
        else:
            ending = "complete"
            say(f"another job runs {array}/{index}, or it was cancelled: this one, {job}, leaves")
    except (UserError, OSError) as error:
        say(f"error: {error}")
    finally:  # whatever it was, others may start now, and this element again
        if ending == "failed" and not stop_file.exists():
            time.sleep(PAUSE_SECONDS)
        advance_at_end(study_dir, job)
    if ending in ("failed", "unfit"):
        raise typer.Exit(1)
