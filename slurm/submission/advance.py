"""The next jobs of a study: `advance` submits what can start and SLURM does not have.

It may be called at any moment and any number of times: by `submit` and `retry`, at the end of every
job, beside training, by `status --watch`. There are no dependencies and no held jobs. What is not
submitted yet is decided when its inputs are there, by the site file as it is then.
"""

import hashlib
import sys
import time
import uuid
from pathlib import Path
from typing import Literal

from base.errors import UserError
from base.files import replaced_file
from base.grouping import grouped
from base.names import take_one_of
from base.sharing import this_user
from slurm import cluster
from slurm.site import JobKind
from slurm.submission.arrays import FINAL, JobArray
from slurm.submission.record import (
    Element,
    append,
    ending_of,
    excluded_nodes,
    existing_submission,
    failures,
    jobs_since_retry,
    log_of,
    position_of,
    record_killed,
    script_path,
    starts_of,
    submitting,
    was_stopped,
)
from slurm.submission.script import ranges, render
from slurm.submission.survey import ElementSurvey, remember_complete, survey
from study.definition import load_study
from train.run.directory import RunDirectory

NotSubmitted = Literal["cancelled", "stopped", "given up"]  # by the user, a STOP file, failures
HELD_BY_SLURM = ("launch failed requeued held", "JobHoldMaxRequeue")  # until somebody acts


def advance(
    study_dir: Path, *, ending: str | None = None, patience_seconds: float = 0.0
) -> dict[str, int]:
    """Submit every element whose inputs exist; return how many, by array.

    `ending` is "JOB_INDEX" of the caller, which runs still and is about to end.

    Raises:
        UserError: SLURM does not answer or refuses a script, or another command is submitting.
    """
    with submitting(study_dir, patience_seconds):
        return submit_ready(study_dir, ending=ending)


def submit_ready(
    study_dir: Path, *, ending: str | None = None, verify: bool = False
) -> dict[str, int]:
    """Submit as `advance` does; the caller holds the study's submission.

    With `verify` it reads the files of all steps again, and submits anew what waits with a script
    that the site file would make otherwise now, or that SLURM holds after failed launches.
    """
    adopt(study_dir)
    submission = existing_submission(study_dir)
    if ending and submission.left[-1:] != [ending]:  # not again when it tries again
        append(study_dir, "leaving", job=ending)
        submission.left.append(ending)
    now = survey(study_dir, submission, load_study(study_dir), verify=verify)
    now.check()
    remember_complete(study_dir, now.complete)
    try:
        return _Submitter(now).run(replace=verify)
    except cluster.SubmitLimitError:
        # The last that left may wait to submit what is submitted here in its place. Not before it
        # waits: SLURM 22.05 counts one for ever that is cancelled while its requeue is under way.
        last = submission.left[-1:]
        if ending or not any(state.waits for state in cluster.states(last).values()):
            raise
    cluster.cancel(last)
    return _Submitter(now).run(replace=verify)


def adopt(study_dir: Path) -> None:
    """Record the job of an sbatch call whose answer never came, if it made one."""
    call = existing_submission(study_dir).unanswered
    if call:
        job = cluster.job_of(call.token, call.user)
        append(study_dir, "submitted", job=job) if job else append(study_dir, "refused")


def why_not(now: ElementSurvey, element: Element) -> NotSubmitted | None:
    """Return why an open element that SLURM does not have is not submitted again, if it is not."""
    if element in now.submission.cancelled:
        return "cancelled"
    jobs = jobs_since_retry(now.submission, element)
    if not jobs:
        return None
    state = now.states.get(element)
    starts = starts_of(now.study_dir, element)
    # A plain scancel leaves no line in our record: what SLURM says is its only trace.
    cancelled = state.state == "CANCELLED" if state else _vanished(now, element, jobs[-1])
    if cancelled and not any(start["job"] == jobs[-1] and "ended" in start for start in starts):
        return "cancelled"
    if was_stopped(starts, jobs):
        return "stopped"
    steps = now.submission.job_arrays[element[0]].elements[element[1]]
    position = position_of(now.study_dir, now.steps(steps))
    failed = failures(starts, jobs, state, position)
    return "given up" if failed >= now.submission.site.limits.starts_without_progress else None


