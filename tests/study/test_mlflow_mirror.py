"""The MLflow mirror, read back through MLflow's own client."""

import json

import pytest

from study.collect import collect_rows, write_table
from study.mlflow_mirror import mirror, server_command, store_uri
from train.command import UserError

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


def test_mirrored_twice_it_holds_everything_once(collected_dir, study):
    root = collected_dir.parent
    first = mirror(collected_dir, study)
    store = read_store(root)
    assert store.keys() == {"tiny", "lr1e-3", "lr3e-3", "lr1e-2", "lr3e-2"}
    parent = store["tiny"]["id"]
    for name in ("lr1e-3", "lr3e-2"):
        run, history = store[name]["run"], store[name]["history"]
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.data.tags["mlflow.source.git.commit"].startswith("c0ffee")
        assert run.data.params["schedule.anneal.start_step"] == "448"
        assert run.info.status == "FINISHED"
        assert len(history["train/loss"]) == 640
        # error against tokens: a metric's step is the tokens of its checkpoint
        error = history["quant/gptq-b3-g32/relative_error"]
        assert [metric.step for metric in error] == [step * 2048 for step in study.runs[0].save_steps]
        path = collected_dir / name / "hf/step00000448/quant/gptq-b3-g32/result.json"
        assert error[3].value == json.loads(path.read_text())["measured"]["relative_error"]
        assert len(history["curvature/trace"]) == 7
        (predicted,) = history["curvature/step-gptq-b8-g32/predicted"]
        path = collected_dir / name / "hf/step00000640/curvature/step-gptq-b8-g32/result.json"
        whole = json.loads(path.read_text())["measured"]["whole"]
        assert (predicted.step, predicted.value) == (640 * 2048, whole["predicted"]["mean"])
        (method,) = history["quant/awq-b3-g32/kl_divergence"]  # of the last checkpoint alone
        path = collected_dir / name / "hf/step00000640/quant/awq-b3-g32/result.json"
        assert (method.step, method.value) == (640 * 2048, json.loads(path.read_text())["measured"]["kl_divergence"])
        losses = [{metric.step: metric.value for metric in history[key]} for key in (HELD_OUT, f"lawa5x16/{HELD_OUT}")]
        assert [losses[1][step] for step in losses[0]] == [pytest.approx(loss - 0.08) for loss in losses[0].values()]
        averaged = {metric.step: metric.value for metric in history["lawa5x16/quant/gptq-b3-g32/relative_error"]}
        path = collected_dir / name / "hf/lawa5x16-step00000448/quant/gptq-b3-g32/result.json"
        assert averaged.keys() == {step * 2048 for step in study.averaged_steps}
        assert [point.step for point in history["soup-anneal/quant/gptq-b3-g32/relative_error"]] == [640 * 2048]
        assert not any(key.startswith("soup-") and HELD_OUT in key for key in history), "it was not evaluated"
        assert averaged[448 * 2048] == json.loads(path.read_text())["measured"]["relative_error"] != error[3].value
        assert "run.json" in store[name]["artifacts"]
    assert {"table.parquet", "study.json"} <= store["tiny"]["artifacts"]
    again = mirror(collected_dir, study)
    assert again["metrics_added"] == 0
    assert first["metrics_added"] == first["metrics"] == again["metrics"]
    assert counts(read_store(root)) == counts(store)


def test_a_store_whose_creation_was_killed_is_made_anew(collected_dir, study):
    (collected_dir.parent / ".mlflow.db.partial").write_bytes(b"half a schema")
    (collected_dir.parent / ".mlflow.db.partial-journal").write_bytes(b"its journal")
    mirror(collected_dir, study.model_copy(update={"runs": study.runs[:1]}))
    assert read_store(collected_dir.parent).keys() == {"tiny", "lr1e-3"}
    assert not list(collected_dir.parent.glob(".mlflow.db.*"))


def test_what_comes_later_is_added_and_what_changed_is_made_anew(collected_dir, study):
    root, metrics = collected_dir.parent, collected_dir / "lr1e-3" / "metrics.jsonl"
    small = study.model_copy(update={"runs": study.runs[:1]})
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:200]) + lines[200][:20])  # a run that is being written to
    mirror(collected_dir, small)
    before = read_store(root)["lr1e-3"]
    metrics.write_text("".join(lines))
    mirror(collected_dir, small)
    after = read_store(root)["lr1e-3"]
    assert after["id"] == before["id"]
    assert len(after["history"]["train/loss"]) == 640
    result = collected_dir / "lr1e-3/hf/step00000448/quant/gptq-b3-g32/result.json"
    content = json.loads(result.read_text())
    content["measured"]["relative_error"] = 0.5
    result.write_text(json.dumps(content))
    write_table(collected_dir, small, collect_rows(collected_dir, small).rows)
    mirror(collected_dir, small)
    anew = read_store(root)["lr1e-3"]
    error = anew["history"]["quant/gptq-b3-g32/relative_error"]
    assert [metric.value for metric in error].count(0.5) == 1
    assert len(error) == 7


def test_a_store_made_elsewhere_is_refused_with_a_way_out(collected_dir, study, tmp_path):
    small = study.model_copy(update={"runs": study.runs[:1]})
    mirror(collected_dir, small)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("mlflow.db", "tiny"):
        (tmp_path / name).rename(moved / name)
    with pytest.raises(UserError, match="remove it"):
        mirror(moved / "tiny", small)


def test_the_server_listens_here_alone_and_says_nothing_elsewhere(tmp_path):
    command = server_command(tmp_path)
    assert f"sqlite:///{tmp_path}/mlflow.db" in command
    assert "--host 127.0.0.1" in command
    assert command.startswith("MLFLOW_DISABLE_TELEMETRY=true ")
