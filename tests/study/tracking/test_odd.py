"""Stores, roots and rows that are odd: mirrored all the same, or refused with the way on."""

import json
import re
import shutil
from pathlib import Path

import pytest

from base.errors import UserError
from study.definition import Study, load_study
from study.results.collect import collect_rows
from study.results.table import Row
from study.tracking.importer import mirror
from study.tracking.store import opening, store_uri, tracking_uri
from tests.sealing import json_lines, reseal
from tests.study.synthetic import table_of
from tests.study.tracking.stores import FIGURES, Database, append_steps, write_small_study
from train.run.directory import RunDirectory

STEPS = 4


def tabled(root: Path, name: str = "s", runs: int = 1) -> tuple[Path, Study]:
    """A study whose runs have metrics and rows of the table, without measurements."""
    directory, study = write_small_study(root, name, runs)
    for run in study.runs:
        append_steps(directory / run.name, range(1, STEPS + 1), 1)
    table_of(directory, study)
    return directory, study


def counts(root: Path, study: Study) -> dict[str, int]:
    """Points of each run of a study, as SQL has them."""
    points = Database("", store_uri(root)).points(study.name)
    return {run: sum(map(len, logged.values())) for run, logged in points.items()}


@pytest.mark.parametrize("name", ["with space", "hash#1", "umlaut-ü", "a&b=c;d"])
def test_any_name_of_a_root(tmp_path, empty_store, name):
    root = tmp_path / name
    directory, study = tabled(root)
    shutil.copy(empty_store, root / "mlflow.db")
    mirror(directory, study, store_uri(root))
    assert counts(root, study) == {study.runs[0].name: STEPS * len(FIGURES)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    assert list((root / "mlartifacts").rglob("table.parquet"))


@pytest.mark.parametrize("name", ["50%20", "why?x=1"])
def test_a_root_that_no_uri_holds_takes_another_store(tmp_path, store, monkeypatch, name):
    root = tmp_path / name
    directory, study = tabled(root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=r"whose path has '[%?]'; .* set MLFLOW_TRACKING_URI"):
        tracking_uri(root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    mirror(directory, study, tracking_uri(root))
    points = Database("", store).points(study.name)
    assert len(points[study.runs[0].name]) == STEPS * len(FIGURES)
    assert list((root / "mlartifacts").rglob("table.parquet"))
    assert {path.name for path in tmp_path.iterdir()} <= {name, "mlflow.db", ".mlflow.lock"}


def test_no_value_grows_with_the_study(tmp_path, store):
    """60 specs and 30 jobs: MLflow's limits are 5,000 characters for a tag and 500, in old
    versions, for a parameter.
    """
    directory, study = write_small_study(tmp_path, "many", 1)
    specs = tuple(f"gptq-b{bits}-g{size}" for bits in range(2, 9) for size in range(8, 80, 8))[:60]
    quantization = study.quantization.model_copy(update={"specs": specs})
    study = study.model_copy(update={"quantization": quantization})
    append_steps(directory / study.runs[0].name, range(1, 3), 1)
    attempts = [{"slurm_job": f"{10**8 + job}_{job}"} for job in range(60)]
    environment = RunDirectory(directory / study.runs[0].name).environment_json
    reseal(environment, {"attempts": attempts})
    mirror(directory, study, store, rows=collect_rows(directory, study).rows)
    there = Database("", store)
    for table in ("tags", "experiment_tags", "params"):
        longest = there.execute(f"SELECT max(length(value)) AS size FROM {table}")[0].size
        assert longest <= 500, table


def test_figures_that_are_not_finite_are_left_out_and_said(tmp_path, store):
    directory, study = tabled(tmp_path, runs=2)
    first, second = (run.name for run in study.runs)
    metrics = RunDirectory(directory / first).metrics
    row = json.loads(metrics.read_text().splitlines()[-1])
    later = row | {"step": 5, "tokens": 5 * 2048, "loss": float("nan"), "z_loss": float("inf")}
    last = later | {"step": 6, "tokens": 6 * 2048, "loss": 1.5, "z_loss": -float("inf")}
    with metrics.open("a") as file:
        file.write(json_lines([later, last]))

    content = mirror(directory, study, store)
    words = "3 not finite, left out; the first: train/loss is nan in line 5 of metrics.jsonl"
    assert content["not_finite"] == {first: words}
    points = Database("", store).points(study.name)
    assert ("train/loss", 5 * 2048) not in points[first]
    assert points[first]["train/loss", 6 * 2048] == [1.5]
    assert len(points[first]) == (STEPS + 2) * len(FIGURES) - 3
    assert len(points[second]) == STEPS * len(FIGURES)
    tags = "SELECT value FROM tags WHERE key = 'quantdyn.not_finite'"
    assert [tag.value for tag in Database("", store).execute(tags)] == [words]
    assert mirror(directory, study, store)["metrics_added"] == 0


def test_a_measurement_that_is_not_finite_stops_no_other(collected_dir, study, store):
    small = study.model_copy(update={"runs": study.runs[:1]})
    first, *others = collect_rows(collected_dir, small).rows
    rows = [Row.of(dict(first) | {"curvature/trace": float("inf")}), *others]
    content = mirror(collected_dir, small, store, rows=rows)
    words = (
        "1 not finite, left out; the first: Hessian/trace is inf in the table's row of step"
        f" {first.step}"
    )
    assert content["not_finite"] == {small.runs[0].name: words}


def test_what_was_deleted_in_mlflow_comes_back(tmp_path, store):
    from mlflow import MlflowClient

    directory, study = tabled(tmp_path)
    mirror(directory, study, store)
    before = counts(tmp_path, study)
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name(study.name)
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    assert not Database("", store).runs(study.name)
    mirror(directory, study, store)
    assert counts(tmp_path, study) == before

    for run in client.search_runs([experiment.experiment_id]):
        client.delete_run(run.info.run_id)
    assert not Database("", store).runs(study.name)
    mirror(directory, study, store)
    assert counts(tmp_path, study) == before
    assert {len(ids) for ids in Database("", store).runs(study.name).values()} == {1}


def test_a_root_that_was_moved_is_refused_with_a_way_that_works(tmp_path, store):
    directory, study = tabled(tmp_path / "old")
    (tmp_path / "mlflow.db").rename(tmp_path / "old/mlflow.db")
    mirror(directory, study, store_uri(tmp_path / "old"))
    root = tmp_path / "new"
    (tmp_path / "old").rename(root)
    with pytest.raises(
        UserError, match=f"old/mlartifacts/s, .*; rename {root}/mlflow.db"
    ) as refused:
        mirror(root / "s", study, store_uri(root))
    assert "\n" not in str(refused.value)
    (root / "mlflow.db").rename(root / "mlflow-old.db")
    root = root.rename(
        tmp_path / "newest"
    )  # this process still has the file of the other name open
    mirror(root / "s", load_study(root / "s"), store_uri(root))
    assert counts(root, study) == {study.runs[0].name: STEPS * len(FIGURES)}


def test_a_root_by_a_symbolic_link_is_the_same_root(tmp_path, store):
    directory, study = tabled(tmp_path)
    mirror(directory, study, store)
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    assert mirror(link / "s", study, store_uri(link))["metrics_added"] == 0


def test_a_copied_study_says_that_its_store_is_not_there(tmp_path, store):
    directory, study = tabled(tmp_path)
    mirror(directory, study, store)
    assert f"--backend-store-uri {store}" in opening(directory, store)
    (*_, runs, charts, table) = opening(directory, store).splitlines()
    server = "http://127.0.0.1:5000/#/experiments/1/runs"
    assert re.fullmatch(f"errors with intervals, under Description: {server}/[0-9a-f]{{32}}", table)
    ordered = "?orderByKey=metrics.%60KL%20divergence%201e-3%20nats%20per%20token%2Fgptq-b3-g32%60"
    assert runs == f"runs, the smallest error first: {server}{ordered}&orderByAsc=true"
    assert charts == f"charts: {server}{ordered}&orderByAsc=true&compareRunsMode=CHART"
    copied = tmp_path / "elsewhere"
    shutil.copytree(directory, copied / "s")
    line = opening(copied / "s", store_uri(copied))
    assert line == f"not there yet; make it: python -m study mirror s --root {copied}"
    # a store that has other studies, and another experiment of that number
    shutil.copy(tmp_path / "mlflow.db", copied / "mlflow.db")
    assert "/#/experiments/" not in opening(copied / "s", store_uri(copied))
