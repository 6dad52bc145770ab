"""A whole study in MLflow, read back through MLflow's own client."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from study.collect import TABLE, collect_rows, write_table
from study.tracking.export import export_table
from study.tracking.importer import mirror, mirror_run
from study.tracking.store import create_store, open_store, store_uri
from train.command import UserError
from train.run_directory import RunDirectory

HELD_OUT = "held_out_loss"


def read_store(root) -> dict[str, dict]:
    """run name -> its active run, parents and children alike."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store_uri(root))
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    return {
        run.info.run_name: {
            "id": run.info.run_id,
            "run": run,
            "history": {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics},
            "artifacts": {file.path for file in client.list_artifacts(run.info.run_id)},
        }
        for run in runs
    }


def counts(store: dict[str, dict]) -> dict:
    return {
        name: (entry["id"], {key: len(history) for key, history in entry["history"].items()})
        for name, entry in store.items()
    }


def change_result(directory: Path, study, run: str, **figures: float) -> None:
    """Another result of a measurement, and the table that follows."""
    result = directory / run / "hf/step00000448/quant/gptq-b3-g32/result.json"
    content = json.loads(result.read_text())
    content["measured"] |= figures
    result.write_text(json.dumps(content))
    write_table(directory, study, collect_rows(directory, study).rows)


def leave_evaluations(metrics: Path) -> None:
    """Takes most rows out of metrics.jsonl: the table's times are those of the evaluations."""
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if HELD_OUT in line))


def check_run(directory: Path, name: str, entry: dict, study) -> None:
    history = entry["history"]
    assert len(history["train/loss"]) == 640
    # error against tokens: a metric's step is the tokens of its checkpoint
    error = history["quant/gptq-b3-g32/relative_error"]
    assert [metric.step for metric in error] == [step * 2048 for step in study.runs[0].save_steps]
    path = directory / name / "hf/step00000448/quant/gptq-b3-g32/result.json"
    assert error[3].value == json.loads(path.read_text())["measured"]["relative_error"]
    assert len(history["curvature/trace"]) == 7
    (predicted,) = history["curvature/step-gptq-b8-g32/predicted"]
    path = directory / name / "hf/step00000640/curvature/step-gptq-b8-g32/result.json"
    whole = json.loads(path.read_text())["measured"]["whole"]
    assert (predicted.step, predicted.value) == (640 * 2048, whole["predicted"]["mean"])
    (method,) = history["quant/awq-b3-g32/kl_divergence"]  # of the last checkpoint alone
    path = directory / name / "hf/step00000640/quant/awq-b3-g32/result.json"
    divergence = json.loads(path.read_text())["measured"]["kl_divergence"]
    assert (method.step, method.value) == (640 * 2048, divergence)
    assert entry["run"].data.metrics["final/awq-b3-g32/kl_divergence"] == divergence
    assert entry["run"].data.metrics["final/trace"] == history["curvature/trace"][-1].value
    losses = [{metric.step: metric.value for metric in history[key]} for key in (HELD_OUT, f"lawa5x16/{HELD_OUT}")]
    assert [losses[1][step] for step in losses[0]] == [pytest.approx(loss - 0.08) for loss in losses[0].values()]
    averaged = {metric.step: metric.value for metric in history["lawa5x16/quant/gptq-b3-g32/relative_error"]}
    path = directory / name / "hf/lawa5x16-step00000448/quant/gptq-b3-g32/result.json"
    assert averaged.keys() == {step * 2048 for step in study.averaged_steps}
    assert [point.step for point in history["soup-anneal/quant/gptq-b3-g32/relative_error"]] == [640 * 2048]
    assert not any(key.startswith("soup-") and HELD_OUT in key for key in history), "it was not evaluated"
    assert averaged[448 * 2048] == json.loads(path.read_text())["measured"]["relative_error"] != error[3].value


