"""Content of a store, by SQL: no code of MLflow's or ours is in between. And files of runs to be
imported.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy

from study.definition import Study, save_study
from study.machine.needs import write_run_configurations
from tests.sealing import json_lines
from tests.study.ablation import tiny
from train.run.config import with_settings
from train.run.directory import RunDirectory

TOKENS_PER_STEP = 2048
FIGURES = ("loss", "z_loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_bytes")
POINTS = """SELECT runs.name AS run, runs.run_uuid AS id, metrics.key AS name, metrics.step AS at,
metrics.value AS value
FROM metrics JOIN runs ON runs.run_uuid = metrics.run_uuid
JOIN experiments ON experiments.experiment_id = runs.experiment_id
WHERE runs.lifecycle_stage = 'active' AND experiments.name = :study"""
RUNS = """SELECT runs.name AS run, runs.run_uuid AS id, runs.status AS status FROM runs
JOIN experiments ON experiments.experiment_id = runs.experiment_id
WHERE runs.lifecycle_stage = 'active' AND experiments.name = :study"""
Held = dict[tuple[str, int], list[float]]  # (metric, tokens) -> every value that the store has


class Database(NamedTuple):
    """A store: how MLflow reaches it, and how SQL does."""

    uri: str
    sql: str

    def execute(self, statement: str, **values: Any) -> list[Any]:
        """Rows of one statement."""
        engine = sqlalchemy.create_engine(
            self.sql, isolation_level="AUTOCOMMIT", poolclass=sqlalchemy.NullPool
        )
        with engine.connect() as connection:
            result = connection.execute(sqlalchemy.text(statement), values)
            return list(result) if result.returns_rows else []

    def points(self, study: str) -> dict[str, Held]:
        """Points of all active runs of a study, by the run's name."""
        points: dict[str, Held] = defaultdict(lambda: defaultdict(list))
        for row in self.execute(POINTS, study=study):
            points[row.run][row.name, row.at].append(row.value)
        return points

    def runs(self, study: str) -> dict[str, list[str]]:
        """Ids of all active runs of a study, by name."""
        ids: dict[str, list[str]] = defaultdict(list)
        for row in self.execute(RUNS, study=study):
            ids[row.run].append(row.id)
        return ids


def write_small_study(root: Path, name: str, runs: int) -> tuple[Path, Study]:
    """A study of runs that have not begun, and that differ in their learning rates."""
    peaks = [0.001 * (1 + number) for number in range(runs)]
    changed = tuple(
        with_settings(tiny().trained[0], [f"optimizer.peak_lr={peak}"]).model_copy(
            update={"name": f"lr{peak:g}"}
        )
        for peak in peaks
    )
    study = tiny().model_copy(update={"name": name, "runs": changed})
    save_study(root / name, study)
    write_run_configurations(root / name, study)
    return root / name, study


def append_steps(directory: Path, steps: range, attempt: int) -> None:
    """Rows of metrics.jsonl as an attempt at training writes them; every value tells its step
    and attempt.
    """
    lines = []
    for step in steps:
        row: dict[str, float] = {"step": step, "tokens": step * TOKENS_PER_STEP, "attempt": attempt}
        row["time"] = 1.7e9 + attempt + step / 7
        lines.append(json_lines([row | {name: value_of(name, step, attempt) for name in FIGURES}]))
    with RunDirectory(directory).metrics.open("a") as file:
        file.writelines(lines)


def value_of(name: str, step: int, attempt: int) -> float:
    """A number with many digits, another for every figure, step and attempt."""
    return (1 + FIGURES.index(name)) / (3 + step) + attempt


def expected(steps: int, since: dict[int, int]) -> Held:
    """The right rows: of `steps` steps, those from since[attempt] on have that attempt's values."""
    rows: Held = {}
    for step in range(1, steps + 1):
        attempt = max(number for number, first in since.items() if step >= first)
        for name in FIGURES:
            key = name if name == "learning_rate" else f"train/{name}"
            rows[key, step * TOKENS_PER_STEP] = [value_of(name, step, attempt)]
    return rows
