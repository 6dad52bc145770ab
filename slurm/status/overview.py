"""The state of a submitted study: steps by the ledger, elements by SLURM or their logs."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

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
ALIVE = ("running", "started", "held", "queued")
HELD = re.compile(r"JobHeld\w*|job requeued in held state|launch failed requeued held")
HELD_STATE = re.compile("REQUEUE_HOLD|SPECIAL_EXIT|RESV_DEL_HOLD")
PENDING = re.compile(f"PENDING|REQUEUED|REQUEUE_FED|{HELD_STATE.pattern}")
ERROR = re.compile(r"(\d+: )?error: ")
ERROR_OF_SLURM = re.compile(r"(slurmstepd|srun): error: ")
START = "== "  # begins the line with which the job script marks every start of an element
GAVE_UP = "came no further"  # in the error of starts.check_progress
LOG_TAIL_BYTES = 2**16
CLOSING = ("collect", "report", "mirror")  # when all is measured


@dataclass(frozen=True)
class Element:
    """One element of an array.

    Attributes:
        id: "123_4" of the newest job that was submitted for it; None: none was.
        steps: that it runs and that are not made.
        situation: of MARKS.
        state: what SLURM knows of it.
        log: of its newest job; it may not be there yet.
    """

    array: str
    index: int
    id: str | None
    steps: tuple[str, ...]
    situation: str
    state: JobState | None
    log: Path | None

    @property
    def name(self) -> str:
        """ARRAY/INDEX."""
        return f"{self.array}/{self.index}"


@dataclass(frozen=True)
class Overview:
    """A study at one moment.

    Attributes:
        situations: of every step, of MARKS.
        elements: of every array of the study, and those that settle.
        trainings: by the name of the run.
        seconds: of the steps that are made, by kind.
        excluded: node -> why no training goes there.
        without_slurm: why SLURM was not asked; None: it was.
    """

    directory: Path
    study: Study
    steps: tuple[Step, ...]
    situations: dict[str, str]
    elements: tuple[Element, ...]
    trainings: dict[str, Training]
    seconds: dict[str, list[float]]
    excluded: dict[str, str]
    without_slurm: str | None

    @property
    def counts(self) -> Counter[str]:
        """Count the steps by situation."""
        return Counter(self.situations.values())


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
    seconds: dict[str, list[float]] = {}
    for name in made:
        taken = (ledger.record(ledger.steps[name]) or {}).get("seconds")
        if isinstance(taken, int | float) and taken >= 0:  # negative, a clock has jumped
            seconds.setdefault(ledger.steps[name].kind, []).append(taken)
    trainings = {run.name: training_of(study_dir, run) for run in study.trained}
    known = {
        name: situations[name] for name in ledger.steps
    }  # arrays may name steps that the study has no more
    steps = tuple(ledger.steps.values())
    excluded = excluded_nodes(study_dir)
    return Overview(
        study_dir, study, steps, known, tuple(elements), trainings, seconds, excluded, reason
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
            else:
                situation = (
                    "open" if not log.exists() else "failed" if last_error(log) else "started"
                )
            elements.append(Element(array.name, index, id_, steps, situation, state, log))
    return elements, reason


def situation_of(state: JobState) -> str:
    """Return the situation of an element whose steps are not all made."""
    if PENDING.fullmatch(state.state):
        return (
            "held"
            if HELD.fullmatch(state.reason) or HELD_STATE.fullmatch(state.state)
            else "queued"
        )
    if state.exit_code is None:
        return "running"
    return "cancelled" if state.state == "CANCELLED" else "failed"


def last_error(log: Path, *, of_last_start: bool = True) -> str | None:
    """Return the last line with an error, of the last start or of all: ours, else SLURM's."""
    try:
        lines = tail_of(log, LOG_TAIL_BYTES).splitlines()
    except FileNotFoundError:
        return None
    starts = [number for number, line in enumerate(lines) if line.startswith(START)]
    recent = lines[starts[-1] :] if starts and of_last_start else lines
    if any(
        GAVE_UP in line for line in recent
    ):  # this start did nothing but end; those before it say why
        recent = [line for line in lines if GAVE_UP not in line]
    for pattern in (ERROR, ERROR_OF_SLURM):
        found = next((line for line in reversed(recent) if pattern.match(line)), None)
        if found:
            return found
    return None


def tail_of(log: Path, size: int) -> str:
    """Return the last bytes of a log as text."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace")


def least_seconds_left(overview: Overview) -> float | str:
    """Return a lower bound of the seconds until all is measured, or why there is none.

    The largest of what each training has left at its speed, and of every other kind of steps, those
    left times their mean duration, over the elements of it that run now.
    """
    dead = Counter(s for s in overview.situations.values() if s not in (*ALIVE, "made"))
    if overview.without_slurm:
        return "SLURM was not asked"
    if dead:
        return ", ".join(f"{count} {situation}" for situation, count in dead.items())
    bounds = [0.0]
    open_ = [step for step in overview.steps if overview.situations[step.name] != "made"]
    for step in open_:
        if step.kind == "train":
            left = overview.trainings[step.run].left_seconds
            if left is None:
                return f"{step.run} has not trained yet"
            bounds.append(left)
    kinds = Counter(step.kind for step in open_ if step.kind not in ("train", *CLOSING))
    at_work = running_elements(overview)
    for kind, count in kinds.items():
        if kind not in overview.seconds:
            return f"no {kind} has finished yet"
        if not at_work[kind]:
            return f"no {kind} runs now"
        bounds.append(count * mean(overview.seconds[kind]) / at_work[kind])
    return max(bounds)


def running_elements(overview: Overview) -> Counter[str]:
    """Count running elements by the kind of the first step that they still have to make."""
    kinds = {step.name: step.kind for step in overview.steps}
    running = (element for element in overview.elements if element.situation == "running")
    return Counter(
        kinds[element.steps[0]]
        for element in running
        if element.steps and element.steps[0] in kinds
    )


def logs_of(study_dir: Path, submission: Submission, array: str, index: int) -> list[Path]:
    """Return the logs of an element, that of its first job first."""
    jobs: Iterable[str] = (
        f"{job.id}_{index}"
        for job in submission.jobs
        if job.array == array and index in job.indices
    )
    return [path for path in (log_of(study_dir, array, job) for job in jobs) if path.exists()]
