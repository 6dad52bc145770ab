"""Brings MLflow up to the files of a study. The files are the truth; a store can be deleted and made again.

One experiment per study, one parent run for the study, one child per training run. The importer may be killed at any
moment and run again, and any number of them may run at once:

- A tag of the MLflow run holds how many rows of each file it has, and their hash. It is written in the request that
  holds the last of these rows, behind them. After a kill between the two the rows are sent again, and the store knows
  each: it keeps a point once that comes again with the same value, place and time, and the time is the file's.
- If the rows that the tag vouches for are no longer what the file begins with, a resumed run has replaced them. MLflow
  cannot take a point back, so the run is made anew.
- Importers of one subject wait for each other at a lock file below the study. It lies where the files are: whoever can
  import can lock, on every node of a file system whose locks reach all nodes (NFS, Lustre mounted with flock, GPFS),
  and a lock ends with its process. MLflow offers no comparing write by which a claim could be made in the store.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from study.collect import read_table
from study.released import ReleasedRun
from study.settings import Study
from study.tracking import described
from study.tracking.points import Point, Prefix, Row, Stream, check_finite, streams_of
from study.tracking.store import Store, locked, masked, open_store
from study.tracking.table import TABLE_METRIC, column_tags, digest_of, table_points
from train.command import UserError
from train.config import RunConfig
from train.frozen import fingerprint
from train.run_directory import RunDirectory, sha256_of, write_json

if TYPE_CHECKING:
    from mlflow.entities import Run

MIRROR_JSON = "mlflow.json"
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100  # MLflow's limits of one request
# What a run mirrors (study, or study/run) and the exact configuration it does so for.
SUBJECT_TAG, UID_TAG = "quantdyn.subject", "quantdyn.uid"
ROWS_TAG, TABLE_TAG, FILES_TAG = "quantdyn.rows", "quantdyn.table", "quantdyn.files"
UNFINISHED = "unfinished"  # of the table: an import of it has begun and not ended


def search_runs(store: Store, experiment: str, condition: str) -> Iterator["Run"]:
    """All active runs that meet a condition, however many pages they fill."""
    token = None
    while True:
        page = store.client.search_runs([experiment], condition, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


class Importer:
    """Imports into the experiment of one study."""

    def __init__(self, store: Store, directory: Path, study: Study) -> None:
        self._store, self._client = store, store.client
        self._directory, self._study = directory, study
        self.added = self.total = 0
        with self._locked("study"):
            self._experiment = self._find_experiment()
            self.parent = self._find_parent()

    def _locked(self, name: str) -> AbstractContextManager[None]:
        return locked(self._directory / ".mlflow" / f"{name}.lock")

    def _find_experiment(self) -> str:
        store, name = self._store, self._study.name
        artifacts = (store.artifacts / name).as_uri() if store.artifacts else None
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name, artifacts))
        if artifacts and found.artifact_location != artifacts:
            raise UserError(
                f"{masked(store.uri)} holds an experiment {name} that was made elsewhere ({found.artifact_location}); "
                f"it is a mirror: remove it, or give another --tracking-uri, and run 'python -m study mirror {name} "
                f"--root {store.root}'"
            )
        return str(found.experiment_id)

    def _find_parent(self) -> str:
        study = self._study
        parent = self._find_run(study.name, f"{study.name}/{fingerprint(study)}", study.name)
        self._describe(parent, described.study_params(study), self._parent_tags())
        return str(parent.info.run_id)

    def _parent_tags(self) -> dict[str, str]:
        study = self._study
        return {"mlflow.note.content": study.description, "quantdyn.num_runs": str(len(study.runs))} | column_tags(
            study
        )

    def _find_run(
        self, subject: str, uid: str, name: str, tags: dict[str, str] | None = None, started_at: int | None = None
    ) -> "Run":
        """The run that mirrors `subject`, made if need be; one of another configuration is deleted."""
        found = None
        for run in search_runs(self._store, self._experiment, f"tags.`{SUBJECT_TAG}` = '{subject}'"):
            if run.data.tags[UID_TAG] == uid and found is None:
                found = run
            else:
                self._client.delete_run(run.info.run_id)
        tags = {SUBJECT_TAG: subject, UID_TAG: uid} | (tags or {})
        return found or self._client.create_run(self._experiment, started_at, tags, name)

    def _describe(self, run: "Run", params: dict[str, str], tags: dict[str, str]) -> None:
        """Logs what the run does not say yet; MLflow ignores a parameter that it holds already."""
        from mlflow.entities import Param, RunTag

        missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        changed = [RunTag(key, value) for key, value in tags.items() if run.data.tags.get(key) != value]
        for start in range(0, max(len(missing), len(changed)), PARAMS_PER_BATCH):
            part = slice(start, start + PARAMS_PER_BATCH)
            self._client.log_batch(run.info.run_id, params=missing[part], tags=changed[part])

    def import_run(self, run: RunConfig | ReleasedRun, table: list[Row] | None) -> str:
        """One run with its metrics and, unless it is None, its rows of the table; returns the id of its MLflow run."""
        directory, study = RunDirectory(self._directory / run.name), self._study
        subject = f"{study.name}/{run.name}"
        position = [one.name for one in study.runs].index(run.name)
        with self._locked(f"run-{run.name}"):
            streams = streams_of(directory)
            tags = described.run_tags(directory, run, self.parent, position)
            rows = [row for row in table if row["run"] == run.name] if table is not None else None
            points = _table_points(run, rows, streams[0]) if rows is not None else []
            started_at = int(streams[0].rows[0]["time"] * 1000) if streams[0].rows else None
            self.total += len(points) + sum(len(of_row) for stream in streams for of_row in stream.points)
            while True:
                mirrored = self._find_run(subject, f"{subject}/{fingerprint(run)}", run.name, tags, started_at)
                missing = self._missing(mirrored, rows, points)
                if missing is not None and all(_continues(mirrored, stream) for stream in streams):
                    break
                self._client.delete_run(mirrored.info.run_id)
            self._describe(mirrored, described.run_params(run), tags)
            for stream in streams:
                self._import_stream(mirrored, stream)
            if rows is not None:
                self._import_table(mirrored, rows, missing)
            self._finish(mirrored, directory, run, streams[0])
        return str(mirrored.info.run_id)

    def _missing(self, run: "Run", rows: list[Row] | None, points: list[Point]) -> list[Point] | None:
        """The points of the table that the run does not hold yet; None if it holds one that is not among them."""
        if rows is None or run.data.tags.get(TABLE_TAG) == digest_of(rows):
            return []
        wanted = {(point.name, point.at): point.value for point in points}
        held = set()
        for name in run.data.metrics:
            if TABLE_METRIC.fullmatch(name):
                for metric in self._client.get_metric_history(run.info.run_id, name):
                    if wanted.get((name, metric.step)) != metric.value:
                        return None
                    held.add((name, metric.step))
        return [point for point in points if (point.name, point.at) not in held]

    def _import_stream(self, run: "Run", stream: Stream) -> None:
        """Sends the rows that the run does not have, some rows to a request, with the tag that vouches for them."""
        done = _done(run, stream)
        prefix, batch = Prefix(stream.rows[:done]), list[Point]()
        for row, points in zip(stream.rows[done:], stream.points[done:], strict=True):
            if len(batch) + len(points) > METRICS_PER_BATCH:
                self._send(run, batch, {f"{ROWS_TAG}.{stream.name}": str(prefix)})
                batch = []
            prefix.add(row)
            batch += check_finite(points)
        if batch:
            self._send(run, batch, {f"{ROWS_TAG}.{stream.name}": str(prefix)})

    def _import_table(self, run: "Run", rows: list[Row], missing: list[Point]) -> None:
        if missing:
            self._client.set_tag(run.info.run_id, TABLE_TAG, UNFINISHED)
        for start in range(0, len(missing), METRICS_PER_BATCH):
            self._send(run, missing[start : start + METRICS_PER_BATCH], {})
        for key, value in described.table_tags(rows, digest_of(rows)).items():
            if run.data.tags.get(key) != value:
                self._client.set_tag(run.info.run_id, key, value)

    def _send(self, run: "Run", points: list[Point], tags: dict[str, str]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = [Metric(point.name, point.value, point.milliseconds, point.at) for point in points]
        with self._store.writing():
            said = [RunTag(key, value) for key, value in tags.items()]
            self._client.log_batch(run.info.run_id, metrics, tags=said)
        self.added += len(metrics)

    def _finish(self, run: "Run", directory: RunDirectory, settings: RunConfig | ReleasedRun, metrics: Stream) -> None:
        """Files, data sets and how the run stands."""
        self._upload(run, described.run_files(directory))
        held = {(one.dataset.name, one.dataset.digest) for one in (run.inputs.dataset_inputs if run.inputs else ())}
        inputs = described.datasets(directory, settings)
        if any((one.dataset.name, one.dataset.digest) not in held for one in inputs):
            with self._locked("study"):  # runs share data sets
                self._client.log_inputs(run.info.run_id, inputs)
        status = described.status_of(directory, settings)
        if status == "RUNNING" != run.info.status:
            self._client.update_run(run.info.run_id, status)
        elif status != run.info.status:
            ended_at = int(metrics.rows[-1]["time"] * 1000) if metrics.rows else None
            self._client.set_terminated(run.info.run_id, status, ended_at)

    def _upload(self, run: "Run", files: dict[str, Path]) -> None:
        """Uploads files unless the run has all of them as they are."""
        held = hashlib.sha256(json.dumps({name: sha256_of(path) for name, path in files.items()}).encode()).hexdigest()
        if run.data.tags.get(FILES_TAG) != held:
            for name, path in files.items():
                self._client.log_artifact(run.info.run_id, str(path), str(PurePosixPath(name).parent).strip("."))
            self._client.set_tag(run.info.run_id, FILES_TAG, held)

    def finish_study(self) -> None:
        """Files of the study, and that it is done if all of its runs are."""
        run = self._client.get_run(self.parent)
        self._upload(run, described.study_files(self._directory))
        done = all(described.is_final(RunDirectory(self._directory / one.name), one) for one in self._study.runs)
        if done and run.info.status != "FINISHED":
            self._client.set_terminated(self.parent)


def _table_points(run: RunConfig | ReleasedRun, rows: list[Row], metrics: Stream) -> list[Point]:
    """The points of the run's rows of the table, at the times at which training reached their tokens."""
    milliseconds = {row["tokens"]: int(row["time"] * 1000) for row in metrics.rows}
    return check_finite(table_points(rows, milliseconds, run.total_steps))


