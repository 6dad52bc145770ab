"""The record of a submission.

STUDY/slurm/submission.json              the site, and the arrays that the study was cut into
STUDY/slurm/jobs.jsonl                   a line before each sbatch call and one after it; what was
                                         cancelled, and when a retry began
STUDY/slurm/scripts/ARRAY.sh             the newest script of each array; beside them site.json and
                                         environment.json
STUDY/slurm/logs/ARRAY-JOB_INDEX.log     of an element of a job, over all its starts
STUDY/slurm/starts/ARRAY-INDEX.jsonl     two lines per start: how far the work had come, and how the
                                         start ended
STUDY/slurm/excluded.json                nodes that no training goes to, with the reason

An element is given up after starts that failed by themselves or met their time limit, in a row,
without progress. One that was preempted or lost its node says nothing against the element, and one
that came further begins a new row. Several processes add lines to the JSONL files: one may be cut
off by its end.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, assert_never

from pydantic import Field, TypeAdapter

from base.errors import UserError
from base.files import locked, naming, write_json
from base.frozen import Frozen
from base.names import take_one_of
from base.reading import as_model, parse_json, read_model, read_regular
from slurm.cluster import JobState
from slurm.site import Site
from slurm.submission.arrays import JobArray
from study.step import Step
from train.run.directory import RunDirectory

SLURM = "slurm"  # the directory below a study
SUBMISSION_JSON = "submission.json"
JOBS_JSONL = "jobs.jsonl"
PATIENCE_SECONDS = 60.0  # for another command, or a job that submits what comes next
SILENT_SECONDS = 300.0  # a job touches its log every 30 s, which NFS may show 60 s later

Element = tuple[str, int]  # name of the array, index
Ending = Literal["complete", "partial", "failed", "time limit", "asked", "stopped", "unfit", "lost"]
FAULTS: tuple[Ending, ...] = ("failed", "time limit")  # the latter without progress
# States of an element that did not end by its own fault.
NO_FAULT = ("PREEMPTED", "NODE_FAIL", "CANCELLED", "BOOT_FAIL", "REVOKED")
EXCLUDED_JSON = "excluded.json"  # node -> reason


class Calling(Frozen):
    """A call of sbatch, noted before it is made: elements `indices` of an array."""

    event: Literal["calling"]
    token: str  # in the job's comment: of this very call
    array: str
    indices: tuple[int, ...]
    script: str  # hash of what was submitted
    time: float  # seconds since the epoch
    user: str  # whose job it is


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


class Leaving(Frozen):
    """A job, as JOB_INDEX, that runs nothing any more: it submits what comes next, and ends."""

    event: Literal["leaving"]
    job: str


class Retried(Frozen):
    """A retry, from which on cancelled elements are submitted again."""

    event: Literal["retried"]


Event = Annotated[
    Calling | Submitted | Refused | Leaving | Cancelled | Replaced | Retried,
    Field(discriminator="event"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class SubmissionPlan(Frozen):
    """The site and the arrays of a study: the content of submission.json."""

    site: Site
    arrays: tuple[JobArray, ...]


class SbatchCall(Calling):
    """One call of sbatch and its job."""

    retries: int  # that came before it
    id: int | None = None  # None: the answer of sbatch was not recorded

    def element_id(self, index: int) -> str:
        """Return the job of one element, as "JOB_INDEX"."""
        return f"{self.id}_{index}"


@dataclass
class Submission:
    """The site, the arrays and all sbatch calls of a study; of an element the newest job counts."""

    site: Site
    arrays: tuple[JobArray, ...]
    jobs: list[SbatchCall] = field(default_factory=list)
    unanswered: SbatchCall | None = None  # may have made a job that is not among `jobs`
    cancelled: set[Element] = field(default_factory=set)  # since the last retry, by the user
    retries: int = 0
    # As "JOB_INDEX": what waited with an old script, and what runs nothing any more, newest last.
    replaced: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    @cached_property
    def jobs_of(self) -> dict[Element, list[SbatchCall]]:
        """The jobs of every element that was submitted, the newest last."""
        jobs_of: dict[Element, list[SbatchCall]] = {}
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
        plan = read_model(SubmissionPlan, study_dir / SLURM / SUBMISSION_JSON)
    except FileNotFoundError:
        return None
    path = study_dir / SLURM / JOBS_JSONL
    submission = _with_jobs(plan, read_lines(_EVENT, path), path)
    for (array, index), element in submission.element_ids.items():
        arrays = submission.job_arrays
        if array not in arrays or not 0 <= index < len(arrays[array].elements):
            raise damaged(path, f"job {element} is of {array}/{index}, which the study has not")
    return submission


def _with_jobs(plan: SubmissionPlan, events: list[Event], path: Path) -> Submission:
    """Return the submission with the jobs that the lines of jobs.jsonl record."""
    submission = Submission(plan.site, plan.arrays)
    for event in events:
        unanswered = submission.unanswered
        # Calls and answers alternate: a second open call, or an answer to none, is damage.
        if isinstance(event, Calling | Submitted | Refused) and (
            isinstance(event, Calling) is not (unanswered is None)
        ):
            raise damaged(path, "not every call of sbatch has one answer")
        match event:
            case Calling():
                call = SbatchCall(**event.model_dump(), retries=submission.retries)
                submission.unanswered = call
            case Submitted():
                assert unanswered
                submission.jobs.append(unanswered.model_copy(update={"id": event.job}))
                submission.unanswered = None
            case Refused():
                submission.unanswered = None
            case Cancelled():
                submission.cancelled |= set(event.elements)
            case Replaced():
                submission.replaced |= set(event.elements)
            case Leaving():
                submission.left.append(event.job)
            case Retried():
                # Calls note how many retries came before: failures of earlier ones no longer count.
                submission.cancelled, submission.retries = set(), submission.retries + 1
            case _:
                assert_never(event)
    return submission


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
    # Before the plan: a crash in between leaves no jobs, never old jobs beside a new cut.
    if anew:
        (study_dir / SLURM / JOBS_JSONL).unlink(missing_ok=True)
    plan = SubmissionPlan(site=site, arrays=tuple(arrays))
    write_json(study_dir / SLURM / SUBMISSION_JSON, plan.model_dump(mode="json"), private=True)


def append(study_dir: Path, event: str, **content: Any) -> None:
    """Add a line to jobs.jsonl."""
    append_line(study_dir / SLURM / JOBS_JSONL, {"event": event, **content})


@contextmanager
def submitting(study_dir: Path, patience_seconds: float | None = None) -> Iterator[None]:
    """Hold the study's submission; UserError if another command does, for PATIENCE_SECONDS."""
    patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    holder = f"another command is submitting {study_dir}"
    with locked(study_dir / SLURM / ".lock", patience_seconds, holder):
        yield


