"""Submission of a study by its user: its scripts are checked, then what can start is submitted.

All else is submitted by `advance`, as soon as its inputs are there.
"""

import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from base.environment import environment
from base.errors import UserError
from base.files import write_json
from base.sharing import check_shared, make_root
from slurm import cluster
from slurm.site import Site
from slurm.submission.advance import submit_ready, write_script
from slurm.submission.arrays import JobArray, arrays_of
from slurm.submission.record import (
    Submission,
    append,
    excluded_nodes,
    read_submission,
    script_path,
    submitting,
    write_plan,
)
from slurm.submission.script import LOGS, ranges, render
from slurm.submission.survey import survey
from study.definition import Study, save_study
from study.machine.disk import check_room
from study.machine.measurable import check_measurable
from study.machine.needs import no_layout, write_run_configurations
from study.text.steps import check_text
from study.tracking.store import check_root, create_store
from train.planning.memory import bytes_to_stop
from train.planning.plan import fit
from train.run.config import RunConfig


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


def check_time_to_save(study: Study, site: Site, layouts: Mapping[str, RunConfig] | None) -> None:
    """Raise UserError if a run may not write its last checkpoint before its time limit ends it.

    Half of the time is left for the step that is under way, hashes, and a file system that is
    slower than the site says.
    """
    resources, notice = site.resources_of("train"), site.limits.stop_seconds_before_limit
    for run in study.trained:
        layout = (layouts or {}).get(run.name, run)
        size = bytes_to_stop(layout, resources.nodes * resources.ranks) * resources.ranks
        seconds = size / (site.disk.write_gb_per_second * 1e9)
        if seconds > notice / 2:
            raise UserError(
                f"{run.name}, asked to stop {notice} s before its time limit, may have"
                f" {size / 1e9:,.0f} GB to write on a node, {seconds:,.0f} s at"
                f" {site.disk.write_gb_per_second:g} GB/s; set limits.stop_seconds_before_limit to"
                f" {math.ceil(2 * seconds)}, take more nodes, or correct disk.write_gb_per_second"
            )


def submit(study: Study, site: Site, *, again: bool = False) -> dict[str, int]:
    """Submit what can start now and is not in SLURM yet; return the number of elements by array.

    What waits with a script that the site would make otherwise is submitted anew. `again` also
    submits what was cancelled, stopped or given up.

    Raises:
        UserError: SLURM refuses a script, the disk is too small, text or the interpreter is
            missing, another submission is at work or was made for another study or cut.
    """
    study_dir, largest = Path(site.root) / study.name, cluster.max_array_size()
    # The site file may ask for smaller arrays than SLURM takes, never for larger ones.
    largest = min(site.limits.max_array_size or largest, largest)
    arrays = tuple(arrays_of(study, site.limits.model_copy(update={"max_array_size": largest})))
    check_start(site)
    make_root(site.root, site.group)
    check_shared(study_dir, site.group)
    with submitting(study_dir):
        recorded = read_submission(study_dir)
        anew = recorded is not None and recorded.arrays != arrays
        if recorded and anew:
            refuse_another_cut(study_dir, study, recorded)
        # All that can be refused comes before the plan: a refused study has no submission.
        check_text(study, study_dir)
        check_measurable(study)
        check_room(study, Path(site.root), site.disk.reserve_gb)
        layouts = training_layouts(study, site)
        write_run_configurations(study_dir, study, layouts)
        save_study(study_dir, study)
        write_scripts(study_dir, site, arrays)
        check_scripts(study_dir, arrays)
        check_time_to_save(study, site, layouts)
        if site.mlflow.tracking_uri:
            # Before several jobs would create its schema at once; the root's own SQLite is created
            # under a lock.
            create_store(site.mlflow.tracking_uri)
        else:
            check_root(Path(site.root))
        write_plan(study_dir, site, arrays, anew=anew)
        if again:
            append(study_dir, "retried")
        return submit_ready(study_dir, verify=True)


def check_start(site: Site) -> None:
    """Raise UserError if what every job starts with is not there."""
    if not os.access(site.python, os.X_OK):
        raise UserError(
            f"{site.python} is not a program; correct python in the site file: jobs start with it"
        )
    if not (site.project / "slurm" / "__main__.py").is_file():
        raise UserError(
            f"{site.project} is not a checkout of this project; correct project in the site file"
        )


def refuse_another_cut(study_dir: Path, study: Study, recorded: Submission) -> None:
    """Raise UserError if jobs are in the queue that were cut into elements in another way."""
    if survey(study_dir, recorded, study).active:
        raise UserError(
            f"jobs of {study_dir} are in the queue that were cut in another way; wait for them, or"
            f" cancel them with 'python -m slurm cancel {study.name}', and submit again"
        )


def write_scripts(study_dir: Path, site: Site, arrays: Iterable[JobArray]) -> None:
    """Write the scripts of the arrays, the site and a description of this machine."""
    scripts = script_path(study_dir, "").parent
    for directory in (study_dir / LOGS, scripts):
        directory.mkdir(parents=True, exist_ok=True)
    excluded = excluded_nodes(study_dir)
    for array in arrays:
        write_script(script_path(study_dir, array.name), render(array, site, study_dir, excluded))
    write_json(scripts / "site.json", site.model_dump(mode="json"), private=True)
    write_json(scripts / "environment.json", environment())


def check_scripts(study_dir: Path, arrays: Iterable[JobArray]) -> None:
    """Raise UserError if SLURM would refuse a script of any kind, before anything is submitted."""
    # Options of scripts differ by kind, else in names alone: one of each is enough.
    by_kind = {array.kind: array for array in arrays}
    full = None
    for array in by_kind.values():
        try:
            cluster.check(script_path(study_dir, array.name), "--array=0-1")
        except cluster.SubmitLimitError as error:
            full = error
    if full:
        print(f"note: {full}; without room for two keep 'status --watch' running", file=sys.stderr)


def not_asked(study: Study, site: Site) -> str:
    """Return what a dry run leaves open, in a line."""
    size = max(len(array.elements) for array in arrays_of(study, site.limits))
    limit = "" if site.limits.max_array_size else ", nor its MaxArraySize: submit cuts arrays there"
    return (
        f"SLURM was not asked whether it takes these scripts{limit}; the largest array has"
        f" {size} element{'s' * (size > 1)}"
    )


def dry_run(study: Study, site: Site) -> Iterable[str]:
    """Yield the sbatch call and the exact script of every array, without SLURM or any file."""
    study_dir = Path(site.root) / study.name
    check_time_to_save(study, site, training_layouts(study, site))
    for array in arrays_of(study, site.limits):
        words = cluster.sbatch_words(ranges(range(len(array.elements))), "quantdyn:TOKEN")
        script = script_path(study_dir, array.name)
        yield f"### {' '.join(words)} {script}\n{render(array, site, study_dir)}"
