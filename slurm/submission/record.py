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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from base.errors import UserError
from base.files import take_lock, write_json
from base.frozen import Frozen
from base.reading import read_model
from slurm.site import Site
from slurm.submission.arrays import JobArray
from slurm.submission.lines import append_line, damaged, read_lines

SLURM = "slurm"  # the directory below a study
SUBMISSION_JSON = "submission.json"
JOBS_JSONL = "jobs.jsonl"
PATIENCE_SECONDS = 60.0  # for another command, or a job that submits what comes next
PRIVATE = 0o600  # of files with lines of the site, which may be private

Element = tuple[str, int]  # name of the array, index


class Calling(Frozen):
    """A call of sbatch, noted before it is made."""

    event: Literal["calling"]
    token: str
    array: str
    indices: tuple[int, ...]
    script: str
    time: float


class Submitted(Frozen):
    """The answer to the call noted before: its job."""

    event: Literal["submitted"]
    job: int


class Refused(Frozen):
    """The answer to the call noted before: no job came of it."""

    event: Literal["refused"]


class Cancelled(Frozen):
    """Elements that the user cancelled."""

    event: Literal["cancelled"]
    elements: tuple[Element, ...]


class Replaced(Frozen):
    """Elements, as JOB_INDEX, that waited with an old script."""

    event: Literal["replaced"]
    elements: tuple[str, ...]


class Retried(Frozen):
    """A retry, from which on cancelled elements are submitted again."""

    event: Literal["retried"]


Event = Annotated[
    Calling | Submitted | Refused | Cancelled | Replaced | Retried, Field(discriminator="event")
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


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
    try:
        plan = read_model(Plan, study_dir / SLURM / SUBMISSION_JSON)
    except FileNotFoundError:
        return None
    path = study_dir / SLURM / JOBS_JSONL
    submission = _with_jobs(plan, read_lines(_EVENT, path), path)
    for (array, index), element in submission.element_ids.items():
        arrays = submission.job_arrays
        if array not in arrays or not 0 <= index < len(arrays[array].elements):
            raise damaged(path, f"job {element} is of {array}/{index}, which the study has not")
    return submission


def _with_jobs(plan: Plan, events: list[Event], path: Path) -> Submission:
    """Return the submission with the jobs that the lines of jobs.jsonl record."""
    jobs: list[Job] = []
    cancelled: set[Element] = set()
    replaced: set[str] = set()
    unanswered, retries = None, 0
    for event in events:
        if isinstance(event, Calling | Submitted | Refused) and (
            isinstance(event, Calling) is not (unanswered is None)
        ):
            raise damaged(path, "not every call of sbatch has one answer")
        match event:
            case Calling():
                call = event.model_dump(exclude={"event"})
                unanswered = Job(**call, retries=retries)
            case Submitted():
                assert unanswered
                jobs.append(replace(unanswered, id=event.job))
                unanswered = None
            case Refused():
                unanswered = None
            case Cancelled():
                cancelled |= set(event.elements)
            case Replaced():
                replaced |= set(event.elements)
            case Retried():
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
