"""A whole study in MLflow, read back through MLflow's own client."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from base.errors import UserError
from study.tracking.importer import mirror
from study.tracking.note import MOST_CHARACTERS, main_metric, results_note
from study.tracking.store import store_uri
from tests.sealing import edited, measured_in
from tests.study.synthetic import table_of

HELD_OUT, ERROR = "held_out_loss", "relative error percent/gptq-b3-g32"
DIVERGENCE = "KL divergence 1e-3 nats per token"
pytestmark = pytest.mark.usefixtures("store")


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
            "history": {
                key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics
            },
            "artifacts": {file.path for file in client.list_artifacts(run.info.run_id)},
        }
        for run in runs
    }


def counts(store: dict[str, dict]) -> dict:
    return {
        name: (entry["id"], {key: len(history) for key, history in entry["history"].items()})
        for name, entry in store.items()
    }


def check_run(directory: Path, name: str, entry: dict, study) -> None:
    history = entry["history"]
    assert len(history["train/loss"]) == 640
    # error against tokens: a metric's step is the tokens of its checkpoint
    error = history[ERROR]
    assert [metric.step for metric in error] == [step * 2048 for step in study.runs[0].save_steps]
    hf = directory / name / "hf"
    quant = measured_in(hf / "step00000448/quant/gptq-b3-g32")
    assert error[3].value == 100 * quant["relative_error"]
    assert len(history["Hessian/trace"]) == 7
    (method,) = history[f"{DIVERGENCE}/awq-b3-g32"]  # of the last checkpoint alone
    divergence = measured_in(hf / "step00000640/quant/awq-b3-g32")["kl_divergence"]
    assert (method.step, method.value) == (640 * 2048, 1000 * divergence)
    losses = [
        {metric.step: metric.value for metric in history[key]}
        for key in (HELD_OUT, f"lawa5x16/{HELD_OUT}")
    ]
    assert [losses[1][step] for step in losses[0]] == [
        pytest.approx(loss - 0.08) for loss in losses[0].values()
    ]
    averaged = {metric.step: metric.value for metric in history[f"lawa5x16/{ERROR}"]}
    assert averaged.keys() == {step * 2048 for step in study.averaged_steps}
    assert [point.step for point in history[f"soup-anneal/{ERROR}"]] == [640 * 2048]
    assert not any(key.startswith("soup-") and HELD_OUT in key for key in history), (
        "it was not evaluated"
    )
    quant = measured_in(hf / "lawa5x16-step00000448/quant/gptq-b3-g32")
    assert averaged[448 * 2048] == 100 * quant["relative_error"] != error[3].value


def test_mirrored_twice_it_holds_everything_once(collected_dir, study):
    root = collected_dir.parent
    study = study.model_copy(update={"runs": (study.runs[0], study.runs[3])})
    with edited(collected_dir / "lr1e-3/environment.json") as content:
        content["attempts"][0] |= {"world_size": 4, "slurm_job": "71_2"}
    table_of(collected_dir, study)
    first = mirror(collected_dir, study, store_uri(root))
    store = read_store(root)
    assert store.keys() == {"tiny", "lr1e-3", "lr3e-2"}
    for name in ("lr1e-3", "lr3e-2"):
        check_run(collected_dir, name, store[name], study)
        run = store[name]["run"]
        assert run.data.tags["mlflow.parentRunId"] == store["tiny"]["id"]
        assert run.data.tags["mlflow.source.git.commit"].startswith("c0ffee")
        assert run.data.tags["quantdyn.version"] == "7.8.9"
        assert (
            run.data.tags["quantdyn.checkpoint"]
            == f"{name}/checkpoints/step00000640/checkpoint.json"
        )
        assert run.data.params["anneal_tokens"] == str((640 - 448) * 2048)
        assert len(run.data.params) <= 17, "what runs are compared by"
        assert float(run.data.params["peak_lr"]) == {"lr1e-3": 1e-3, "lr3e-2": 3e-2}[name]
        assert run.data.params["tokens"] == str(640 * 2048)
        assert run.info.status == "FINISHED"
        assert store[name]["artifacts"] == {"run.json", "environment.json"}
    assert store["lr1e-3"]["run"].data.tags["quantdyn.slurm_jobs"] == "71_2"
    assert {"table.parquet", "study.json"} <= store["tiny"]["artifacts"]
    again = mirror(collected_dir, study, store_uri(root))
    assert again["metrics_added"] == 0
    assert first["metrics_added"] == first["metrics"] == again["metrics"]
    assert counts(read_store(root)) == counts(store)


def test_the_description_of_a_study_is_a_table_of_its_ends(study):
    """The smallest error first, in the unit of the heading, names whole."""
    column, step = "quant/gptq-b3-g32/kl_divergence", study.runs[0].total_steps
    errors = {"lr3e-2": (0.0021, 0.0018, 0.0024), "lr1e-3": (0.000659, 0.000363, 0.000957)}
    rows: list[Any] = [
        {"run": name, "step": step, "average": None, HELD_OUT: 3.25, "tokens": step * 2048}
        | dict(zip((column, f"{column}_low", f"{column}_high"), errors[name], strict=True))
        for name in errors
    ]
    small = study.model_copy(
        update={"runs": tuple(run for run in study.runs if run.name in errors)}
    )
    assert results_note(small, rows).splitlines()[1:] == [
        "",
        "| run | KL divergence, gptq-b3-g32, 10⁻³ nats/token [95%] | held-out loss, nats per token |",
        "|:--|--:|--:|",
        "| lr1e-3 | 0.66 [0.36, 0.96] | 3.2500 |",
        "| lr3e-2 | 2.10 [1.80, 2.40] | 3.2500 |",
    ]
    many = [rows[0] | {"run": "lr3e-2"}] * 3
    assert main_metric(small) == f"{DIVERGENCE}/gptq-b3-g32"
    assert results_note(small, []) == study.description
    assert len(results_note(small, many * 100)) < MOST_CHARACTERS


def test_what_changed_is_made_anew(collected_dir, study):
    root, name = collected_dir.parent, "lr1e-3"
    small, uri = study.model_copy(update={"runs": study.runs[:1]}), store_uri(root)
    mirror(collected_dir, small, uri)
    with edited(collected_dir / name / "hf/step00000448/quant/gptq-b3-g32/result.json") as content:
        content["measured"]["relative_error"] = 0.5
    table_of(collected_dir, small)
    mirror(collected_dir, small, uri)
    error = read_store(root)[name]["history"][ERROR]
    assert [metric.value for metric in error].count(50.0) == 1
    assert len(error) == 7


def test_an_experiment_of_another_root_is_refused_with_a_way_out(collected_dir, study, tmp_path):
    small = study.model_copy(update={"runs": study.runs[:1]})
    mirror(collected_dir, small, store_uri(tmp_path))
    other = tmp_path / "other"
    shutil.copytree(collected_dir, other / "tiny")
    with pytest.raises(UserError, match="set another MLFLOW_TRACKING_URI"):
        mirror(other / "tiny", small, store_uri(tmp_path))
