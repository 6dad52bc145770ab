"""What MLflow says of a run beside its metrics: parameters, tags, data sets, files. Only here its settings are read."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.collect import TABLE
from study.released import ReleasedRun
from study.settings import Study
from study.tracking.points import Row
from study.tracking.table import axis_of
from train.config import RunConfig
from train.families import parameter_shapes
from train.frozen import fingerprint
from train.manifest import read_manifest
from train.run_directory import CHECKPOINT_JSON, RunDirectory, sha256_of
from train.tracking import attempts

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

PARENT_TAG = "mlflow.parentRunId"
SETTINGS = "run.json"  # begins the names of all settings, behind the few by which runs are compared
DIGEST_CHARACTERS = 36  # of a data set's hash that MLflow holds; the whole one is a tag
STATUSES = {"done": "FINISHED", "failed": "FAILED"}  # of status.json; a preempted run goes on


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested keys joined by dots, values as text.

    >>> flatten({"schedule": {"warmup_tokens": 5}})
    {'schedule.warmup_tokens': '5'}
    """
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def run_params(run: RunConfig | ReleasedRun) -> dict[str, str]:
    """Few short names first, for MLflow's compare page and its parallel coordinates; then all of run.json."""
    if isinstance(run, ReleasedRun):
        short: dict[str, Any] = {"peak_lr": run.peak_lr, "source": run.source, "total_steps": run.total_steps}
    else:
        phase, anneal = run.schedule.phase, run.schedule.anneal
        shapes = parameter_shapes(run.model)
        short = {
            "anneal_steps": run.total_steps - anneal.start_step if anneal else 0,
            "batch_tokens": run.tokens_per_step,
            "engine": run.engine,
            "horizon_tokens": getattr(phase, "horizon_tokens", None),
            "parameters": sum(math.prod(shape) for shape in shapes.values()),
            "peak_lr": run.optimizer.peak_lr,
            "precision": run.precision,
            "schedule": f"{phase.kind}+{anneal.shape}" if anneal else phase.kind,
            "seed": run.seed,
            "total_tokens": run.total_steps * run.tokens_per_step,
            "weight_decay": run.optimizer.weight_decay,
        }
    settings = run.model_dump(mode="json", exclude={"revisions"})
    return flatten({name: value for name, value in short.items() if value is not None}) | flatten(
        settings, f"{SETTINGS}/"
    )


def is_final(directory: RunDirectory, run: RunConfig | ReleasedRun) -> bool:
    """Whether the last row of the table is that of the end of the run."""
    return isinstance(run, ReleasedRun) or run.total_steps in directory.complete_steps()


def status_of(directory: RunDirectory, run: RunConfig | ReleasedRun) -> str:
    """MLflow's word for how the run stands: FINISHED, FAILED or RUNNING."""
    if is_final(directory, run):
        return "FINISHED"
    try:
        return STATUSES.get(json.loads(directory.status_json.read_text())["status"], "RUNNING")
    except FileNotFoundError:
        return "RUNNING"


def run_tags(directory: RunDirectory, run: RunConfig | ReleasedRun, parent: str, position: int) -> dict[str, str]:
    """Lineage: settings, commit, jobs, and path and hash of the newest checkpoint, which is never uploaded."""
    tags = {PARENT_TAG: parent, "quantdyn.fingerprint": fingerprint(run), "quantdyn.position": str(position)}
    steps = directory.complete_steps()
    if steps:
        checkpoint = directory.checkpoint(steps[-1]) / CHECKPOINT_JSON
        tags["quantdyn.checkpoint"] = str(checkpoint.relative_to(directory.path.parent))
        tags["quantdyn.checkpoint_sha256"] = sha256_of(checkpoint)
    if directory.environment_json.exists():
        recorded = attempts(directory.environment_json)
        jobs = dict.fromkeys(str(attempt["slurm_job"]) for attempt in recorded if attempt.get("slurm_job"))
        tags["quantdyn.attempts"] = str(len(recorded))
        if jobs:
            tags["quantdyn.slurm_jobs"] = " ".join(jobs)
        if recorded[-1].get("commit"):
            tags["mlflow.source.git.commit"] = recorded[-1]["commit"]
    return tags


def table_tags(rows: list[Row], digest: str) -> dict[str, str]:
    """What an export needs of a run beside its metrics."""
    return {"quantdyn.axis": axis_of(rows), "quantdyn.table": digest}


def datasets(directory: RunDirectory, run: RunConfig | ReleasedRun) -> list["DatasetInput"]:
    """The token files of a trained run whose manifests are there: name, hash and path."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if isinstance(run, ReleasedRun):
        return []
    prefixes = [("train", part.source) for part in run.data.train_sources] + [("held_out", run.data.held_out)]
    found = []
    for context, name in prefixes:
        prefix = directory.resolve(name)
        if prefix.with_name(f"{prefix.name}.json").exists():
            manifest = read_manifest(prefix)
            profile = json.dumps({"tokens": manifest.tokens, "tokenizer_sha256": manifest.tokenizer_sha256})
            source, digest = json.dumps({"uri": str(prefix)}), manifest.sha256[:DIGEST_CHARACTERS]
            tags = [InputTag("mlflow.data.context", context), InputTag("sha256", manifest.sha256)]
            data = Dataset(prefix.name, digest, "local", source, json.dumps({}), profile)
            found.append(DatasetInput(data, tags))
    return found


def run_files(directory: RunDirectory) -> dict[str, Path]:
    """Configuration and environment of a run, by their name among its artifacts."""
    paths = (directory.run_json, directory.environment_json)
    return {path.name: path for path in paths if path.exists()}


def study_files(directory: Path) -> dict[str, Path]:
    """Configuration, table, report and figures of a study, by their name among its artifacts."""
    paths = [directory / "study.json", directory / TABLE, directory / "report.html", *directory.glob("figures/*")]
    return {str(path.relative_to(directory)): path for path in sorted(paths) if path.is_file()}


def study_params(study: Study) -> dict[str, str]:
    """Settings of the study; its runs are runs of their own."""
    return flatten(study.model_dump(mode="json", exclude={"runs"})) | {"num_runs": str(len(study.runs))}