def _vanished(now: ElementSurvey, element: Element, job: str) -> bool:
    """Return whether SLURM forgot an element that never started, though it knows its array.

    Without accounts it does so where an element is cancelled while it waits.
    """
    parent = f"{job.partition('_')[0]}_"
    ids = now.submission.element_ids
    has_siblings = any(ids[other].startswith(parent) for other in now.states)
    return has_siblings and not log_of(now.study_dir, element[0], job).exists()


class _Submitter:
    """One call of `submit_ready`."""

    def __init__(self, now: ElementSurvey) -> None:
        self.now, self.study_dir, self.submission = now, now.study_dir, now.submission
        self.limits = now.submission.site.limits
        self.excluded = excluded_nodes(now.study_dir)
        self.user = this_user()
        # What has left, such as the caller, runs still, or waits to submit alone.
        ids, left = self.submission.element_ids, set(self.submission.left)
        self.active = {key for key in now.active if ids[key] not in left}
        self.full: dict[JobKind, cluster.SubmitLimitError] = {}

    def run(self, *, replace: bool) -> dict[str, int]:
        """Submit in the order of the arrays, up to the limits; return how many by array."""
        replaced = self.replaced() if replace else set()
        ready = [key for key in self.now.open if self.is_ready(key, replaced)]
        # Table and report come last, once nothing waits or runs that could add to them.
        if not ready and not self.active and self.final_is_due():
            ready = [(FINAL, 0)]
        submitted: dict[str, int] = {}
        for name, array in self.submission.job_arrays.items():
            indices = [index for ready_name, index in ready if ready_name == name]
            room = 0 if array.kind in self.full else self.room(array)
            count = self.submit(array, indices[:room])
            if count:
                submitted[name] = count
        # Where jobs are in the queue their end calls again; with none nothing would.
        if self.full and not self.active:
            raise next(iter(self.full.values()))
        if not submitted and self.active and self.active <= self.now.unknown:
            raise UserError(self.now.unknown_in_words())
        return submitted

    def is_ready(self, element: Element, replaced: set[Element]) -> bool:
        """Return whether an element is to be submitted now."""
        if element in self.active or element[0] == FINAL or self.now.missing(element):
            return False
        if element in replaced:
            return True
        reason = why_not(self.now, element)
        if reason == "cancelled" and element not in self.submission.cancelled:
            # SLURM forgets it within minutes; whoever cancelled it should not have to repeat it.
            append(self.study_dir, "cancelled", elements=[element])
        return reason is None

    def final_is_due(self) -> bool:
        """Return whether table and report are open, and something came since they were made."""
        if (FINAL, 0) not in self.now.open or why_not(self.now, (FINAL, 0)):
            return False
        jobs = self.submission.jobs
        # One made of a part of the results is due again after another job or a retry.
        is_complete = (
            bool(jobs) and jobs[-1].array == FINAL and jobs[-1].retries == self.submission.retries
        )
        starts = starts_of(self.study_dir, (FINAL, 0))
        return not (is_complete and starts and starts[-1].get("ended") == "partial")

    def room(self, array: JobArray) -> int:
        """Return how many elements of an array the limits of the site file leave room for."""
        arrays = self.submission.job_arrays
        active_of_kind = sum(arrays[name].kind == array.kind for name, _ in self.active)
        limit_of_kind = self.limits.throttle.get(array.kind, self.limits.max_queued)
        return max(
            0, min(limit_of_kind - active_of_kind, self.limits.max_queued - len(self.active))
        )

    def replaced(self) -> set[Element]:
        """Cancel what waits with an earlier script, is held by SLURM itself or stays unknown."""
        arrays, ids = self.submission.job_arrays, self.submission.element_ids
        jobs_of, unknown = self.submission.jobs_of, self.active & self.now.unknown
        scripts = {name: _hash(self.script(array)) for name, array in arrays.items()}
        old = {
            key
            for key in self.active - unknown
            if (state := self.now.states[key]).waits
            and (jobs_of[key][-1].script != scripts[key[0]] or state.reason in HELD_BY_SLURM)
        }
        # By a retry the user says that they are gone.
        old |= {key for key in unknown if jobs_of[key][-1].retries < self.submission.retries}
        # Only their own users may cancel them.
        others = {jobs_of[key][-1].user for key in old} - {self.user}
        if others:
            names = ", ".join(sorted(others))
            print(f"note: jobs of {names} wait as they are; have {names} submit", file=sys.stderr)
        old = {key for key in old if jobs_of[key][-1].user not in others}
        if not old:
            return set()
        # Recorded first: they are not cancelled by the user.
        append(self.study_dir, "replaced", elements=sorted(ids[key] for key in old))
        cluster.cancel([ids[key] for key in sorted(old)])
        self.active -= old
        return old

    def script(self, array: JobArray) -> str:
        """Return the script of an array by the present site file."""
        return render(array, self.submission.site, self.study_dir, self.excluded)

    def submit(self, array: JobArray, indices: list[int]) -> int:
        """Submit elements of an array, as many as SLURM takes; return how many."""
        left, size = indices, len(indices)
        while left and size:
            try:
                self.sbatch(array, left[:size])
            except cluster.SubmitLimitError as error:
                # SLURM does not say how many it would take: halve until a call fits.
                size = min(size, len(left)) // 2
                if not size:
                    self.full[array.kind] = error  # another may have a partition or QOS of its own
            else:
                left = left[size:]
        return len(indices) - len(left)

    def sbatch(self, array: JobArray, indices: list[int]) -> None:
        """Submit elements of an array by one call, recorded before and after it."""
        for element in ((array.name, index) for index in indices):
            earlier = self.submission.element_ids.get(element)
            # While SLURM ends it, it does not say why; the next start asks then.
            if earlier and (ending := ending_of(self.now.states.get(element))):
                record_killed(self.study_dir, element, earlier, ending)
        text, path = self.script(array), script_path(self.study_dir, array.name)
        if not path.exists() or path.read_text() != text:
            write_script(path, text)
        # The token is the comment of the job: after a crash in the call `adopt` finds it there.
        token = f"quantdyn:{uuid.uuid4().hex}"
        call = {"token": token, "array": array.name, "indices": indices, "script": _hash(text)}
        append(self.study_dir, "calling", **call, time=time.time(), user=self.user)
        try:
            job = cluster.submit(path, ranges(indices), token)
        # After any other error the call stays unanswered, for a job may have come of it.
        except cluster.SubmitLimitError:
            append(self.study_dir, "refused")
            raise
        append(self.study_dir, "submitted", job=job)
        # Counts against the limits of the arrays that follow in this call.
        self.active |= {(array.name, index) for index in indices}