def test_mirrored_twice_it_holds_everything_once(collected_dir, study):
    root, study = collected_dir.parent, study.model_copy(update={"runs": (study.runs[0], study.runs[3])})
    write_table(collected_dir, study, collect_rows(collected_dir, study).rows)
    first = mirror(collected_dir, study, store_uri(root))
    store = read_store(root)
    assert store.keys() == {"tiny", "lr1e-3", "lr3e-2"}
    for name in ("lr1e-3", "lr3e-2"):
        check_run(collected_dir, name, store[name], study)
        run = store[name]["run"]
        assert run.data.tags["mlflow.parentRunId"] == store["tiny"]["id"]
        assert run.data.tags["mlflow.source.git.commit"].startswith("c0ffee")
        assert run.data.tags["quantdyn.checkpoint"] == f"{name}/checkpoints/step00000640/checkpoint.json"
        assert run.data.params["run.json/schedule.anneal.start_step"] == "448"
        assert float(run.data.params["peak_lr"]) == {"lr1e-3": 1e-3, "lr3e-2": 3e-2}[name]
        assert run.data.params["total_tokens"] == str(640 * 2048)
        assert run.info.status == "FINISHED"
        assert store[name]["artifacts"] == {"run.json", "environment.json"}
    assert {"table.parquet", "study.json"} <= store["tiny"]["artifacts"]
    again = mirror(collected_dir, study, store_uri(root))
    assert again["metrics_added"] == 0
    assert first["metrics_added"] == first["metrics"] == again["metrics"]
    assert counts(read_store(root)) == counts(store)


def test_the_table_comes_back_from_each_store(database, collected_dir, study, tmp_path):
    """From the files to a store, to a table; and the same from another store, into which the files go anew."""
    small = study.model_copy(update={"runs": study.runs[:2]})
    rows = collect_rows(collected_dir, small).rows
    rows[1] |= {"curvature/trace": None, "learning_rate": 0.1 + 0.2, "quant/gptq-b3-g32/relative_error": -5e-324}
    truth = pq.read_table(write_table(collected_dir, small, rows))
    for run in small.runs:
        leave_evaluations(RunDirectory(collected_dir / run.name).metrics)
    for kind in ("postgres", "server"):
        there = database(kind)
        create_store(there.uri)
        mirror(collected_dir, small, there.uri)
        out = tmp_path / f"{kind}.parquet"
        assert export_table(tmp_path, there.uri, "tiny", out) == len(rows)
        exported = pq.read_table(out)
        assert exported.schema == truth.schema
        assert exported.to_pylist() == truth.to_pylist()


def test_a_table_that_is_not_all_there_is_not_exported(collected_dir, study, tmp_path):
    root, small, out = collected_dir.parent, study.model_copy(update={"runs": study.runs[:2]}), tmp_path / "out.parquet"
    uri, name = store_uri(root), small.runs[0].name
    write_table(collected_dir, small, collect_rows(collected_dir, small).rows)
    create_store(uri)
    with pytest.raises(UserError, match="holds no study tiny"):
        export_table(root, uri, "tiny", out)
    mirror_run(collected_dir, small, name, uri)
    with pytest.raises(UserError, match=f"not hold all rows of {name}"):
        export_table(root, uri, "tiny", out)
    mirror(collected_dir, small, uri)
    with open_store(root, uri) as store:
        experiment = store.client.get_experiment_by_name("tiny")
        assert experiment is not None
        (run,) = store.client.search_runs([experiment.experiment_id], f"tags.`quantdyn.subject` = 'tiny/{name}'")
        store.client.log_metric(run.info.run_id, "quant/gptq-b3-g32/relative_error", 0.5, step=1)
        with pytest.raises(UserError, match=f"not hold all rows of {name}"):
            export_table(root, uri, "tiny", out)
        store.client.delete_run(run.info.run_id)
        with pytest.raises(UserError, match="holds 1 of 2 runs"):
            export_table(root, uri, "tiny", out)
    assert not out.exists()
    mirror(collected_dir, small, uri)
    export_table(root, uri, "tiny", out)
    assert pq.read_table(out).equals(pq.read_table(collected_dir / TABLE))


