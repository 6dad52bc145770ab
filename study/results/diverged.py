"""The runs of a study that diverged: a result, as the end of training is for the others."""

from pathlib import Path

from base.frozen import fingerprint
from study.definition import Study
from train.run.directory import RunDirectory
from train.run.status import divergence


def diverged_runs(directory: Path, study: Study) -> dict[str, str]:
    """Return the runs without an end, in words by name: 'lr1e5 diverged at step 2: ...'.

    A branch of a checkpoint that never came is among them.
    """
    words = {}
    for run in sorted(study.trained, key=lambda run: run.branch_from is not None):
        status = divergence(RunDirectory(directory / run.name), fingerprint(run))
        if status:
            words[run.name] = status.words
        elif run.branch_from:
            parent = study.parent_of(run)
            status = divergence(RunDirectory(directory / parent.name), fingerprint(parent))
            if status and status.step <= run.branch_from.step:
                words[run.name] = f"{run.name} cannot start, since {status.words}"
    return {run.name: words[run.name] for run in study.trained if run.name in words}


def left_out_lines(directory: Path, study: Study) -> list[str]:
    """Return a line for every run that diverged, for what is made of the others."""
    return [f"left out: {words}" for words in diverged_runs(directory, study).values()]
