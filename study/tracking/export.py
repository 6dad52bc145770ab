"""A study's table, from MLflow alone."""

from pathlib import Path
from typing import TYPE_CHECKING

from study.tracking.described import PARENT_TAG
from study.tracking.importer import SUBJECT_TAG, TABLE_TAG, search_runs
from study.tracking.points import Point, Row
from study.tracking.store import Store, masked, open_store
from study.tracking.table import ROW_METRIC, digest_of, rows_from, schema_from, write_exported
from train.command import UserError

if TYPE_CHECKING:
    from mlflow.entities import Run


def export_table(root: Path, uri: str, name: str, out: Path) -> int:
    """Writes the table of the study `name` as the store holds it; returns how many rows.

    Raises:
        UserError: if the store does not hold all of it: the rows of every run have to meet the hash that they had.
    """
    with open_store(root, uri) as store:
        experiment = store.client.get_experiment_by_name(name)
        parents = search_runs(store, experiment.experiment_id, f"tags.`{SUBJECT_TAG}` = '{name}'") if experiment else []
        parent = next(iter(parents), None)
        if experiment is None or parent is None:
            raise UserError(f"{masked(uri)} holds no study {name}; mirror it with 'python -m study mirror {name}'")
        tags = parent.data.tags
        schema = schema_from(tags)
        condition = f"tags.`{PARENT_TAG}` = '{parent.info.run_id}'"
        runs = sorted(
            search_runs(store, experiment.experiment_id, condition),
            key=lambda run: int(run.data.tags["quantdyn.position"]),
        )
        rows: list[Row] = []
        for run in runs:
            points = _points_of(store, run)
            of_run = rows_from(name, run.info.run_name, schema, points)
            if run.data.tags.get(TABLE_TAG) != digest_of(of_run):
                raise UserError(
                    f"{masked(uri)} does not hold all rows of {run.info.run_name}; mirror the study again with "
                    f"'python -m study mirror {name}'"
                )
            rows += of_run
    if len(runs) != int(tags["quantdyn.num_runs"]):
        raise UserError(
            f"{masked(uri)} holds {len(runs)} of {tags['quantdyn.num_runs']} runs of {name}; mirror it again"
        )
    write_exported(out, schema, rows)
    return len(rows)


def _points_of(store: Store, run: "Run") -> list[Point]:
    """The points that rows of the table are made of."""
    return [
        Point(key, metric.step, metric.value, metric.timestamp)
        for key in run.data.metrics
        if ROW_METRIC.fullmatch(key)
        for metric in store.client.get_metric_history(run.info.run_id, key)
    ]
