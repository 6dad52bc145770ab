"""Cancelling what SLURM has of a study. Files stay; `retry` resumes from them."""

from pathlib import Path

from base.errors import UserError
from slurm import cluster
from slurm.states import JobState
from slurm.status.overview import situation_of
from slurm.submission.record import Submission, existing_submission, submitting
from study.definition import load_study
from study.pipeline.steps import steps_of
from train.run.directory import RunDirectory

Element = tuple[str, int]  # name of the array, index


def cancel(
    study_dir: Path, which: str | None = None, *, after_checkpoint: bool = False
) -> tuple[list[Element], list[str]]:
    """Cancel elements that wait or run; return them, and the runs that were asked to stop.

    `which` is a run, for elements all of whose steps belong to it, or an array. With
    `after_checkpoint` a running training is asked by RUN/STOP, which it looks for after every step.

    Raises:
        UserError: there is no such run or array, or the study is being submitted.
    """
    submission, study = existing_submission(study_dir), load_study(study_dir)
    known = [*(run.name for run in study.runs), *submission.job_arrays]
    if which is not None and which not in known:
        raise UserError(
            f"the study has no run or array {which!r:.80}; such as: {', '.join(known[:8])}"
        )
    steps = {step.name: step for step in steps_of(study)}
    with submitting(study_dir):
        submission = existing_submission(study_dir)  # no other command changes it from here on
        alive = _alive(submission)
        chosen, stopping = [], []
        for (name, index), (id_, state) in alive.items():
            names = submission.job_arrays[name].elements[index]
            own = [steps[step] for step in names if step in steps]
            if which not in (None, name) and not (own and all(one.run == which for one in own)):
                continue
            trains = own and own[0].kind == "train" and situation_of(state) == "running"
            if after_checkpoint and trains:
                stopping.append(own[0].run)
            else:
                chosen.append(((name, index), id_))
        for name in stopping:
            RunDirectory(study_dir / name).stop_file.touch()
        chosen.reverse()  # what waits for others first: it would start when those end
        cluster.cancel(_names([id_ for _, id_ in chosen], [id_ for id_, _ in alive.values()]))
    return [element for element, _ in chosen], stopping


def _names(chosen: list[str], alive: list[str]) -> list[str]:
    """Name whole jobs by their plain ids: SLURM then remembers what it has cancelled."""
    kept = {id_.partition("_")[0] for id_ in set(alive) - set(chosen)}
    jobs = [(id_.partition("_")[0], id_) for id_ in chosen]
    return list(dict.fromkeys(id_ if job in kept else job for job, id_ in jobs))


def _alive(submission: Submission) -> dict[Element, tuple[str, JobState]]:
    """Return elements that have not ended, in their arrays' order, with SLURM's name and state."""
    known, names = cluster.states({job.id for job in submission.jobs}), submission.element_ids()
    found = {}
    for array in submission.job_arrays.values():
        for index in range(len(array.elements)):
            id_ = names.get((array.name, index), "")
            if id_ in known and known[id_].exit_code is None:
                found[array.name, index] = id_, known[id_]
    return found
