"""A study as MLflow shows it. The files of the study are the truth; the store can be deleted and made again.

One parent run per study, one child per training run. A metric's step is the number of training tokens, so MLflow's
compare page draws quantization error, curvature and loss against tokens. Mirroring again adds what is new and nothing
twice; a run whose configuration or whose values changed is made anew.
"""

import fcntl
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.collect import TABLE, read_table
from study.layout import MLFLOW_STORE
from study.settings import Study
from train.command import UserError
from train.config import RunConfig
from train.frozen import fingerprint
from train.run_directory import CHECKPOINT_JSON, RunDirectory, sha256_of, write_json
from train.tracking import read_metrics

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

MIRROR_JSON = "mlflow.json"
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100  # MLflow's limits of one request
PARENT_TAG = "mlflow.parentRunId"
# What a run mirrors (study, or study/run) and the exact configuration it does so for.
SUBJECT_TAG, UID_TAG = "quantdyn.subject", "quantdyn.uid"
# Keys of a row of metrics.jsonl that say when and where it was written; all others are figures.
ROW_KEYS = {"step", "tokens", "attempt", "time"}
HELD_OUT_LOSS = "held_out_loss"  # with the name of an average behind it: of that average
# (metric, tokens) -> (value, milliseconds since the epoch)
Points = dict[tuple[str, int], tuple[float, int]]


def store_uri(root: Path) -> str:
    """The tracking URI of the SQLite store that all studies of a root share."""
    return f"sqlite:///{root.absolute() / MLFLOW_STORE}"


def server_command(root: Path) -> str:
    """The shell command that opens MLflow on the store, on this machine alone and without telemetry."""
    arguments = [
        "--backend-store-uri",
        store_uri(root),
        "--artifacts-destination",
        str(root.absolute() / "mlartifacts"),
    ]
    arguments += ["--host", "127.0.0.1", "--port", "5000", "--workers", "1"]
    return f"MLFLOW_DISABLE_TELEMETRY=true {shlex.join([sys.executable, '-m', 'mlflow', 'server', *arguments])}"


