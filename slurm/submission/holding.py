"""Held elements: released once their inputs exist, cancelled if they never will."""

from pathlib import Path

from base.errors import UserError
from slurm import cluster
from slurm.job.starts import starts_of
from slurm.job.supervision import say
from slurm.submission.arrays import JobArray
from slurm.submission.record import SLURM, existing_submission
from study.definition import load_study
from study.pipeline.ledger import Ledger
from study.pipeline.steps import steps_of

HELD_BY_USER = "JobHeldUser"


def missing_reads(ledger: Ledger, array: JobArray, index: int) -> list[str]:
    """Return what an element reads, its own steps do not make, and is not there yet."""
    steps = [ledger.steps[name] for name in array.elements[index]]
    own = {output for step in steps for output in step.outputs}
    return [name for step in steps for name in ledger.missing(step) if name not in own]


def release_ready(study_dir: Path, ledger: Ledger) -> None:
    """Release held elements whose inputs all exist.

    Called every few seconds beside training: SLURM is only asked where files say that something may
    start. What cannot be released now is tried again, and in the end by the settling job.
    """
    submission = existing_submission(study_dir)
    arrays = submission.job_arrays
    marks = study_dir / SLURM / "released"
    marks.mkdir(exist_ok=True)
    ready = []
    for (name, index), element in submission.element_ids().items():
        array = arrays[name]
        if not array.held_for or (marks / element).exists():
            continue
        if missing_reads(ledger, array, index):
            continue
        job = element.partition("_")[0]
        if not any(start["job"] == job for start in starts_of(study_dir, name, index)):
            ready.append(element)  # else somebody released it by hand
    try:
        cluster.release(ready)  # asks nothing where nothing is ready
    except UserError as error:  # one of them has ended, or the controller does not answer
        say(f"releasing {', '.join(ready)}: {error}")
    else:
        for element in ready:
            (marks / element).touch()


def settle(study_dir: Path) -> None:
    """Release what can start; cancel what never will, as nothing makes its inputs any more."""
    submission = existing_submission(study_dir)
    ledger = Ledger(study_dir, steps_of(load_study(study_dir)))
    release_ready(study_dir, ledger)
    arrays, states = submission.job_arrays, cluster.states({job.id for job in submission.jobs})
    alive = {
        name: (arrays[array], index)
        for (array, index), name in submission.element_ids().items()
        if name in states and states[name].exit_code is None
    }
    at_work = {
        output
        for array, index in alive.values()
        for step in array.elements[index]
        if step in ledger.steps
        for output in ledger.steps[step].outputs
    }
    hopeless = []
    for name, (array, index) in alive.items():
        if not array.held_for or states[name].reason != HELD_BY_USER:
            continue
        missing = missing_reads(ledger, array, index)
        if missing and not at_work.intersection(missing):
            say(f"cancelled {array.name}/{index}: nothing makes {missing[0]} any more")
            hopeless.append(name)
    if hopeless:
        cluster.cancel(hopeless)
