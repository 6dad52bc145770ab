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

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from base.errors import UserError
from base.files import write_json
from base.frozen import fingerprint
from study.axes import AnyRun
from study.definition import Study
from study.results.table import Row, read_table
from study.tracking import described
from study.tracking.points import Point, Prefix, Stream, stream_of
from study.tracking.store import Store, locked, masked, open_store, turn
from study.tracking.table import table_stream
from train.run.directory import RunDirectory

if TYPE_CHECKING:
    from mlflow.entities import Run

MIRROR_JSON = "mlflow.json"
METRICS_PER_BATCH = 1000  # MLflow's limit of one request
# The subject of a run (study, or study/run) and the exact configuration of it.
SUBJECT_TAG, UID_TAG = "quantdyn.subject", "quantdyn.uid"
ROWS_TAG, TABLE_TAG = "quantdyn.rows", "quantdyn.table_rows"  # of the two streams
NOTE_TAG = "mlflow.note.content"


class Importer:
    """An import into the experiment of one study."""

    def __init__(self, store: Store, directory: Path, study: Study) -> None:
        self._store, self._client = store, store.client
        self._directory, self._study = directory, study
        self.added = self.total = 0
        with self._locked("study"):
            self._experiment = self._find_experiment()
            parent = self._find_run(study.name, f"{study.name}/{fingerprint(study)}", study.name)
            tags = {NOTE_TAG: study.description}
            self._describe(parent, described.study_params(study), tags)
            self.parent = str(parent.info.run_id)

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
                f"{masked(store.uri)} holds an experiment {name} that was made elsewhere"
                f" ({found.artifact_location}); it is a mirror: remove it, or set another"
                f" MLFLOW_TRACKING_URI, and run 'python -m study mirror {name} --root {store.root}'"
            )
        return str(found.experiment_id)

    def _find_run(
        self,
        subject: str,
        uid: str,
        name: str,
        tags: dict[str, str] | None = None,
        started_at: int | None = None,
    ) -> "Run":
        """The run of `subject`, made if need be; one of another configuration is deleted."""
        found = None
        condition = f"tags.`{SUBJECT_TAG}` = '{subject}'"
        for run in self._client.search_runs([self._experiment], condition):
            if run.data.tags[UID_TAG] == uid and found is None:
                found = run
            else:
                self._client.delete_run(run.info.run_id)
        tags = {SUBJECT_TAG: subject, UID_TAG: uid} | (tags or {})
        return found or self._client.create_run(self._experiment, started_at, tags, name)

    def _describe(self, run: "Run", params: dict[str, str], tags: dict[str, str]) -> None:
        """Log what the run does not say yet; MLflow ignores a parameter that it holds already."""
        from mlflow.entities import Param, RunTag

        missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        changed = [
            RunTag(key, value) for key, value in tags.items() if run.data.tags.get(key) != value
        ]
        self._client.log_batch(run.info.run_id, params=missing, tags=changed)

    def import_run(self, run: AnyRun, table: Sequence[Row] | None) -> str:
        """Import metrics of a run and rows of the table, if given; return its id in MLflow."""
        directory, study = RunDirectory(self._directory / run.name), self._study
        subject = f"{study.name}/{run.name}"
        uid = f"{subject}/{fingerprint(run)}"
        with self._locked(f"run-{run.name}"):
            metrics = stream_of(directory)
            streams = {ROWS_TAG: metrics}
            if table is not None:
                rows = [row for row in table if row["run"] == run.name]
                streams[TABLE_TAG] = table_stream(rows, metrics, run.total_steps)
            self.total += sum(len(points) for one in streams.values() for points in one.points)
            tags = described.run_tags(directory, run, self.parent)
            times = [int(row["time"] * 1000) for row in metrics.rows]
            started_at, ended_at = (times[0], times[-1]) if times else (None, None)
            mirrored = self._find_run(subject, uid, run.name, tags, started_at)
            if not all(_continues(mirrored, tag, stream) for tag, stream in streams.items()):
                self._client.delete_run(mirrored.info.run_id)
                mirrored = self._find_run(subject, uid, run.name, tags, started_at)
            self._describe(mirrored, described.run_params(run), tags)
            for tag, stream in streams.items():
                self._import_stream(mirrored, tag, stream)
            self._upload(mirrored, described.run_files(directory))
            status = described.status_of(directory, run)
            if status == "RUNNING" != mirrored.info.status:
                self._client.update_run(mirrored.info.run_id, status)
            elif status != mirrored.info.status:
                self._client.set_terminated(mirrored.info.run_id, status, ended_at)
        return str(mirrored.info.run_id)

    def _import_stream(self, run: "Run", tag: str, stream: Stream) -> None:
        """Send the rows that the run lacks, some rows to a request, with their tag."""
        done = _done(run, tag)
        prefix, batch = Prefix(stream.rows[:done]), list[Point]()
        for row, points in zip(stream.rows[done:], stream.points[done:], strict=True):
            if len(batch) + len(points) > METRICS_PER_BATCH:
                self._send(run, batch, {tag: str(prefix)})
                batch = []
            prefix.add(row)
            batch += points
        if batch:
            self._send(run, batch, {tag: str(prefix)})

    def _send(self, run: "Run", points: list[Point], tags: dict[str, str]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(point.name, point.value, point.milliseconds, point.at) for point in points
        ]
        with turn(self._store.uri):
            said = [RunTag(key, value) for key, value in tags.items()]
            self._client.log_batch(run.info.run_id, metrics, tags=said)
        self.added += len(metrics)

    def _upload(self, run: "Run", files: dict[str, Path]) -> None:
        for name, path in files.items():
            folder = str(PurePosixPath(name).parent).strip(".")
            self._client.log_artifact(run.info.run_id, str(path), folder)

    def finish_study(self) -> None:
        """Upload the files of the study, which is done if all of its runs are."""
        run = self._client.get_run(self.parent)
        self._upload(run, described.study_files(self._directory))
        done = all(
            described.is_final(RunDirectory(self._directory / one.name), one)
            for one in self._study.runs
        )
        if done and run.info.status != "FINISHED":
            self._client.set_terminated(self.parent)


def _done(run: "Run", tag: str) -> int:
    """The number of rows of the stream that the run has."""
    return int(run.data.tags.get(tag, "0").split()[0])


def _continues(run: "Run", tag: str, stream: Stream) -> bool:
    """True if the stream begins with the rows that the run has."""
    known = run.data.tags.get(tag)
    return known is None or known == str(Prefix(stream.rows[: _done(run, tag)]))


def mirror_run(directory: Path, study: Study, name: str, uri: str) -> int:
    """Bring one run's metrics up to its files; return how many were added."""
    runs = {run.name: run for run in study.runs}
    if name not in runs:
        raise UserError(f"{study.name} has no run {name}; give one of {', '.join(runs)}")
    with open_store(directory.parent, uri) as store:
        importer = Importer(store, directory, study)
        importer.import_run(runs[name], None)
    return importer.added


def mirror(directory: Path, study: Study, uri: str) -> dict[str, Any]:
    """Bring the store up to the study's files; return mlflow.json: run ids and metrics added."""
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