def test_what_comes_later_is_added_and_what_changed_is_made_anew(collected_dir, study):
    root, name = collected_dir.parent, "lr1e-3"
    small, uri = study.model_copy(update={"runs": study.runs[:1]}), store_uri(root)
    metrics = RunDirectory(collected_dir / name).metrics
    rows = collect_rows(collected_dir, small).rows
    write_table(collected_dir, small, rows[:3])
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:200]) + lines[200][:20])  # a run that is being written to
    mirror(collected_dir, small, uri)
    before = read_store(root)[name]
    metrics.write_text("".join(lines))
    write_table(collected_dir, small, rows)
    mirror(collected_dir, small, uri)
    after = read_store(root)[name]
    assert after["id"] == before["id"]
    assert len(after["history"]["train/loss"]) == 640
    change_result(collected_dir, small, name, relative_error=0.5)
    mirror(collected_dir, small, uri)
    anew = read_store(root)[name]
    error = anew["history"]["quant/gptq-b3-g32/relative_error"]
    assert [metric.value for metric in error].count(0.5) == 1
    assert len(error) == 7


def test_data_sets_and_nodes_are_told(collected_dir, study, train_prefix):
    """Data sets by the hash of their tokens; of a report on ranks, what the slowest of each node took."""
    root, run = collected_dir.parent, study.runs[0]
    directory = RunDirectory(collected_dir / run.name)
    for suffix in (".json", ".bin", ".idx"):
        place = directory.resolve(run.data.train)
        place.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{place}{suffix}").write_bytes(Path(f"{train_prefix}{suffix}").read_bytes())
    environment = json.loads(directory.environment_json.read_text())
    environment["attempts"][0] |= {"world_size": 4, "slurm_job": "71_2"}
    directory.environment_json.write_text(json.dumps(environment))
    lines = []
    for step, ranks in ((50, 4), (100, 4), (150, 3)):  # the last report is being written
        for rank in range(ranks):
            row = {"step": step, "attempt": 1, "rank": rank, "host": f"node{rank // 2}", "steps": 50}
            row |= {"step_seconds_p50": 1.0, "step_seconds_p95": 2.0, "step_seconds_max": 3.0}
            lines.append(json.dumps(row | {"busy_seconds_p50": 0.1 * rank}) + "\n")
    directory.ranks.write_text("".join(lines))
    small = study.model_copy(update={"runs": study.runs[:1]})
    for _ in range(2):
        mirror(collected_dir, small, store_uri(root))
    entry = read_store(root)[run.name]
    assert entry["run"].data.tags["quantdyn.slurm_jobs"] == "71_2"
    (dataset,) = entry["run"].inputs.dataset_inputs
    assert dataset.dataset.name == "train"
    sha256 = json.loads(Path(f"{train_prefix}.json").read_text())["bin"]["sha256"]
    assert dataset.dataset.digest == sha256[:36]
    assert {tag.key: tag.value for tag in dataset.tags} == {"mlflow.data.context": "train", "sha256": sha256}
    busy = {host: entry["history"][f"system/{host}/busy_seconds_p50"] for host in ("node0", "node1")}
    assert [(point.step, point.value) for point in busy["node1"]] == [(step * 2048, 0.1 * 3) for step in (50, 100)]
    assert [point.value for point in busy["node0"]] == [0.1, 0.1]


def test_a_store_made_elsewhere_is_refused_with_a_way_out(collected_dir, study, tmp_path):
    small = study.model_copy(update={"runs": study.runs[:1]})
    mirror(collected_dir, small, store_uri(tmp_path))
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("mlflow.db", "tiny"):
        (tmp_path / name).rename(moved / name)
    with pytest.raises(UserError, match="remove it"):
        mirror(moved / "tiny", small, store_uri(moved))
