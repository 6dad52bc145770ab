"""State of a submitted study: steps by the ledger, elements by SLURM or their logs.

`look` returns all of it for `status`; `log_lines` and `newest_logs` are for `logs`, by names of the
submission: no typed text enters a path.
"""

import itertools
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from base.errors import UserError, printable
from base.names import nearest
from slurm.cluster import JobState
from slurm.submission.advance import NotSubmitted, why_not
from slurm.submission.record import (
    Element,
    Submission,
    excluded_nodes,
    existing_submission,
    log_of,
    starts_of,
)
from slurm.submission.survey import ElementSurvey, survey
from study.definition import Study, load_study
from study.restarts import lost_to_restarts
from study.step import Step
from study.trainings import Training, training_of

HOUR = 3600.0
Situation = Literal[
    "failed", "cancelled", "unknown", "running", "held", "queued", "waiting", "left out", "made"
]
# The situations of a step or an element, the one that needs a look first, each with its mark in a
# row of checkpoints.
MARKS: dict[Situation, str] = {
    "failed": "x",
    "cancelled": "c",
    "unknown": "?",  # submitted, and neither SLURM nor a file says anything of it
    "running": "r",
    "held": "h",
    "queued": "q",
    "waiting": ".",  # for its inputs, or for room in the queue
    "left out": "-",  # for good: it needs checkpoints of a run that diverged before
    "made": "#",
}
# Of an open element that SLURM has not, by why it is not submitted.
OUTSIDE: dict[NotSubmitted | None, Situation] = {None: "waiting", "given up": "failed"}
ERROR = re.compile(r"(\d+: )?error: ")
ERROR_OF_SLURM = re.compile(r"(slurmstepd|srun): error: ")
START = "== "  # begins the line with which the job script marks every start of an element
LOG_TAIL_BYTES = 2**16


@dataclass(frozen=True)
class Hours:
    """Node-hours of a study that were used and are expected, and its queue.

    Attributes:
        used: node-hours of all starts.
        expected: node-hours that the rest of the trainings takes at their present speed; None
            while none that still trains has a speed.
        queued: elements that wait in the queue.
        waiting_hours: how long the first of them has waited.
        next_start: when SLURM expects the next of them to start; empty where it cannot say.
    """

    used: float
    expected: float | None
    queued: int
    waiting_hours: float
    next_start: str


@dataclass(frozen=True)
class ElementStatus:
    """An open element of an array: what it still runs, and what SLURM and its log say."""

    name: str  # ARRAY/INDEX
    array: str
    id: str | None  # "123_4" of the newest job that was submitted for it; None: none was
    steps: tuple[str, ...]  # that it runs and that are not made
    situation: Situation
    state: JobState | None  # what SLURM knows of it
    log: Path | None  # of its newest job that has one


@dataclass(frozen=True)
class Overview:
    """A study at one moment."""

    study: Study
    steps: tuple[Step, ...]
    situations: dict[str, Situation]  # of every step
    elements: tuple[ElementStatus, ...]  # that are open
    trainings: dict[str, Training]  # by the name of the run
    excluded: dict[str, str]  # node -> why no training goes there
    hours: Hours
    lost: str | None  # to restarts of trainings, in words; None: nothing
    silence: str | None  # of SLURM, in words: of all or of some elements; None: it knows of all


def look(study_dir: Path) -> Overview:
    """Return all that `status` shows; UserError if nothing of the study was submitted."""
    submission, study = existing_submission(study_dir), load_study(study_dir)
    reason = None
    try:
        now = survey(study_dir, submission, study)
    except UserError as error:
        reason = str(error)
        now = survey(study_dir, submission, study, ask=False)
    elements = [element_status(now, element) for element in now.open]
    # From the weakest to the strongest: each update overrides those before.
    situations: dict[str, Situation] = dict.fromkeys(now.ledger.steps, "made")
    situations |= dict.fromkeys(now.ledger.steps_left_out(), "left out")
    for element in elements:
        situations |= dict.fromkeys(element.steps, element.situation)
    trainings = {run.name: training_of(study_dir, run) for run in study.trained}
    return Overview(
        study=study,
        steps=tuple(now.ledger.steps.values()),
        # Arrays may name steps that the study has no more.
        situations={name: situations[name] for name in now.ledger.steps},
        elements=tuple(elements),
        trainings=trainings,
        excluded=excluded_nodes(study_dir),
        hours=hours_of(now, trainings, time.time()),
        lost=lost_to_restarts(study_dir, study.trained),
        silence=f"by marker files alone: {reason}" if reason else now.unknown_in_words(),
    )