def _done(run: "Run", stream: Stream) -> int:
    """How many rows of the stream the run has."""
    return int(run.data.tags.get(f"{ROWS_TAG}.{stream.name}", "0").split()[0])


def _continues(run: "Run", stream: Stream) -> bool:
    """Whether the stream begins with the rows that the run has."""
    said = run.data.tags.get(f"{ROWS_TAG}.{stream.name}")
    return said is None or said == str(Prefix(stream.rows[: _done(run, stream)]))


def mirror_run(directory: Path, study: Study, name: str, uri: str) -> int:
    """Brings one run's metrics up to its files, whatever the table says; returns how many were added."""
    runs = {run.name: run for run in study.runs}
    if name not in runs:
        raise UserError(f"{study.name} has no run {name}; give one of {', '.join(runs)}")
    with open_store(directory.parent, uri) as store:
        importer = Importer(store, directory, study)
        importer.import_run(runs[name], None)
    return importer.added


def mirror(directory: Path, study: Study, uri: str) -> dict[str, Any]:
    """Brings the store up to the study's files; returns and writes mlflow.json: run ids and metrics added."""
    table = read_table(directory, study)
    with open_store(directory.parent, uri) as store:
        importer = Importer(store, directory, study)
        runs = {run.name: importer.import_run(run, table) for run in study.runs}
        importer.finish_study()
    content = {
        "experiment": study.name,
        "store": masked(uri),
        "parent": importer.parent,
        "runs": runs,
        "metrics": importer.total,
        "metrics_added": importer.added,
    }
    write_json(directory / MIRROR_JSON, content)
    return content
