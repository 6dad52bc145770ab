"""Submission of a study: scripts, checks, then an sbatch for every array, each recorded.

What is complete or already in SLURM's hands is not submitted again, so a submission that was
interrupted goes on where it was, and one that is complete does nothing.
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from base.environment import environment
from base.errors import UserError
from base.files import replaced_file, write_json
from slurm import cluster
from slurm.site import Site
from slurm.submission.arrays import FINAL, SETTLE, JobArray, arrays_of
from slurm.submission.holding import release_ready
from slurm.submission.record import (
    Job,
    Submission,
    read_submission,
    script_path,
    submitting,
    write_submission,
)
from slurm.submission.script import LOGS, array_option, render
from study.definition import Study, save_study
from study.machine.disk import check_room
from study.machine.needs import no_layout
from study.machine.run_configurations import write_run_configurations
from study.pipeline.ledger import Ledger
from study.pipeline.steps import steps_of
from study.text.steps import check_text
from study.tracking.store import create_store
from train.planning.plan import fit
from train.run.config import RunConfig

Element = tuple[str, int]  # name of the array, index
LAUNCH_FAILED = "launch failed requeued held"


def write_scripts(study_dir: Path, site: Site, arrays: Iterable[JobArray]) -> None:
    """Write the scripts of the arrays, the site and a description of this machine."""
    scripts = script_path(study_dir, "").parent
    for directory in (study_dir / LOGS, scripts):
        directory.mkdir(parents=True, exist_ok=True)
    for array in arrays:
        with replaced_file(script_path(study_dir, array.name)) as aside:
            aside.write_text(render(array, site, study_dir))
    write_json(scripts / "site.json", site.model_dump(mode="json"))
    write_json(scripts / "environment.json", environment())


def training_layouts(study: Study, site: Site) -> dict[str, RunConfig] | None:
    """Return runs in layouts that fit the site's GPUs; None if their memory is unknown.

    Raises:
        UserError: a run fits none.
    """
    resources = site.resources_of("train")
    if not resources.gpus_per_node or resources.gpu_memory_gb is None:
        return None
    layouts = {}
    for run in study.trained:
        node, world_size = resources.hardware, resources.nodes * resources.ranks
        changed = fit(run, world_size, gpus_per_node=resources.ranks, gpu=node.gpu)
        if changed is None:
            raise UserError(
                f"{no_layout(run, study, f'{resources.nodes} nodes of {node}')}; change"
                " [resources.train]"
            )
        layouts[run.name] = changed
    return layouts


def submit(study: Study, site: Site, *, again: bool = False) -> dict[str, int]:
    """Submit what is open and not in SLURM yet; return the number of elements by array.

    `again` submits also what ended without being complete.

    Raises:
        UserError: SLURM refuses a script, the disk is too small, text is missing, another
            submission is at work or was made for another study or cut.
    """
    study_dir, largest = Path(site.root) / study.name, cluster.max_array_size()
    largest = min(site.limits.max_array_size or largest, largest)
    arrays = arrays_of(study, site.limits.model_copy(update={"max_array_size": largest}))
    with submitting(study_dir):
        recorded = read_submission(study_dir)
        fresh = Submission(site=site, arrays=tuple(arrays))
        if recorded and recorded.arrays != fresh.arrays:
            if active_elements(recorded):
                raise UserError(
                    f"jobs of {study_dir} are in the queue that were cut in another way; wait for"
                    f" them, or cancel them with 'python -m slurm cancel {study.name}', and submit"
                    " again"
                )
            recorded = None
        submission = recorded.model_copy(update={"site": site}) if recorded else fresh
        check_text(study, study_dir)
        check_room(study, Path(site.root), site.disk.reserve_gb)
        write_run_configurations(study_dir, study, training_layouts(study, site))
        save_study(study_dir, study)
        return _Submitter(study_dir, study, submission).run(again)


def active_elements(submission: Submission) -> set[Element]:
    """Return the elements that SLURM holds, runs or will run."""
    names = submission.element_ids()
    known = cluster.states({job.id for job in submission.jobs})
    return {key for key, name in names.items() if name in known and known[name].exit_code is None}


class _Submitter:
    """One submission."""

    def __init__(self, study_dir: Path, study: Study, submission: Submission) -> None:
        self.study_dir, self.site, self.submission = study_dir, submission.site, submission
        self.arrays = submission.job_arrays
        self.ledger = Ledger(study_dir, steps_of(study))
        self.active = active_elements(submission)

    def run(self, again: bool) -> dict[str, int]:
        """Submit in the order of the arrays, so that every dependency has its job by then."""
        self.forget_interrupted()
        wanted = self.wanted(again)
        if again:
            self.release_unlaunched()
        write_scripts(self.study_dir, self.site, [self.arrays[name] for name in wanted])
        for kind in dict.fromkeys(self.arrays[name].kind for name in wanted):
            first = next(name for name in wanted if self.arrays[name].kind == kind)
            cluster.check(script_path(self.study_dir, first))  # before anything is submitted
        if wanted and self.site.mlflow.tracking_uri:
            # Before several jobs would create its schema at once; the root's own SQLite is created
            # under a lock.
            create_store(self.site.mlflow.tracking_uri)
        for name, indices in wanted.items():
            for dependency, group in self.by_dependency(self.arrays[name], indices).items():
                self.sbatch(self.arrays[name], group, dependency)
        if wanted:
            release_ready(self.study_dir, self.ledger)
        return {name: len(indices) for name, indices in wanted.items()}

    def forget_interrupted(self) -> None:
        """Cancel the job of an sbatch that ended before its answer was recorded."""
        if not self.submission.submitting:
            return
        recorded = {job.id for job in self.submission.jobs}
        name = f"{self.study_dir.name}.{self.submission.submitting}"
        lost = [job for job in cluster.jobs_named(name) if job not in recorded]
        if lost:
            print(
                f"an interrupted submission left {', '.join(map(str, lost))}, cancelled now",
                file=sys.stderr,
            )
            cluster.cancel([str(job) for job in lost])
        self.record(submitting=None)

    def release_unlaunched(self) -> None:
        """Release elements that SLURM holds because a node could not start them."""
        known = cluster.states({job.id for job in self.submission.jobs})
        stuck = [
            name
            for name, state in known.items()
            if state.state == "PENDING" and state.reason == LAUNCH_FAILED
        ]
        if stuck:
            print(f"released {', '.join(stuck)}, which a node could not start", file=sys.stderr)
            cluster.release(stuck)

    def wanted(self, again: bool) -> dict[str, list[int]]:
        """Return the indices to submit, by array."""
        known = self.submission.element_ids()
        steps = self.ledger.steps.items()
        complete = {name for name, step in steps if self.ledger.is_complete(step)}
        wanted: dict[str, list[int]] = {}
        for name, array in self.arrays.items():  # settling and the final array come last
            if name.startswith(f"{SETTLE}-"):
                chosen = [0] if array.after[0].array in wanted else []
            elif name == FINAL and wanted:
                if (FINAL, 0) in self.active:  # it waits for less than there will be
                    cluster.cancel([known[FINAL, 0]])
                chosen = [0]
            else:
                chosen = [
                    index
                    for index, element in enumerate(array.elements)
                    if not complete.issuperset(element)
                    and (name, index) not in self.active
                    and (again or (name, index) not in known)
                ]
            if chosen:
                wanted[name] = chosen
        return wanted

    def by_dependency(self, array: JobArray, indices: list[int]) -> dict[str | None, list[int]]:
        """Group the indices by the dependency of their job: on active elements only."""
        newest = self.submission.element_ids()
        groups: dict[str | None, list[int]] = {}
        for index in indices:
            parts: dict[str, set[str]] = {}  # kind -> jobs
            for dependency in array.after:
                others = range(len(self.arrays[dependency.array].elements))
                if dependency.kind == "aftercorr":
                    others = range(index, index + 1)
                active = {(dependency.array, other) for other in others} & self.active
                jobs = {newest[key].partition("_")[0] for key in active}
                parts[dependency.kind] = parts.get(dependency.kind, set()) | jobs
            words = [
                ":".join((kind, *sorted(jobs, key=int))) for kind, jobs in parts.items() if jobs
            ]
            groups.setdefault(",".join(words) or None, []).append(index)
        return groups

    def sbatch(self, array: JobArray, indices: list[int], dependency: str | None) -> None:
        """Submit elements of an array and record it."""
        self.record(submitting=array.name)
        script = script_path(self.study_dir, array.name)
        option = array_option(array, indices, self.site)
        job = cluster.submit(script, dependency=dependency, hold=bool(array.held_for), array=option)
        done = Job(array=array.name, id=job, indices=tuple(indices), time=time.time())
        self.record(submitting=None, jobs=(*self.submission.jobs, done))
        self.active |= {(array.name, index) for index in indices}

    def record(self, **changes: object) -> None:
        """Bring submission.json up to date."""
        self.submission = self.submission.model_copy(update=changes)
        write_submission(self.study_dir, self.submission)


def dry_run(study: Study, site: Site) -> Iterable[str]:
    """Yield the sbatch call and the exact script of every array, without SLURM or any file."""
    study_dir = Path(site.root) / study.name
    for array in arrays_of(study, site.limits):
        option = array_option(array, range(len(array.elements)), site)
        after = ",".join(f"{one.kind}:<{one.array}>" for one in array.after)
        words = cluster.sbatch_words(after or None, bool(array.held_for), option)
        script = script_path(study_dir, array.name)
        yield f"### {' '.join(words)} {script}\n{render(array, site, study_dir)}"
