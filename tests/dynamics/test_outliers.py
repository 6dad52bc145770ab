"""Outlier statistics in a study: steps, columns and the figure."""

import pytest

from dynamics.figures.outliers import outliers
from quant_eval.settings import OutlierSettings
from study.figures.canvas import Canvas
from study.measurements.outliers import INPUT, WEIGHT
from study.measurements.quantization import R_L
from study.steps import steps_of
from tests.dynamics.drawing import drawn
from tests.study.synthetic import row_at, table_of, write_study


@pytest.fixture(scope="module")
def measured(tmp_path_factory, study):
    changed = study.model_copy(update={"outliers": OutlierSettings(eval_tokens=9000)})
    directory = write_study(tmp_path_factory.mktemp("outliers") / changed.name, changed)
    return changed, table_of(directory, changed), directory


def test_every_checkpoint_and_average_is_measured_by_one_command(measured):
    study, *_ = measured
    steps = [step for step in steps_of(study) if step.kind == "outliers"]
    models = [(run, model) for run in study.trained for model in study.models_of(run)]
    assert len(steps) == len(models) > 0
    command = " ".join(steps[0].command)
    assert command.startswith(f"{{launch}} -m quant_eval outliers {steps[0].models[0]} --dtype ")
    assert "--eval-tokens 9000" in command
    assert command.endswith("--data {study}/data/held_out")
    assert steps[0].outputs[0].endswith("/outliers/linears/result.json")


def test_columns_hold_the_means_their_errors_and_the_largest(measured):
    _, table, _ = measured
    row = row_at(table, "lr1e-3", 640)
    kurtosis, weights = INPUT["kurtosis"].name, WEIGHT["kurtosis"].name
    assert kurtosis == "outliers/input_kurtosis"
    assert (row[kurtosis], row[f"{kurtosis}_max"]) == (6.4, 12.8)
    assert row[f"{kurtosis}_standard_error"] == pytest.approx(0.64)
    assert (row[f"{kurtosis}_low"], row[f"{kurtosis}_high"]) == pytest.approx((5.12, 7.68))
    # Weights are no sample: they have no error.
    assert row[weights] == 6.4
    assert f"{weights}_low" not in row
    spec = "gptq-b3-g32"
    divergence = row[f"quant/{spec}/kl_divergence"]
    assert row[R_L.of(spec)] == pytest.approx(3 * divergence)
    assert row[f"{R_L.of(spec)}_low"] < row[R_L.of(spec)] < row[f"{R_L.of(spec)}_high"]


def test_the_figure_has_a_panel_for_each_statistic_and_one_for_r_l(measured):
    study, table, directory = measured
    drawing = drawn(outliers, Canvas(study, table, directory))
    titles = {row["panel"] for row in drawing.rows} - {""}  # the learning rates have none
    assert len(titles) == 2 * 4 + 1
    assert "kurtosis, inputs" in titles
    assert any(title.startswith("R_L, ") for title in titles)


def test_a_study_without_them_has_no_columns(study, study_dir):
    assert not [name for name in table_of(study_dir, study)[0] if name.startswith("outliers/")]
    assert not [step for step in steps_of(study) if step.kind == "outliers"]