class _Start(Frozen):
    """A line on a start: how it began, how it ended, or both."""

    job: str
    restart: int
    host: str | None = None
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
        # A requeued job keeps its id; the number of its restarts tells the starts apart.
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


def record_killed(study_dir: Path, element: Element, job: str, ending: Ending) -> None:
    """Record how the last start of a job ended, if it was killed before it could record that.

    Recorded before the next job starts: of an earlier one SLURM soon knows nothing any more.
    """
    starts = [start for start in starts_of(study_dir, element) if start["job"] == job]
    if starts and "ended" not in starts[-1]:
        restart = starts[-1]["restart"]
        append_line(_path(study_dir, element), {"job": job, "restart": restart, "ended": ending})


def ending_of(state: JobState | None) -> Ending | None:
    """Return how a start ended that was killed; None while SLURM is still ending its job."""
    if state and state.state == "COMPLETING":
        return None
    return "lost" if state and state.state in NO_FAULT else "failed"


def lives(study_dir: Path, element: Element, job: str) -> bool | None:
    """Return whether a job that SLURM does not list is at work; None for one that may wait."""
    starts = [start for start in starts_of(study_dir, element) if start["job"] == job]
    # SLURM requeues one that it asked to stop for another job.
    ended = starts[-1].get("ended") if starts else "asked"
    if ended not in (None, "asked"):
        return False
    # Both times are of the filesystem's clock: those of two machines may differ.
    directory, log = study_dir / SLURM, log_of(study_dir, element[0], job)
    with suppress(OSError):  # of somebody who may only read
        os.utime(directory)
    if log.exists() and directory.stat().st_mtime - log.stat().st_mtime < SILENT_SECONDS:
        return True
    return None if ended else False


