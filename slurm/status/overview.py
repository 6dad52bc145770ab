"""The state of a submitted study: steps by the ledger, elements by SLURM or their logs."""

import re
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from slurm import cluster
from slurm.job.excluding import excluded_nodes
from slurm.states import JobState
from slurm.status.trainings import Training, training_of
from slurm.submission.arrays import SETTLE
from slurm.submission.record import Submission, existing_submission, log_of
from study.definition import Study, load_study
from study.pipeline.ledger import Ledger
from study.pipeline.step import Step
from study.pipeline.steps import steps_of

# What a step or an element can be, the one that needs a look first; the mark of each in a row of
# checkpoints.
MARKS = {
    "failed": "x",
    "cancelled": "c",
    "unsubmitted": "-",
    "running": "r",
    "started": "s",  # these two without SLURM: a log is there, or none
    "open": ".",
    "held": "h",
    "queued": "q",
    "made": "#",
}
HELD = re.compile(r"JobHeld\w*|job requeued in held state|launch failed requeued held")
HELD_STATE = re.compile("REQUEUE_HOLD|SPECIAL_EXIT|RESV_DEL_HOLD")
PENDING = re.compile(f"PENDING|REQUEUED|REQUEUE_FED|{HELD_STATE.pattern}")
ERROR = re.compile(r"(\d+: )?error: ")
ERROR_OF_SLURM = re.compile(r"(slurmstepd|srun): error: ")
START = "== "  # begins the line with which the job script marks every start of an element
GAVE_UP = "came no further"  # in the error of starts.check_progress
LOG_TAIL_BYTES = 2**16


@dataclass(frozen=True)
class Element:
    """One element of an array."""

    name: str  # ARRAY/INDEX
    array: str
    id: str | None  # "123_4" of the newest job that was submitted for it; None: none was
    steps: tuple[str, ...]  # that it runs and that are not made
    situation: str  # of MARKS
    state: JobState | None  # what SLURM knows of it
    log: Path | None  # of its newest job; it may not be there yet


@dataclass(frozen=True)
class Overview:
    """A study at one moment."""

    study: Study
    steps: tuple[Step, ...]
    situations: dict[str, str]  # of every step, of MARKS
    elements: tuple[Element, ...]  # of every array of the study, and those that settle
    trainings: dict[str, Training]  # by the name of the run
    excluded: dict[str, str]  # node -> why no training goes there
    without_slurm: str | None  # why SLURM was not asked; None: it was


def look(study_dir: Path) -> Overview:
    """Return all that `status` shows; UserError if nothing of the study was submitted."""
    submission, study = existing_submission(study_dir), load_study(study_dir)
    ledger = Ledger(study_dir, steps_of(study))
    made = {name for name, step in ledger.steps.items() if ledger.is_complete(step)}
    elements, reason = elements_of(study_dir, submission, made)
    situations = dict.fromkeys(ledger.steps, "unsubmitted")
    for element in elements:
        situations |= dict.fromkeys(element.steps, element.situation)
    situations |= dict.fromkeys(made, "made")
    return Overview(
        study=study,
        steps=tuple(ledger.steps.values()),
        # Arrays may name steps that the study has no more.
        situations={name: situations[name] for name in ledger.steps},
        elements=tuple(elements),
        trainings={run.name: training_of(study_dir, run) for run in study.trained},
        excluded=excluded_nodes(study_dir),
        without_slurm=reason,
    )


def elements_of(
    study_dir: Path, submission: Submission, made: set[str]
) -> tuple[list[Element], str | None]:
    """Return the elements of a submission, and why SLURM was not asked if it was not."""
    names, reason = submission.element_ids(), None
    states: dict[str, JobState] = {}
    try:
        states = cluster.states({job.id for job in submission.jobs})
    except UserError as error:
        reason = str(error)
    elements = []
    for array in submission.job_arrays.values():
        for index, all_steps in enumerate(array.elements):
            id_ = names.get((array.name, index))
            state = states.get(id_) if id_ else None
            log = log_of(study_dir, array.name, id_) if id_ else None
            settles = array.name.startswith(f"{SETTLE}-")
            steps = () if settles else tuple(name for name in all_steps if name not in made)
            if not steps and (not settles or state is None or state.state == "COMPLETED"):
                situation = "made"
            elif state is not None:
                situation = situation_of(state)
            elif log is None:
                situation = "unsubmitted"
            elif reason is None:  # SLURM has forgotten it
                situation = "failed" if log.exists() else "cancelled"
            elif log.exists():
                situation = "failed" if last_error(log) else "started"
            else:
                situation = "open"
            name = f"{array.name}/{index}"
            elements.append(Element(name, array.name, id_, steps, situation, state, log))
    return elements, reason


def situation_of(state: JobState) -> str:
    """Return the situation of an element whose steps are not all made."""
    if PENDING.fullmatch(state.state):
        held = HELD.fullmatch(state.reason) or HELD_STATE.fullmatch(state.state)
        return "held" if held else "queued"
    if state.exit_code is None:
        return "running"
    return "cancelled" if state.state == "CANCELLED" else "failed"


def last_error(log: Path, *, of_last_start: bool = True) -> str | None:
    """Return the last line with an error, of the last start or of all: ours, else SLURM's."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(START)]
    recent = lines[starts[-1] :] if starts and of_last_start else lines
    # A start that gives up did nothing but end; those before it say why.
    if any(GAVE_UP in line for line in recent):
        recent = [line for line in lines if GAVE_UP not in line]
    for pattern in (ERROR, ERROR_OF_SLURM):
        found = next((line for line in reversed(recent) if pattern.match(line)), None)
        if found:
            return found
    return None