def element_status(now: ElementSurvey, element: Element) -> ElementStatus:
    """Return what an open element is."""
    array, index = element
    id_, state = now.submission.element_ids.get(element), now.states.get(element)
    jobs = now.submission.jobs_of.get(element, [])
    logs = [log_of(now.study_dir, array, job.element_id(index)) for job in jobs]
    log = next((log for log in reversed(logs) if log.exists()), None)
    if state and not state.has_ended:
        situation = situation_of(state)
    elif element in now.unknown:
        situation = "unknown"
    else:
        situation = OUTSIDE.get(why_not(now, element), "cancelled")
    return ElementStatus(f"{array}/{index}", array, id_, now.open[element], situation, state, log)


def situation_of(state: JobState) -> Situation:
    """Return the situation of an element that SLURM has."""
    if state.is_held:
        return "held"
    return "queued" if state.waits else "running"


def last_error(log: Path, *, of_last_start: bool = True) -> str | None:
    """Return the last line with an error, of the last start or of all: ours, else SLURM's."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    # An earlier start of the same job appended to this log; its errors are not of now.
    starts = [number for number, line in enumerate(lines) if line.startswith(START)]
    recent = lines[starts[-1] :] if starts and of_last_start else lines
    for pattern in (ERROR, ERROR_OF_SLURM):
        message = next((line for line in reversed(recent) if pattern.match(line)), None)
        if message:
            return message
    return None


def hours_of(now: ElementSurvey, trainings: dict[str, Training], moment: float) -> Hours:
    """Return the hours of a study at a moment, in seconds since the epoch."""
    jobs_of = now.submission.jobs_of
    used = sum(_used(now, element, moment) for element in jobs_of)
    nodes = now.submission.site.resources_of("train").nodes
    left = [
        training.left_seconds
        for training in trainings.values()
        if training.left_seconds is not None
    ]
    waiting = [element for element, state in now.states.items() if state.waits]
    # Waiting counts from the call of sbatch that submitted the newest job.
    since = [jobs_of[element][-1].time for element in waiting]
    starts = sorted(now.states[element].starts for element in waiting)
    return Hours(
        used=used / HOUR,
        expected=nodes * sum(left) / HOUR if left else None,
        queued=len(waiting),
        waiting_hours=max(0.0, moment - min(since, default=moment)) / HOUR,
        next_start=next((start for start in starts if start), ""),
    )


def _used(now: ElementSurvey, element: Element, moment: float) -> float:
    """Return the node-seconds of an element's starts.

    A start that recorded no end is taken to end when its log was last written, at the latest when
    the next one began.
    """
    state, starts = now.states.get(element), starts_of(now.study_dir, element)
    at_work = state is not None and not state.has_ended and not state.waits
    seconds = 0.0
    for start, following in itertools.zip_longest(starts, starts[1:]):
        until = start.get("until")
        # SLURM has the element at work: the hours of its newest start count up to now.
        if until is None and following is None and at_work:
            until = moment
        if until is None:
            log = log_of(now.study_dir, element[0], start["job"])
            until = log.stat().st_mtime if log.exists() else start["time"]
            # A requeued job appends to the log of its earlier start.
            until = min(until, following["time"]) if following else until
        seconds += start["nodes"] * max(0.0, until - start["time"])
    return seconds


def log_lines(study_dir: Path) -> list[str]:
    """Return a line for each element that failed or runs: situation, name, log."""
    lines = [
        f"{element.situation} {element.name} {element.log}"
        for element in look(study_dir).elements
        if element.situation in ("failed", "running")
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
            # A step or ARRAY/INDEX means one element, the name of an array all of its elements.
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