def position_of(study_dir: Path, steps: Iterable[Step]) -> int:
    """Return how far the work of steps is: the newest checkpoints, and the number of outputs."""
    position = 0
    for step in steps:
        position += sum((study_dir / output).is_file() for output in step.outputs)
        if step.kind == "train":
            run = RunDirectory(study_dir / step.run)
            # A mix of units: positions are only compared, to tell whether work came further.
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
    """Return how many starts in a row, up to now, ended by their own fault without progress.

    Args:
        starts: all starts of the element.
        jobs: of the element, since the last retry; the last one has ended.
        state: what SLURM knows of the last job.
        position: of the element's work now.
    """
    count = 0
    for job in reversed(jobs):
        job_starts = [start for start in starts if start["job"] == job]
        newest = job == jobs[-1]
        if not job_starts:  # it ended before it could record anything
            count += not (newest and state and state.state in NO_FAULT)
        for start in reversed(job_starts):
            # Work has come further since this start began, so the row of failures ends here.
            if start["position"] < position:
                return count
            ending = start.get("ended")
            # Killed before it could record an end, and not yet recorded by `record_killed`.
            if ending is None and newest and start is job_starts[-1]:
                ending = ending_of(state)
            count += ending in FAULTS
    return count


def was_stopped(starts: Sequence[dict[str, Any]], jobs: Sequence[str]) -> bool:
    """Return whether the user stopped the newest start since the last retry."""
    since_retry = [start for start in starts if start["job"] in jobs]
    return bool(since_retry) and since_retry[-1].get("ended") == "stopped"


def excluded_nodes(study_dir: Path) -> dict[str, str]:
    """Return the reason by node."""
    try:
        return read_model(dict[str, str], study_dir / SLURM / EXCLUDED_JSON)
    except FileNotFoundError:
        return {}


def exclude(study_dir: Path, bad: dict[str, str]) -> None:
    """Add nodes with their reasons."""
    write_json(study_dir / SLURM / EXCLUDED_JSON, excluded_nodes(study_dir) | bad)


def unexclude(study_dir: Path, nodes: Iterable[str]) -> None:
    """Let jobs go to nodes again; UserError for one that is not excluded."""
    excluded = excluded_nodes(study_dir)
    for node in nodes:
        if node not in excluded:
            raise UserError(f"node {node!r:.80} is not excluded; {take_one_of(node, excluded)}")
        del excluded[node]
    write_json(study_dir / SLURM / EXCLUDED_JSON, excluded)


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Add a line to a JSONL file, synced, after one that was cut off if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("ab+") as file:
        # A file opened for appending is at its end, so 0 says that it is empty.
        whole = file.tell() == 0
        if not whole:
            file.seek(-1, os.SEEK_END)
            whole = file.read() == b"\n"
        file.write(b"" if whole else b"\n")
        file.write(json.dumps(content).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines[Line](kind: type[Line] | TypeAdapter[Line], path: Path) -> list[Line]:
    """Return the lines of a JSONL file, but for those that were cut off; empty without a file.

    A line that was cut off has a beginning and lacks its end. UserError names any other that is
    not of the kind: it was whole and is damaged.
    """
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return []
    return [
        _line(kind, line, path, number)
        for number, line in enumerate(lines, 1)
        if line and not _is_cut_off(line)
    ]


def _is_cut_off(line: bytes) -> bool:
    """Return whether a line is the beginning of one of ours, which are printable ASCII."""
    # Our lines hold no object within the object: only a whole one ends with a brace.
    is_ours = line.isascii() and line.decode("ascii").isprintable()
    return is_ours and line.startswith(b"{") and not line.endswith(b"}")


def _line[Line](kind: type[Line] | TypeAdapter[Line], line: bytes, path: Path, number: int) -> Line:
    where = f"{path}, line {number}"
    return as_model(kind, parse_json(line, where, "correct that line"), where)


def damaged(path: Path, problem: str) -> UserError:
    """Return the error of a file whose lines do not go together."""
    return UserError(f"{path} is damaged ({problem}); restore it")
