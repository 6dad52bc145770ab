"""State of a submitted study: steps by the ledger, elements by SLURM or their logs."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from slurm.states import JobState
from slurm.status.hours import Hours, hours_of
from slurm.status.trainings import Training, training_of
from slurm.submission.advance import why_not
from slurm.submission.excluded import excluded_nodes
from slurm.submission.record import Element, existing_submission, log_of
from slurm.submission.survey import Survey, survey
from study.definition import Study, load_study
from study.pipeline.step import Step

# What a step or an element can be, the one that needs a look first; the mark of each in a row of
# checkpoints.
MARKS = {
    "failed": "x",
    "cancelled": "c",
    "running": "r",
    "started": "s",  # without SLURM: its log says that it started
    "held": "h",
    "queued": "q",
    "waiting": ".",  # for its inputs, or for room in the queue
    "left out": "-",  # for good: it needs checkpoints of a run that diverged before
    "made": "#",
}
ERROR = re.compile(r"(\d+: )?error: ")
ERROR_OF_SLURM = re.compile(r"(slurmstepd|srun): error: ")
START = "== "  # begins the line with which the job script marks every start of an element
LOG_TAIL_BYTES = 2**16


@dataclass(frozen=True)
class ElementStatus:
    """One open element of an array."""

    name: str  # ARRAY/INDEX
    array: str
    id: str | None  # "123_4" of the newest job that was submitted for it; None: none was
    steps: tuple[str, ...]  # that it runs and that are not made
    situation: str  # of MARKS
    state: JobState | None  # what SLURM knows of it
    log: Path | None  # of its newest job that has one


@dataclass(frozen=True)
class Overview:
    """A study at one moment."""

    study: Study
    steps: tuple[Step, ...]
    situations: dict[str, str]  # of every step, of MARKS
    elements: tuple[ElementStatus, ...]  # that are open
    trainings: dict[str, Training]  # by the name of the run
    excluded: dict[str, str]  # node -> why no training goes there
    hours: Hours
    without_slurm: str | None  # why SLURM was not asked; None: it was


def look(study_dir: Path) -> Overview:
    """Return all that `status` shows; UserError if nothing of the study was submitted."""
    submission, study = existing_submission(study_dir), load_study(study_dir)
    reason = None
    try:
        now = survey(study_dir, submission, study)
    except UserError as error:
        reason = str(error)
        now = survey(study_dir, submission, study, ask=False)
    elements = [element_status(now, element, reason) for element in now.open]
    situations = dict.fromkeys(now.ledger.steps, "made")
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
        without_slurm=reason,
    )


def element_status(now: Survey, element: Element, without_slurm: str | None) -> ElementStatus:
    """Return what an open element is."""
    array, index = element
    id_, state = now.submission.element_ids.get(element), now.states.get(element)
    jobs = now.submission.jobs_of.get(element, [])
    logs = [log_of(now.study_dir, array, job.element_id(index)) for job in jobs]
    log = next((log for log in reversed(logs) if log.exists()), None)
    if state and not state.has_ended:
        situation = situation_of(state)
    elif without_slurm and id_ and element not in now.submission.cancelled:
        situation = "queued"
        if log and log == logs[-1]:
            situation = "failed" if last_error(log) else "started"
    else:
        reason = why_not(now, element)
        situation = {None: "waiting", "given up": "failed"}.get(reason, "cancelled")
    return ElementStatus(f"{array}/{index}", array, id_, now.open[element], situation, state, log)


def situation_of(state: JobState) -> str:
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
    starts = [number for number, line in enumerate(lines) if line.startswith(START)]
    recent = lines[starts[-1] :] if starts and of_last_start else lines
    for pattern in (ERROR, ERROR_OF_SLURM):
        message = next((line for line in reversed(recent) if pattern.match(line)), None)
        if message:
            return message
    return None
