"""A study at one moment: what is complete, what is open, and what SLURM has of it."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from base.errors import UserError
from base.files import write_json
from base.reading import read_model
from slurm import cluster
from slurm.cluster import JobState
from slurm.submission.record import SLURM, SUBMISSION_JSON, Element, Submission, lives
from study.definition import Study
from study.pipeline.ledger import Ledger
from study.step import Step
from study.steps import steps_of

COMPLETE_JSON = "complete.json"  # names of the steps that were found complete


class Inputs:
    """The files that steps read: which are there.

    A step reads what other steps made, and those have to be complete. Training makes checkpoints
    one by one: each may be read once it is there.
    """

    def __init__(self, ledger: Ledger, complete: set[str]) -> None:
        self._ledger, self._complete = ledger, complete
        steps = ledger.steps.values()
        self._makers = {output: step for step in steps for output in step.outputs}
        self._names: dict[Path, set[str]] = {}

    def missing(self, steps: Iterable[Step]) -> list[str]:
        """Return what these steps read, do not make themselves, and cannot be read yet."""
        steps = list(steps)
        # What an earlier step of the same element makes will be there in time.
        outputs = {output for step in steps for output in step.outputs}
        reads = (name for step in steps for name in self._ledger.reads(step))
        inputs = (name for name in reads if name not in outputs)
        return [name for name in inputs if not self._is_there(name)]

    def _is_there(self, name: str) -> bool:
        maker = self._makers.get(name)
        if maker and maker.kind != "train":
            return maker.name in self._complete
        path = self._ledger.directory / name
        # Of hundreds of checkpoints one listing tells which to look at.
        return path.parent.name in self._names_in(path.parent.parent) and path.is_file()

    def _names_in(self, directory: Path) -> set[str]:
        if directory not in self._names:
            try:
                self._names[directory] = {path.name for path in directory.iterdir()}
            except FileNotFoundError:
                self._names[directory] = set()
        return self._names[directory]


def complete_steps(study_dir: Path, ledger: Ledger, *, verify: bool = False) -> set[str]:
    """Return the names of the complete steps.

    The files of thousands of steps are not read at every look: a step that was found complete
    counts until its record is removed or a step before it is made again. `verify` reads all files.
    """
    before = set() if verify else remembered(study_dir)
    recorded = set()
    if ledger.records.exists():
        recorded = {path.stem for path in ledger.records.iterdir()}
    recorded &= ledger.steps.keys()
    new = recorded - before
    # New records, and the steps right after them, whose inputs may have changed thereby.
    doubtful = {name for name in recorded if not new.isdisjoint({name, *ledger.steps[name].after})}
    return (before & recorded) - doubtful | {
        name for name in doubtful if ledger.is_complete(ledger.steps[name])
    }


def remember_complete(study_dir: Path, complete: set[str]) -> None:
    """Write down the complete steps for the next look; the caller holds the study's submission."""
    path = study_dir / SLURM / COMPLETE_JSON
    if not path.exists() or remembered(study_dir) != complete:
        write_json(path, sorted(complete))


def remembered(study_dir: Path) -> set[str]:
    """Return the steps of complete.json: none without it, or where it is damaged.

    It only spares reading: the records of the steps say the same.
    """
    try:
        return set(read_model(list[str], study_dir / SLURM / COMPLETE_JSON))
    except (FileNotFoundError, UserError):
        return set()


@dataclass(frozen=True)
class ElementSurvey:
    """A study at one moment: its complete steps, its open elements and their states in SLURM."""

    study_dir: Path
    submission: Submission
    ledger: Ledger
    complete: set[str]  # names of steps
    open: dict[Element, tuple[str, ...]]  # elements with their steps that are to be made still
    states: dict[Element, JobState]  # what is known of the newest jobs of open elements
    unknown: set[Element]  # those of whose newest jobs neither SLURM nor a file says anything

    def steps(self, names: Iterable[str]) -> list[Step]:
        """Return the steps of these names, but for those that the study has no more."""
        return [self.ledger.steps[name] for name in names if name in self.ledger.steps]

    def check(self) -> None:
        """Raise UserError if an open element has a step that the study, by now, has not."""
        for name in itertools.chain(*self.open.values()):
            if name not in self.ledger.steps:
                raise UserError(
                    f"{self.study_dir / SLURM / SUBMISSION_JSON} names the step {name!r:.80}, which"
                    " the study has not; submit the study again, or restore the file"
                )

    @property
    def active(self) -> set[Element]:
        """The elements that wait or run, as far as anybody knows."""
        alive = {element for element, state in self.states.items() if not state.has_ended}
        return alive | self.unknown

    def unknown_in_words(self) -> str | None:
        """Return of how many jobs nothing is known, and what to do; None of none."""
        job = self.submission.element_ids[min(self.unknown)] if self.unknown else None
        retry = f"'python -m slurm retry {self.study_dir.name}' cancels and resubmits them"
        count = cluster.elements_text(len(self.unknown))
        return job and f"SLURM says nothing of {count}; see `squeue --jobs={job}`, or {retry}"

    @cached_property
    def _inputs(self) -> Inputs:
        return Inputs(self.ledger, self.complete)

    def missing(self, element: Element) -> list[str]:
        """Return what an element needs and is not there yet."""
        return self._inputs.missing(self.steps(self.open[element]))


def survey(
    study_dir: Path, submission: Submission, study: Study, *, verify: bool = False, ask: bool = True
) -> ElementSurvey:
    """Look at the files of a study and ask SLURM once.

    `verify` reads the files of all steps again, also of those that were complete before.

    Raises:
        UserError: SLURM does not answer.
    """
    ledger = Ledger(study_dir, steps_of(study))
    complete = complete_steps(study_dir, ledger, verify=verify)
    elements = open_elements(submission, complete | ledger.steps_left_out().keys())
    # SLURM is asked for open elements alone, not for thousands that are complete.
    ids = {key: submission.element_ids[key] for key in elements if key in submission.element_ids}
    by_id = cluster.states(ids.values()) if ask else {}
    states = {key: by_id[id_] for key, id_ in ids.items() if id_ in by_id}
    # What the user cancelled was cancelled in SLURM by its id.
    unlisted = ids.keys() - states.keys() - submission.cancelled
    signs = {key: lives(study_dir, key, ids[key]) for key in unlisted}
    at_work = JobState("RUNNING", "its log is written to", "", 0, None)
    states |= {key: at_work for key, alive in signs.items() if alive}
    silent = [key for key, alive in signs.items() if alive is None]
    gone = cluster.gone([ids[key] for key in silent]) if ask else set()
    unknown = {key for key in silent if ids[key] not in gone}
    return ElementSurvey(study_dir, submission, ledger, complete, elements, states, unknown)


def open_elements(submission: Submission, ended: set[str]) -> dict[Element, tuple[str, ...]]:
    """Return the elements with steps that have not ended, in the order of their arrays."""
    elements = {}
    for array in submission.arrays:
        for index, names in enumerate(array.elements):
            steps = tuple(name for name in names if name not in ended)
            if steps:
                elements[array.name, index] = steps
    return elements