def write_script(path: Path, text: str) -> None:
    """Write a job script, whole or not at all."""
    with replaced_file(path, private=True) as aside:
        aside.write_text(text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cancel(
    study_dir: Path, which: str | None = None, *, after_checkpoint: bool = False
) -> tuple[list[Element], list[str], list[str]]:
    """Cancel elements that wait, run or are still to be submitted.

    Args:
        study_dir: a study that was submitted.
        which: a run, for elements all of whose steps belong to it, or an array; None: everything.
        after_checkpoint: ask a running training by RUN/STOP, which it looks for after every step.

    Returns:
        The elements that SLURM had, the runs that were asked to stop, and users whose jobs this one
        may not cancel: those leave when they start, or run to their end.

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
        alive, users = _cancel(now, [element for element in cancelled if element in now.active])
    return alive, [_run_of(now, element) for element in stopping], users


def _cancel(now: ElementSurvey, elements: list[Element]) -> tuple[list[Element], list[str]]:
    """Cancel elements that SLURM has; return them, and the users whose elements it did not."""
    jobs_of, ids = now.submission.jobs_of, now.submission.element_ids
    cancelled: list[Element] = []
    users: list[str] = []
    for user, theirs in grouped(elements, lambda element: jobs_of[element][-1].user).items():
        if cluster.cancel([ids[element] for element in theirs]):
            cancelled += theirs
        else:
            users.append(user or "others")
    return cancelled, users


def _belongs(now: ElementSurvey, element: Element, which: str | None) -> bool:
    runs = {step.run for step in now.steps(now.open[element])}
    return which in (None, element[0]) or runs == {which}


def _trains(now: ElementSurvey, element: Element) -> bool:
    state = now.states.get(element)
    # The first open step is the one at work, as an element runs its steps in order.
    trains = any(step.kind == "train" for step in now.steps(now.open[element][:1]))
    return trains and state is not None and not state.has_ended and not state.waits


def _run_of(now: ElementSurvey, element: Element) -> str:
    return now.ledger.steps[now.open[element][0]].run
