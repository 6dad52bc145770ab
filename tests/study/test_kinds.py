"""Kinds of measurement: every one has steps, a table and results that belong together."""

import json

import pytest

from base.errors import UserError
from dynamics.recipes import resolve
from study.definition import KINDS, load_study
from study.measurements.tasks import TasksSettings
from study.paths import last_model
from study.pipeline.steps import steps_of
from study.results.collect import collect_rows
from study.results.table import read_table, schema_of, write_table
from tests.sealing import reseal


@pytest.mark.parametrize("recipe", ["tiny", "olmo2-7b-lr"])
def test_what_the_table_reads_is_what_a_step_leaves(recipe):
    study = resolve(recipe, "full")
    outputs = {output: step.kind for step in steps_of(study) for output in step.outputs}
    columns = set(schema_of(study).names)
    for kind, settings in study.measurements:
        assert columns.issuperset(kind.columns(settings))
        for run in study.runs:
            if (kind, settings) not in study.measured(run)[last_model(run)]:
                others = study.detailed == "first seed" and run != study.group_of(run).runs[0]
                assert run.name in study.controls or others
                continue
            results = kind.results(settings, run.name, last_model(run))
            assert {outputs[path] for path in results} <= {kind.name}
    assert {step.kind for step in steps_of(study)} >= {kind.name for kind, _ in study.measurements}
    assert len({kind.name for kind, _ in KINDS}) == len(KINDS)


def test_tasks_are_measured_at_the_end_and_read_into_the_table(study_dir, study):
    tasks = TasksSettings(specs=("gptq-b3-g32",), tasks=("piqa", "sciq"), shots=2, documents=9)
    changed = study.model_copy(update={"tasks": tasks})
    steps = [step for step in steps_of(changed) if step.kind == "tasks"]
    assert len(steps) == 4
    assert " ".join(steps[0].command) == (
        "{launch} -m quant_eval tasks {study}/lr1e-3/hf/step00000640 --spec gptq-b3-g32"
        " --calibration {study}/data/calibration --calibration-sequences 64 --tasks piqa,sciq"
        " --shots 2 --limit 9 --dtype fp32 --device {device}"
    )
    path = study_dir / "lr1e-3/hf/step00000640/tasks/gptq-b3-g32/result.json"
    assert study_dir / steps[0].outputs[0] == path
    path.parent.mkdir(parents=True)
    figures = {"accuracy": 0.5, "accuracy_quantized": 0.4, "degradation": 0.2}
    intervals = {"degradation": [0.1, 0.3], "accuracy": None}
    measured = {"tasks": {"piqa": figures}, "mean": figures | {"intervals": intervals}}
    model, spec = {"path": str(path.parents[2])}, {"name": "gptq-b3-g32", "tasks": ["piqa"]}
    reseal(path, {"model": model, "spec": spec, "measured": measured})
    rows = collect_rows(study_dir, changed).rows
    row = next(row for row in rows if (row.run, row.step, row.average) == ("lr1e-3", 640, None))
    column = "tasks/gptq-b3-g32"
    assert (row[f"{column}/degradation_low"], row[f"{column}/accuracy_low"]) == (0.1, None)
    assert (row[f"{column}/piqa/accuracy_quantized"], row[f"{column}/sciq/accuracy"]) == (0.4, None)


def test_methods_without_calibration_wait_for_no_calibration_text():
    """They name it where they share a process with methods that read it."""
    for profile, named in (("full", True), ("smoke", False)):
        steps = [step for step in steps_of(resolve("tiny", profile)) if step.kind == "methods"]
        assert len({step.process for step in steps if step.run == steps[0].run}) == 1
        for step in steps:
            assert ("--calibration" in step.command) is named
            needed = step.specs[1].startswith(("gptq", "awq", "nvfp4"))
            assert ("data/calibration.json" in step.reads) is needed


def test_a_table_of_an_older_version_has_its_new_columns_empty(study_dir, study, tmp_path):
    write_table(tmp_path, study, collect_rows(study_dir, study).rows)
    tasks = TasksSettings(specs=("gptq-b3-g32",), tasks=("piqa",))
    newer = study.model_copy(update={"tasks": tasks})
    for row in read_table(tmp_path, newer):
        assert row["tasks/gptq-b3-g32/piqa/accuracy"] is None
        assert row["weight_decay"] == row.weight_decay == 0.1
        assert (row.engine, row.seed, row.batch_size) == ("megatron", 6198, 16)


def test_a_result_of_an_older_version_has_its_new_columns_empty(study_dir, study):
    path = study_dir / "lr1e-3/hf/step00000064/quant/gptq-b3-g32/result.json"
    content = json.loads(path.read_text())
    del content["measured"]["top1_agreement"], content["measured"]["intervals"]["kl_divergence"]
    reseal(path, content)
    row = collect_rows(study_dir, study).rows[0]
    assert row["quant/gptq-b3-g32/top1_agreement"] is None
    assert row["quant/gptq-b3-g32/kl_divergence_low"] is None
    assert row["quant/gptq-b3-g32/kl_divergence"] == content["measured"]["kl_divergence"]


def test_a_study_of_another_version_is_refused_with_what_writes_it_anew(study_dir):
    path = study_dir / "study.json"
    reseal(path, json.loads(path.read_text()) | {"heading": "peak"})
    with pytest.raises(UserError, match="unknown key 'heading'; run the recipe again"):
        load_study(study_dir)


def test_a_study_that_is_not_text_is_refused_the_same_way(study_dir):
    (study_dir / "study.json").write_bytes(b'{"name": "\xff')
    with pytest.raises(UserError, match=r"study.json is not valid JSON .*; run the recipe again"):
        load_study(study_dir)
