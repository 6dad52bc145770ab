"""Held elements: released once their inputs exist, cancelled if they never will."""

from pathlib import Path

from base.errors import UserError
from slurm import cluster
from slurm.job.starts import starts_of
from slurm.job.supervision import say
from slurm.submission.arrays import JobArray
from slurm.submission.record import SLURM, Submission, existing_submission
from study.definition import load_study
from study.pipeline.ledger import Ledger
from study.pipeline.steps import steps_of

HELD_BY_USER = "JobHeldUser"


def held_elements(submission: Submission) -> dict[str, tuple[JobArray, int]]:
    """Return the array and index of every held element, by SLURM's name."""
    arrays, names = submission.job_arrays, submission.element_ids()
    holding = {job.id for job in submission.jobs if arrays[job.array].held_for}
    known = cluster.states(holding) if holding else {}
    return {
        name: (arrays[array], index)
        for (array, index), name in names.items()
        if name in known
        and known[name].state == "PENDING"
        and known[name].reason == HELD_BY_USER
        and arrays[array].held_for
    }


def external_reads(ledger: Ledger, array: JobArray, index: int) -> list[str]:
    """Return the files that an element reads and its own steps do not make."""
    steps = [ledger.steps[name] for name in array.elements[index]]
    own = {output for step in steps for output in step.outputs}
    return [name for step in steps for name in ledger.reads(step) if name not in own]


def _is_ready(ledger: Ledger, array: JobArray, index: int) -> bool:
    return all((ledger.directory / name).is_file() for name in external_reads(ledger, array, index))


def release_ready(study_dir: Path, ledger: Ledger) -> list[str]:
    """Release held elements whose inputs all exist; return SLURM's names of them.

    Called every few seconds beside training: SLURM is only asked where files say that something may
    start. What cannot be released now is tried again, and in the end by the settling job.
    """
    submission = existing_submission(study_dir)
    marks = study_dir / SLURM / "released"
    marks.mkdir(exist_ok=True)
    ready = {}
    for (name, index), element in submission.element_ids().items():
        array = submission.job_arrays[name]
        if not array.held_for or (marks / element).exists() or not _is_ready(ledger, array, index):
            continue
        if not any(
            start["job"] == element.partition("_")[0] for start in starts_of(study_dir, name, index)
        ):
            ready[element] = (array, index)  # else somebody released it by hand
    if not ready:
        return []
    try:
        cluster.release(list(ready))
    except UserError as error:  # one of them has ended, or the controller does not answer
        say(f"releasing {', '.join(ready)}: {error}")
    else:
        for element in ready:
            (marks / element).touch()
    return list(ready)


def settle(study_dir: Path) -> None:
    """Release what can start; cancel what never will, as nothing makes its inputs any more."""
    submission, ledger = (
        existing_submission(study_dir),
        Ledger(study_dir, steps_of(load_study(study_dir))),
    )
    release_ready(study_dir, ledger)
    arrays, names = submission.job_arrays, submission.element_ids()
    known = cluster.states({job.id for job in submission.jobs})
    at_work = {
        output
        for (array, index), name in names.items()
        if name in known and known[name].exit_code is None
        for step in arrays[array].elements[index]
        if step in ledger.steps
        for output in ledger.steps[step].outputs
    }
    hopeless = {}
    for name, (array, index) in held_elements(submission).items():
        missing = [
            one for one in external_reads(ledger, array, index) if not (study_dir / one).is_file()
        ]
        if missing and not at_work.intersection(missing):
            hopeless[name] = f"{array.name}/{index}: nothing makes {missing[0]} any more"
    for reason in hopeless.values():
        say(f"cancelled {reason}")
    if hopeless:
        cluster.cancel(list(hopeless))
