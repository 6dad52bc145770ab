"""The record of a submission.

STUDY/slurm/submission.json              the site, and the arrays that the study was cut into
STUDY/slurm/jobs.jsonl                   a line before each sbatch call and one after it; what was
                                         cancelled, and when a retry began
STUDY/slurm/scripts/ARRAY.sh             the newest script of each array; beside them site.json and
                                         environment.json
STUDY/slurm/logs/ARRAY-JOB_INDEX.log     of an element of a job, over all its starts
STUDY/slurm/starts/ARRAY-INDEX.jsonl     two lines per start: how far the work had come, and how the
                                         start ended
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from base.errors import UserError, explain_validation
from base.files import take_lock, write_json
from base.frozen import Frozen
from slurm.site import Site
from slurm.submission.arrays import JobArray

SLURM = "slurm"  # the directory below a study
SUBMISSION_JSON = "submission.json"
JOBS_JSONL = "jobs.jsonl"
PATIENCE_SECONDS = 60.0  # for another command, or a job that submits what comes next
PRIVATE = 0o600  # of files with lines of the site, which may be private

Element = tuple[str, int]  # name of the array, index


class Plan(Frozen):
    """The site and the arrays of a study: the content of submission.json."""

    site: Site
    arrays: tuple[JobArray, ...]


@dataclass(frozen=True)
class Job:
    """One call of sbatch: elements `indices` of an array."""

    token: str  # in the job's comment: of this very call
    array: str
    indices: tuple[int, ...]
    script: str  # hash of what was submitted
    time: float  # seconds since the epoch
    retries: int  # that came before it
    id: int | None = None  # None: the answer of sbatch was not recorded

    def element_id(self, index: int) -> str:
        """Return the job of one element, as "JOB_INDEX"."""
        return f"{self.id}_{index}"


@dataclass(frozen=True)
class Submission:
    """The site, the arrays and all sbatch calls of a study; of an element the newest job counts."""

    site: Site
    arrays: tuple[JobArray, ...]
    jobs: tuple[Job, ...] = ()
    unanswered: Job | None = None  # may have made a job that is not among `jobs`
    cancelled: frozenset[Element] = frozenset()  # since the last retry, by the user
    retries: int = 0
    replaced: frozenset[str] = frozenset()  # "JOB_INDEX" of what waited with an old script

    @cached_property
    def jobs_of(self) -> dict[Element, list[Job]]:
        """The jobs of every element that was submitted, the newest last."""
        jobs_of: dict[Element, list[Job]] = {}
        for job in self.jobs:
            for index in job.indices:
                jobs_of.setdefault((job.array, index), []).append(job)
        return jobs_of

    @cached_property
    def element_ids(self) -> dict[Element, str]:
        """The newest job of every element that was submitted, as "JOB_INDEX"."""
        return {key: jobs[-1].element_id(key[1]) for key, jobs in self.jobs_of.items()}

    @cached_property
    def job_arrays(self) -> dict[str, JobArray]:
        """The arrays by name, each after those that make what it reads."""
        return {array.name: array for array in self.arrays}


def script_path(study_dir: Path, array: str) -> Path:
    """Return the path of the newest script of an array."""
    return study_dir / SLURM / "scripts" / f"{array}.sh"


def log_of(study_dir: Path, array: str, element: str) -> Path:
    """Return the path of the log of an element, over all its starts."""
    return study_dir / SLURM / "logs" / f"{array}-{element}.log"


def read_submission(study_dir: Path) -> Submission | None:
    """Read the record of a study; None if nothing was submitted, UserError if damaged."""
    path = study_dir / SLURM / SUBMISSION_JSON
    try:
        plan = Plan.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise explain_validation(str(path), error) from None
    return _with_jobs(plan, read_lines(study_dir / SLURM / JOBS_JSONL))


def _with_jobs(plan: Plan, lines: list[dict[str, Any]]) -> Submission:
    """Return the submission with the jobs that the lines of jobs.jsonl record."""
    # a call to sbatch is noted before it is made, and answered by one of two lines
    jobs: list[Job] = []
    cancelled: set[Element] = set()
    replaced: set[str] = set()
    unanswered, retries = None, 0
    for line in lines:
        event = line.pop("event")
        if event == "calling":
            unanswered = Job(**line | {"indices": tuple(line["indices"])}, retries=retries)
        elif event == "submitted":
            assert unanswered
            jobs.append(replace(unanswered, id=line["job"]))
            unanswered = None
        elif event == "refused":
            unanswered = None
        elif event == "cancelled":
            cancelled |= {(array, index) for array, index in line["elements"]}
        elif event == "replaced":
            replaced |= set(line["elements"])
        elif event == "retried":
            cancelled, retries = set(), retries + 1
    return Submission(
        plan.site,
        plan.arrays,
        tuple(jobs),
        unanswered,
        frozenset(cancelled),
        retries,
        frozenset(replaced),
    )


def existing_submission(study_dir: Path) -> Submission:
    """Read the record of a study; UserError if nothing of it was submitted."""
    submission = read_submission(study_dir)
    if submission is None:
        raise UserError(
            f"nothing of {study_dir} was submitted; do so with 'python -m slurm submit NAME --site"
            " FILE'"
        )
    return submission


def write_plan(study_dir: Path, site: Site, arrays: Iterable[JobArray], *, anew: bool) -> None:
    """Write submission.json; `anew`, forget the jobs of another cut, all of which have ended."""
    if anew:
        (study_dir / SLURM / JOBS_JSONL).unlink(missing_ok=True)
    plan = Plan(site=site, arrays=tuple(arrays))
    path = study_dir / SLURM / SUBMISSION_JSON
    write_json(path, plan.model_dump(mode="json"), mode=PRIVATE)


def append(study_dir: Path, event: str, **content: Any) -> None:
    """Add a line to jobs.jsonl."""
    append_line(study_dir / SLURM / JOBS_JSONL, {"event": event, **content})


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Add a line to a JSONL file, synced, after one that was cut off if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        whole = file.tell() == 0
        if not whole:
            file.seek(-1, os.SEEK_END)
            whole = file.read() == b"\n"
        file.write(b"" if whole else b"\n")
        file.write(json.dumps(content).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file, but for those that were cut off; empty without a file."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(dict(json.loads(line)))
        except ValueError:
            continue
    return rows


@contextmanager
def submitting(study_dir: Path, patience_seconds: float | None = None) -> Iterator[None]:
    """Hold the study's submission; UserError if another command does, for PATIENCE_SECONDS."""
    patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    place = study_dir / SLURM
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("a") as lock:
        if not take_lock(lock, patience_seconds):
            raise UserError(
                f"another command is submitting {study_dir}; wait until it ends and run again"
            )
        yield
