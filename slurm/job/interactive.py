"""One step of a study on one node, run interactively."""

import os
from pathlib import Path

import typer

from base.errors import UserError
from slurm.job.element import Element
from slurm.submission.record import Element as Key
from slurm.submission.record import existing_submission
from slurm.submission.script import STOPS, allocation_options


def _element_of(study_dir: Path, step: str) -> Key:
    submission = existing_submission(study_dir)
    for array in submission.arrays:
        for index, steps in enumerate(array.elements):
            if step in steps:
                return array.name, index
    raise UserError(
        f"{step!r:.120} is not a step of {study_dir}; 'python -m slurm status {study_dir.name}'"
        " lists what there is"
    )


def allocate(study_dir: Path, step: str) -> None:
    """Become salloc for one node of the step's kind, which runs this command there."""
    submission = existing_submission(study_dir)
    array, _ = _element_of(study_dir, step)
    options = allocation_options(submission.site, submission.job_arrays[array].kind, nodes=1)
    command = [str(submission.site.python), "-m", "slurm", "run", study_dir.name, step]
    words = ["salloc", *options, *command, "--root", str(study_dir.parent.resolve())]
    try:
        os.execvp(words[0], words)  # noqa: S606  this process has nothing else to do
    except FileNotFoundError:
        raise UserError("salloc is not on PATH; run this on a login node of a cluster") from None


def run_here(study_dir: Path, step: str) -> None:
    """Run the element of a step on this node.

    Raises:
        UserError: this is not a shell of salloc, or there is no such step.
        typer.Exit: the step failed.
    """
    array, index = _element_of(study_dir, step)
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise UserError("this is not a job; give --interactive, or run it in the shell of salloc")
    job = os.environ["SLURM_JOB_ID"]
    never = study_dir / STOPS / f"{job}.interactive"
    if Element(study_dir, array, index, never, job).run() != "complete":
        raise typer.Exit(1)
