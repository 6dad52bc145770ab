"""The first view of a study in MLflow, against what MLflow's own client finds in the store."""

import json

import pytest

from study.recipes import RECIPES
from study.tracking.importer import mirror
from study.tracking.view import NAME, opening, view_of

# MLflow's, of a tag of an experiment
MOST_CHARACTERS = 5000


def test_its_columns_and_charts_are_of_what_the_runs_have(collected_dir, study, store):
    from mlflow import MlflowClient

    mirror(collected_dir, study, store)
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name(study.name)
    assert experiment is not None
    state = json.loads(experiment.tags[f"mlflow.sharedViewState.{NAME}"])
    order = [f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"]
    runs = client.search_runs([experiment.experiment_id], state["searchFilter"], order_by=order)
    errors = [run.data.metrics["final/gptq-b3-g32/kl_divergence"] for run in runs]
    assert len(runs) == len(study.runs)
    assert errors == sorted(errors)

    known = {f"params.`{name}`" for run in runs for name in run.data.params}
    known |= {f"metrics.`{name}`" for run in runs for name in run.data.metrics}
    assert {"params.`peak_lr`", state["orderByKey"]} <= set(state["selectedColumns"]) <= known
    parallel, *lines = state["compareRunCharts"]
    assert {f"params.`{name}`" for name in parallel["selectedParams"]} <= known
    shown = [*parallel["selectedMetrics"], *(chart["metricKey"] for chart in lines)]
    assert {f"metrics.`{name}`" for name in shown} <= known
    assert all(chart["scaleType"] == "log" for chart in lines)

    address = f"/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey={NAME}"
    assert address in opening(collected_dir, store)


@pytest.mark.parametrize("name", RECIPES)
def test_mlflow_takes_that_of_every_recipe(name):
    assert len(view_of(RECIPES[name](), "0" * 32)) <= MOST_CHARACTERS