@contextmanager
def open_store(root: Path) -> Iterator["MlflowClient"]:
    """A client of the store. A lock keeps two studies from creating its schema at once, which ends both."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # MLflow reads both when it is imported
    os.environ["DO_NOT_TRACK"] = "true"
    from mlflow import MlflowClient

    for logger in ("alembic", "mlflow"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    with (root / ".mlflow.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / MLFLOW_STORE).exists():
            # Aside and renamed: MLflow cannot go on with a schema whose creation was killed half-way.
            partial = root / f".{MLFLOW_STORE}.partial"
            for leftover in root.glob(f"{partial.name}*"):
                leftover.unlink()
            MlflowClient(tracking_uri=f"sqlite:///{partial.absolute()}").search_experiments()
            os.replace(partial, root / MLFLOW_STORE)
        yield MlflowClient(tracking_uri=store_uri(root))


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


def metric_name(key: str) -> str:
    """Name of a figure of metrics.jsonl in MLflow; the name of an average comes first.

    >>> [metric_name(key) for key in ("held_out_loss", "held_out_loss/lawa5x500", "grad_norm")]
    ['held_out_loss', 'lawa5x500/held_out_loss', 'train/grad_norm']
    """
    if key.startswith(f"{HELD_OUT_LOSS}/"):
        return f"{key.removeprefix(f'{HELD_OUT_LOSS}/')}/{HELD_OUT_LOSS}"
    return key if key in ("learning_rate", HELD_OUT_LOSS) else f"train/{key}"


def points_of(directory: RunDirectory, rows: list[dict[str, Any]]) -> Points:
    """Every metric of one run: from metrics.jsonl, and the measurements of its rows of the table.

    Those of an average begin with its name: `lawa5x500/quant/gptq-b3-g128/relative_error`.
    """
    points: Points = {}
    milliseconds = {}
    for row in read_metrics(directory.metrics):
        milliseconds[row["tokens"]] = int(row["time"] * 1000)
        for key in sorted(row.keys() - ROW_KEYS):
            points[metric_name(key), row["tokens"]] = (float(row[key]), milliseconds[row["tokens"]])
    for row in rows:
        average = f"{row['average']}/" if row["average"] else ""
        for name, value in row.items():
            if name.startswith(("quant/", "curvature/")) and value is not None:
                points[average + name, row["tokens"]] = (float(value), milliseconds.get(row["tokens"], 0))
    return points


class _Mirror:
    """One import into one experiment."""

    def __init__(self, client: "MlflowClient", root: Path, study: Study) -> None:
        self.client = client
        self.added = 0
        artifacts = (root.absolute() / "mlartifacts" / study.name).as_uri()
        experiment = client.get_experiment_by_name(study.name)
        if experiment is not None and experiment.artifact_location != artifacts:
            raise UserError(
                f"{root / MLFLOW_STORE} was made elsewhere ({experiment.artifact_location}); it is a mirror: remove it "
                f"and run 'python -m study mirror {study.name} --root {root}'"
            )
        self.experiment: str = (
            experiment.experiment_id if experiment else client.create_experiment(study.name, artifacts)
        )

    def find_run(self, subject: str, uid: str, name: str, started_at: int | None) -> str:
        """The run that mirrors `subject`, made if need be; one of another configuration is deleted."""
        found = None
        for run in self.client.search_runs([self.experiment], f"tags.`{SUBJECT_TAG}` = '{subject}'"):
            if run.data.tags[UID_TAG] == uid and found is None:
                found = str(run.info.run_id)
            else:
                self.client.delete_run(run.info.run_id)
        tags = {SUBJECT_TAG: subject, UID_TAG: uid}
        return found or str(self.client.create_run(self.experiment, started_at, tags, name).info.run_id)

    def add_params(self, run_id: str, content: dict[str, Any]) -> None:
        """Logs the flattened content; MLflow ignores a parameter it holds already."""
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in flatten(content).items()]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self.client.log_batch(run_id, params=params[start : start + PARAMS_PER_BATCH])

    def missing_metrics(self, run_id: str, points: Points) -> list["Metric"] | None:
        """The points the run does not hold yet; None if it holds one that is not among them."""
        from mlflow.entities import Metric

        held: set[tuple[str, int]] = set()
        for name in self.client.get_run(run_id).data.metrics:
            for metric in self.client.get_metric_history(run_id, name):
                if points.get((name, metric.step), (None, 0))[0] != metric.value:
                    return None
                held.add((name, metric.step))
        return [
            Metric(name, value, milliseconds, tokens)
            for (name, tokens), (value, milliseconds) in points.items()
            if (name, tokens) not in held
        ]

    def mirror_run(self, directory: RunDirectory, run: RunConfig, parent: str, study: Study, points: Points) -> str:
        """One child run with parameters, metrics, tags and files."""
        subject, uid = f"{study.name}/{run.name}", f"{study.name}/{run.name}/{fingerprint(run)}"
        started_at = min((milliseconds for _, milliseconds in points.values()), default=None)
        run_id = self.find_run(subject, uid, run.name, started_at)
        metrics = self.missing_metrics(run_id, points)
        if metrics is None:
            self.client.delete_run(run_id)
            run_id = self.find_run(subject, uid, run.name, started_at)
            metrics = self.missing_metrics(run_id, points) or []
        self.add_params(run_id, run.model_dump(mode="json"))
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_BATCH])
        self.added += len(metrics)
        for key, value in self._tags(directory, run, parent).items():
            self.client.set_tag(run_id, key, value)
        for path in (directory.run_json, directory.environment_json):
            if path.exists():
                self.client.log_artifact(run_id, str(path))
        if run.total_steps in directory.complete_steps():
            self.client.set_terminated(run_id, end_time=max(time for _, time in points.values()))
        return run_id

    def _tags(self, directory: RunDirectory, run: RunConfig, parent: str) -> dict[str, str]:
        tags = {PARENT_TAG: parent, "quantdyn.fingerprint": fingerprint(run)}
        steps = directory.complete_steps()
        if steps:
            checkpoint = directory.checkpoint(steps[-1]) / CHECKPOINT_JSON
            tags["quantdyn.checkpoint"] = str(checkpoint.relative_to(directory.path.parent))
            tags["quantdyn.checkpoint_sha256"] = sha256_of(checkpoint)
        if directory.environment_json.exists():
            attempts = json.loads(directory.environment_json.read_text())["attempts"]
            tags["quantdyn.attempts"] = str(len(attempts))
            if attempts[-1].get("commit"):
                tags["mlflow.source.git.commit"] = attempts[-1]["commit"]
        return tags


def mirror(directory: Path, study: Study) -> dict[str, Any]:
    """Brings the MLflow store up to the study's files; returns and writes mlflow.json: run ids and metrics added."""
    rows, root = read_table(directory, study), directory.parent
    with open_store(root) as client:
        importer = _Mirror(client, root, study)
        parent = importer.find_run(study.name, f"{study.name}/{fingerprint(study)}", study.name, None)
        client.set_tag(parent, "mlflow.note.content", study.description)
        settings = study.model_dump(mode="json", exclude={"runs"})
        importer.add_params(parent, settings | {"runs": [run.name for run in study.runs]})
        runs, total = {}, 0
        for run in study.runs:
            run_directory = RunDirectory(directory / run.name)
            points = points_of(run_directory, [row for row in rows if row["run"] == run.name])
            total += len(points)
            runs[run.name] = importer.mirror_run(run_directory, run, parent, study, points)
        for name in ("study.json", TABLE, "report.html"):
            if (directory / name).exists():
                client.log_artifact(parent, str(directory / name))
        if (directory / "figures").is_dir():
            client.log_artifacts(parent, str(directory / "figures"), "figures")
        client.set_terminated(parent)
        content = {
            "experiment": study.name,
            "parent": parent,
            "runs": runs,
            "metrics": total,
            "metrics_added": importer.added,
        }
    write_json(directory / MIRROR_JSON, content)
    return content
