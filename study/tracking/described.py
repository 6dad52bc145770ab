"""Parameters, tags, data sets and files of a run in MLflow, beside its metrics."""

import math
from pathlib import Path
from typing import Any

from base.environment import PROJECT
from base.files import sha256_of
from base.frozen import fingerprint
from study.axes import QUANTITIES, AnyRun
from study.definition import Study
from study.paths import REPORT
from study.released import ReleasedRun
from study.results.table import TABLE
from train.model.config import parameter_shapes
from train.run.directory import CHECKPOINT_JSON, RunDirectory
from train.run.environment import attempts
from train.run.status import divergence, read_status

PARENT_TAG = "mlflow.parentRunId"
PROVENANCE_TAGS = {"quantdyn.version": PROJECT, "mlflow.source.git.commit": "commit"}  # of attempts
STATUSES = {"done": "FINISHED", "diverged": "FAILED", "failed": "FAILED"}  # of status.json


def run_params(study: Study, run: AnyRun) -> dict[str, str]:
    """Return the settings by which runs are compared, named as the axes of a study are.

    run.json, an artifact, has all settings.
    """
    if isinstance(run, ReleasedRun):
        params: dict[str, Any] = {
            "peak_lr": run.peak_lr,
            "source": run.source,
            "model": run.model,
            "stage": run.stage,
        }
    else:
        shapes = parameter_shapes(run.model)
        params = {key: quantity.of(run) for key, quantity in QUANTITIES.items()} | {
            "horizon_tokens": getattr(run.schedule.phase, "horizon_tokens", None),
            "parameters": sum(math.prod(shape) for shape in shapes.values()),
            "precision": run.precision,
            "seed": run.seed,
        }
        params |= {axis.key: axis.values[run.name] for axis in study.axes}
    return {name: str(value) for name, value in params.items() if value is not None}


def is_final(directory: RunDirectory, run: AnyRun) -> bool:
    """Return whether the run has its last checkpoint."""
    return isinstance(run, ReleasedRun) or run.total_steps in directory.complete_steps()


def has_ended(directory: RunDirectory, run: AnyRun) -> bool:
    """Return whether the run has its last checkpoint, or diverged."""
    return is_final(directory, run) or divergence(directory, fingerprint(run)) is not None


def status_of(directory: RunDirectory, run: AnyRun) -> str:
    """Return MLflow's word for the state of the run: FINISHED, FAILED or RUNNING."""
    # The last checkpoint counts, whatever status.json says of the attempts.
    if is_final(directory, run):
        return "FINISHED"
    status = read_status(directory)
    return STATUSES.get(status.status, "RUNNING") if status else "RUNNING"


def run_tags(directory: RunDirectory, run: AnyRun, parent: str) -> dict[str, str]:
    """Return the lineage: version, commit, jobs, and path and hash of the newest checkpoint."""
    tags = {PARENT_TAG: parent, "quantdyn.fingerprint": fingerprint(run)}
    diverged = divergence(directory, fingerprint(run))
    if diverged:
        tags["quantdyn.diverged"] = diverged.words
    steps = directory.complete_steps()
    if steps:
        checkpoint = directory.checkpoint(steps[-1]) / CHECKPOINT_JSON
        tags["quantdyn.checkpoint"] = str(checkpoint.relative_to(directory.path.parent))
        tags["quantdyn.checkpoint_sha256"] = sha256_of(checkpoint)
    if directory.environment_json.exists():
        recorded = attempts(directory.environment_json)
        jobs = dict.fromkeys(
            str(entry["slurm_job"]) for entry in recorded if entry.get("slurm_job")
        )
        tags["quantdyn.attempts"] = str(len(recorded))
        if jobs:
            tags["quantdyn.slurm_jobs"] = " ".join(jobs)
        last = recorded[-1]
        tags |= {tag: str(last[key]) for tag, key in PROVENANCE_TAGS.items() if last.get(key)}
    return tags


def run_files(directory: RunDirectory) -> dict[str, Path]:
    """Return configuration and environment of a run, by their name among its artifacts."""
    paths = (directory.run_json, directory.environment_json)
    return {path.name: path for path in paths if path.exists()}


def study_files(directory: Path) -> dict[str, Path]:
    """Return configuration, table, report, its figures and tables, by their names there."""
    names = ("study.json", TABLE, REPORT)
    paths = [directory / name for name in names]
    paths += [path for folder in ("figures", "tables") for path in directory.glob(f"{folder}/**/*")]
    return {str(path.relative_to(directory)): path for path in sorted(paths) if path.is_file()}


def study_params(study: Study) -> dict[str, str]:
    """Return the settings by which studies are compared; study.json, an artifact, has all."""
    quantization = study.quantization
    return {
        "num_runs": str(len(study.runs)),
        "axes": ", ".join(axis.key for axis in study.axes),
        "specs": " ".join(quantization.at_the_end),
        "calibration_seeds": str(quantization.calibration_seeds),
        "eval_tokens": str(quantization.eval_tokens),
    }
