"""The record of a submission: STUDY/slurm/submission.json, written after every sbatch.

STUDY/slurm/submission.json              site, arrays, and the jobs that run their elements
STUDY/slurm/scripts/ARRAY.sh             the scripts as submitted; beside them site.json and
                                         environment.json
STUDY/slurm/logs/ARRAY-JOB_INDEX.log     of an element, over all its starts
STUDY/slurm/starts/ARRAY-INDEX.json      one entry per start, with how far its work had come
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from base.errors import UserError, explain_validation
from base.files import write_json
from base.frozen import Frozen
from slurm.site import Site
from slurm.submission.arrays import JobArray

SLURM = "slurm"  # the directory below a study
SUBMISSION_JSON = "submission.json"


class Job(Frozen):
    """One call of sbatch: elements `indices` of an array."""

    array: str
    id: int
    indices: tuple[int, ...]
    time: float = Field(description="seconds since the epoch")


class Submission(Frozen):
    """The site, the arrays and all submitted jobs; of an element the newest job counts.

    `submitting` names the array whose sbatch was called last: if that call was interrupted it may
    have made a job that is not among `jobs`.
    """

    site: Site
    arrays: tuple[JobArray, ...]
    jobs: tuple[Job, ...] = ()
    submitting: str | None = None

    @property
    def job_arrays(self) -> dict[str, JobArray]:
        """By name, each after those it depends on."""
        return {array.name: array for array in self.arrays}

    def element_ids(self) -> dict[tuple[str, int], str]:
        """(array, index) -> "JOB_INDEX", of the newest job that runs it."""
        return {
            (job.array, index): f"{job.id}_{index}" for job in self.jobs for index in job.indices
        }


def script_path(study_dir: Path, array: str) -> Path:
    """Return the path of the script of an array as submitted."""
    return study_dir / SLURM / "scripts" / f"{array}.sh"


def log_of(study_dir: Path, array: str, element: str) -> Path:
    """Return the path of the log of an element, over all its starts."""
    return study_dir / SLURM / "logs" / f"{array}-{element}.log"


def read_submission(study_dir: Path) -> Submission | None:
    """Read the record of a study; None if nothing was submitted, UserError if damaged."""
    path = study_dir / SLURM / SUBMISSION_JSON
    try:
        return Submission.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise explain_validation(str(path), error) from None


def existing_submission(study_dir: Path) -> Submission:
    """Read the record of a study; UserError if nothing of it was submitted."""
    submission = read_submission(study_dir)
    if submission is None:
        raise UserError(
            f"nothing of {study_dir} was submitted; do so with 'python -m slurm submit NAME --site"
            " FILE'"
        )
    return submission


def write_submission(study_dir: Path, submission: Submission) -> None:
    """Write the record, whole or not at all."""
    write_json(study_dir / SLURM / SUBMISSION_JSON, submission.model_dump(mode="json"))


@contextmanager
def submitting(study_dir: Path) -> Iterator[None]:
    """Hold the study's submission; UserError while another command does."""
    place = study_dir / SLURM
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another command is submitting {study_dir}; wait until it ends and run again"
            ) from None
        yield
