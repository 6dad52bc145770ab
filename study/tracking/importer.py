"""Import of a study's files into MLflow. They are the truth: a store can be made again.

One experiment per study, one parent run for the study, one child per training run. The importer may
be killed at any moment and run again, and any number of them may run at once:

- A run has two streams of rows: metrics.jsonl and its rows of the table. A tag of the MLflow run
  holds how many rows of a stream it has, and their hash. It is written in the request that holds
  the last of these rows, after them. After a kill between the two the rows are sent again. The
  store keeps a point once that comes again with the same value, place and time.
- If the rows of a tag are no longer those at the beginning of their stream, they were replaced: by
  a resumed run, or by another measurement. MLflow takes no point back, so the run is made anew.
- Importers of one subject wait for each other at a lock file below the study. It is where the files
  are: whoever can import can lock, on every node of a file system whose locks reach all nodes (NFS,
  Lustre mounted with flock, GPFS), and a lock ends with its process. MLflow offers no comparing
  write by which a claim could be made in the store.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from base.errors import UserError
from base.files import locked, write_json
from base.frozen import fingerprint
from base.names import take_one_of
from study.axes import AnyRun
from study.definition import Study
from study.paths import MIRROR_JSON, MLFLOW_STORE
from study.results.table import Row, read_table
from study.tracking import described
from study.tracking.note import main_metric, results_note
from study.tracking.store import (
    HTTP,
    artifacts_of,
    bounded,
    masked,
    open_store,
    same_place,
    store_uri,
    turn,
)
from study.tracking.streams import MetricStream, metrics_stream, table_stream
from train.run.directory import RunDirectory
from train.run.status import read_status

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

METRICS_PER_BATCH = 1000  # MLflow's limit of one request
# The subject of a run (study, or study/run) and the exact configuration of it.
SUBJECT_TAG, UID_TAG = "quantdyn.subject", "quantdyn.uid"
ROWS_TAG, TABLE_TAG = "quantdyn.rows", "quantdyn.table_rows"  # of the two streams
NOT_FINITE_TAG = "quantdyn.not_finite"
NOTE_TAG = "mlflow.note.content"
# Of an experiment: MLflow would ask which kind it is before it shows anything.
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
NICENESS = 10  # of an importer beside a training: a core that training wants is training's


class Importer:
    """An import into the experiment of one study."""

    def __init__(self, client: "MlflowClient", directory: Path, study: Study) -> None:
        self._client, self._directory, self._study = client, directory, study
        self.added = self.total = 0
        self.not_finite: dict[str, str] = {}  # by the name of the run, see Stream
        # Importers of several runs meet here: one of them makes the experiment and the parent.
        with self._locked("study"):
            self.experiment = self._find_experiment()
            tags = {NOTE_TAG: study.description}
            parent = self._find_run(study.name, study, tags)
            self._describe(parent, described.study_params(study), {})
            self.parent = str(parent.info.run_id)

    def _locked(self, name: str) -> AbstractContextManager[None]:
        return locked(self._directory / ".mlflow" / f"{name}.lock")

    def _find_experiment(self) -> str:
        name, root, uri = self._study.name, self._directory.parent, self._client.tracking_uri
        # a server has a place of its own
        artifacts = None if uri.startswith(HTTP) else (artifacts_of(root) / name).as_uri()
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            tags = {KIND_TAG: KIND}
            return str(self._client.create_experiment(name, artifacts, tags=tags))
        if artifacts and not same_place(experiment.artifact_location, artifacts):
            way = "set another MLFLOW_TRACKING_URI"
            if uri == store_uri(root):  # the root was moved or copied
                way = f"rename {root / MLFLOW_STORE}, a new one is made of the studies' files"
            raise UserError(
                f"{masked(uri)} holds an experiment {name} that was made elsewhere: its artifacts"
                f" are in {experiment.artifact_location}, which MLflow cannot change; {way}, and"
                f" run 'python -m study mirror {name} --root {root}'"
            )
        # MLflow keeps the name of a deleted experiment, so a new one could not be made.
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    def _find_run(
        self,
        subject: str,
        configuration: Study | AnyRun,
        tags: dict[str, str],
        started_at: int | None = None,
    ) -> "Run":
        """Return the run of `subject`, made if need be; one of another configuration is deleted."""
        identity = {SUBJECT_TAG: subject, UID_TAG: f"{subject}/{fingerprint(configuration)}"}
        existing = None
        condition = f"tags.`{SUBJECT_TAG}` = '{subject}'"
        for run in self._client.search_runs([self.experiment], condition):
            # The first run of this very configuration is kept; those of earlier ones go.
            if run.data.tags[UID_TAG] == identity[UID_TAG] and existing is None:
                existing = run
            else:
                self._client.delete_run(run.info.run_id)
        create = self._client.create_run
        return existing or create(self.experiment, started_at, identity | tags, configuration.name)

    def _describe(self, run: "Run", params: dict[str, str], tags: dict[str, str]) -> None:
        """Log the tags, and the parameters that the run lacks: MLflow lets none be changed."""
        from mlflow.entities import Param, RunTag

        # A parameter that is there is never sent again, since MLflow refuses another value.
        missing = [
            Param(key, bounded(value))
            for key, value in params.items()
            if key not in run.data.params
        ]
        current = [RunTag(key, bounded(value)) for key, value in tags.items()]
        self._client.log_batch(run.info.run_id, params=missing, tags=current)

    def import_run(self, run: AnyRun, table: Sequence[Row] | None) -> str:
        """Import metrics of a run and rows of the table, if given; return its id in MLflow."""
        directory = RunDirectory(self._directory / run.name)
        subject = f"{self._study.name}/{run.name}"
        with self._locked(f"run-{run.name}"):
            # what the files have
            training = metrics_stream(directory.metrics)
            streams = {ROWS_TAG: training}
            if table is not None:
                rows = [row for row in table if row["run"] == run.name]
                streams[TABLE_TAG] = table_stream(rows, training)
            self.total += sum(
                len(of_row) for stream in streams.values() for of_row in stream.metrics
            )
            # MLflow counts milliseconds.
            times = [int(row["time"] * 1000) for row in training.rows]
            started_at, ended_at = (times[0], times[-1]) if times else (None, None)
            tags = described.run_tags(directory, run, self.parent)
            if lacking := "; ".join(filter(None, (each.not_finite for each in streams.values()))):
                tags[NOT_FINITE_TAG] = self.not_finite[run.name] = lacking

            # how far the store is; a run with other rows than the files is made anew
            mirrored = self._find_run(subject, run, tags, started_at)
            progress = {
                tag: mirrored.data.tags.get(tag, stream.tags[0]) for tag, stream in streams.items()
            }
            # The store holds rows that the files have no more, and MLflow takes none back.
            if not all(progress[tag] in stream.tags for tag, stream in streams.items()):
                self._client.delete_run(mirrored.info.run_id)
                mirrored = self._find_run(subject, run, tags, started_at)
                progress = {tag: stream.tags[0] for tag, stream in streams.items()}

            # what is missing
            self._describe(mirrored, described.run_params(self._study, run), tags)
            for tag, stream in streams.items():
                self._import_stream(mirrored, tag, stream, stream.tags.index(progress[tag]))
            self._upload(mirrored, described.run_files(directory))

            status = described.status_of(directory, run)
            if status == "RUNNING" != mirrored.info.status:
                self._client.update_run(mirrored.info.run_id, status)
            # Ended at the time of its last row, not of this import.
            elif status != mirrored.info.status:
                self._client.set_terminated(mirrored.info.run_id, status, ended_at)
        return str(mirrored.info.run_id)

    def _import_stream(self, run: "Run", tag: str, stream: MetricStream, start: int) -> None:
        """Send the rows from index `start` on, some rows to a request, with their tag."""
        batch: list[Metric] = []
        for count, of_row in enumerate(stream.metrics[start:], start):
            # Rows are not split: the tag in the request says how many whole rows the store has.
            if len(batch) + len(of_row) > METRICS_PER_BATCH:
                self._send(run, batch, tag, stream.tags[count])
                batch = []
            batch += of_row
        if batch:
            self._send(run, batch, tag, stream.tags[-1])

    def _send(self, run: "Run", metrics: list["Metric"], tag: str, rows: str) -> None:
        from mlflow.entities import RunTag

        with turn(self._client.tracking_uri):
            self._client.log_batch(run.info.run_id, metrics, tags=[RunTag(tag, rows)])
        self.added += len(metrics)

    def _upload(self, run: "Run", files: dict[str, Path]) -> None:
        for name, path in files.items():
            folder = str(PurePosixPath(name).parent).strip(".")
            self._client.log_artifact(run.info.run_id, str(path), folder)

    def finish_study(self, table: Sequence[Row]) -> None:
        """Upload the files of the study, which is done if all of its runs are.

        Its description, which MLflow shows first, is the table of the runs' ends.
        """
        run = self._client.get_run(self.parent)
        self._client.set_tag(self.parent, NOTE_TAG, results_note(self._study, table))
        self._upload(run, described.study_files(self._directory))
        is_complete = all(
            described.has_ended(RunDirectory(self._directory / run.name), run)
            for run in self._study.runs
        )
        if is_complete and run.info.status != "FINISHED":
            self._client.set_terminated(self.parent)


def mirror(
    directory: Path, study: Study, uri: str, rows: Sequence[Row] | None = None
) -> dict[str, Any]:
    """Bring the store up to the study's files; return mlflow.json: run ids and metrics added.

    By default `rows` are those of the table. Of a study at work they are the first ones of each
    run, those that no later result changes: the others would have the run made anew.
    """
    table = read_table(directory, study) if rows is None else rows
    with open_store(uri) as client:
        importer = Importer(client, directory, study)
        runs = {run.name: importer.import_run(run, table) for run in study.runs}
        importer.finish_study(table)
    content = {
        "experiment": study.name,
        "experiment_id": importer.experiment,
        "store": masked(uri),
        "parent": importer.parent,
        "ordered_by": main_metric(study),
        "runs": runs,
        "metrics": importer.total,
        "metrics_added": importer.added,
        "not_finite": importer.not_finite,
    }
    write_json(directory / MIRROR_JSON, content)
    return content


def mirror_run(directory: Path, study: Study, name: str, uri: str) -> int:
    """Bring one run's metrics up to its files; return how many were added."""
    runs = {run.name: run for run in study.runs}
    if name not in runs:
        raise UserError(f"{study.name} has no run {name}; {take_one_of(name, runs)}")
    with open_store(uri) as client:
        importer = Importer(client, directory, study)
        importer.import_run(runs[name], None)
    return importer.added


def follow(directory: Path, study: Study, name: str, uri: str, seconds: int) -> None:
    """Import a run every so many seconds until it has ended or SIGTERM comes, then once more.

    A run has ended when its status.json says so; one that was there before, of an earlier attempt
    that failed or was preempted, does not count. A store that fails is reported in one line and
    tried again the next time. Training never waits for this process.

    Raises:
        UserError: if the last import fails.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    os.nice(NICENESS)
    run = RunDirectory(directory / name)
    # Of an attempt before this follower: only another status later tells of an end.
    earlier = read_status(run)
    while True:
        status = read_status(run)
        # A failed status of an earlier attempt is there from the start and does not count.
        has_ended = status is not None and (status.status == "done" or status != earlier)
        # Decided before the import, which then holds all that was written by that time.
        is_last = stop.is_set() or has_ended
        try:
            added = mirror_run(directory, study, name, uri)
            print(f"{time.strftime('%H:%M:%S')} {name}: {added} metrics added", flush=True)
        except (UserError, OSError) as error:
            if is_last:
                raise
            print(f"{time.strftime('%H:%M:%S')} {name}: {error}", file=sys.stderr, flush=True)
        if is_last:
            return
        stop.wait(seconds)
