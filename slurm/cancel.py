"""Cancelling what SLURM has of a study. Files stay; `retry` resumes from them."""

from pathlib import Path

from base.errors import UserError
from base.names import take_one_of
from slurm import cluster
from slurm.submission.advance import adopt
from slurm.submission.record import Element, append, existing_submission, submitting
from slurm.submission.survey import Survey, survey
from study.definition import load_study
from train.run.directory import RunDirectory


def cancel(
    study_dir: Path, which: str | None = None, *, after_checkpoint: bool = False
) -> tuple[list[Element], list[str]]:
    """Cancel elements that wait, run or are still to be submitted.

    Args:
        study_dir: a study that was submitted.
        which: a run, for elements all of whose steps belong to it, or an array; None: everything.
        after_checkpoint: ask a running training by RUN/STOP, which it looks for after every step.

    Returns:
        The elements that SLURM had, and the runs that were asked to stop.

    Raises:
        UserError: there is no such run or array, SLURM does not answer, or the study is being
            submitted.
    """
    submission, study = existing_submission(study_dir), load_study(study_dir)
    names = [*(run.name for run in study.runs), *submission.job_arrays]
    if which is not None and which not in names:
        raise UserError(f"the study has no run or array {which!r:.80}; {take_one_of(which, names)}")
    with submitting(study_dir):
        adopt(study_dir)
        now = survey(study_dir, existing_submission(study_dir), study)
        targets = [element for element in now.open if _belongs(now, element, which)]
        stopping = [element for element in targets if after_checkpoint and _trains(now, element)]
        for array, index in stopping:
            RunDirectory(study_dir / _run_of(now, (array, index))).stop_file.touch()
        # Recorded first: what is cancelled must not be submitted again, whatever happens next.
        cancelled = [element for element in targets if element not in stopping]
        append(study_dir, "cancelled", elements=cancelled)
        alive = [element for element in cancelled if element in now.active]
        cluster.cancel([now.submission.element_ids[element] for element in alive])
    return alive, [_run_of(now, element) for element in stopping]


def _belongs(now: Survey, element: Element, which: str | None) -> bool:
    runs = {step.run for step in now.steps(now.open[element])}
    return which in (None, element[0]) or runs == {which}


def _trains(now: Survey, element: Element) -> bool:
    state = now.states.get(element)
    trains = any(step.kind == "train" for step in now.steps(now.open[element][:1]))
    return trains and state is not None and not state.has_ended and not state.waits


def _run_of(now: Survey, element: Element) -> str:
    return now.ledger.steps[now.open[element][0]].run
