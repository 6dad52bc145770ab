"""The steps of a study: a graph of commands, each with what it reads and the files it leaves."""

import json
import math
from itertools import chain, pairwise, product

import pytest

from base.errors import UserError
from study.definition import KINDS, load_study
from study.measurements.tasks import TasksSettings
from study.paths import last_model
from study.recipes.resolve import resolve as resolve_recipe
from study.recipes.resolve import whole_recipes
from study.results.collect import collect_rows
from study.results.table import read_table, schema_of, write_table
from study.step import Machine, Step, batches, resolve, shared
from study.steps import steps_of
from tests.sealing import edited, reseal
from tests.study.synthetic import row_at


@pytest.fixture(scope="module")
def by_name(study):
    return {step.name: step for step in steps_of(study)}


PROFILES = [(name, profile) for name in whole_recipes() for profile in ("full", "smoke")]


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_the_steps_form_a_graph_over_distinct_outputs(recipe, profile):
    seen: set[str] = set()
    files: set[str] = set()
    outputs: list[str] = []
    for step in steps_of(resolve_recipe(recipe, profile)):
        assert seen.issuperset(step.after), step.name
        # what it reads is made by what it comes after, or has to be there before the study begins
        assert all(name in files or name.startswith("../texts/") for name in step.reads), step.name
        seen.add(step.name)
        files |= set(step.outputs)
        outputs += step.outputs
        # a study can be moved
        assert not any(argument.startswith("/") for argument in step.command)
    assert len(set(outputs)) == len(outputs)


def test_tiny_has_a_step_for_everything_that_is_measured():
    by_name = {step.name: step for step in steps_of(resolve_recipe("tiny", "full"))}
    kinds: dict[str, int] = {}
    for step in by_name.values():
        kinds[step.kind] = kinds.get(step.kind, 0) + 1
    # 2 peaks with 4 seeds: 3 checkpoints and an average, 1 spec of each; as many controls, 1 and 1;
    # the ends have 2 more; the first seed's have curvature, its annealed ones all along their steps;
    # one plane through the ends
    assert kinds == {
        "corpus": 1,
        "prepare": 3,
        "train": 8 + 8,
        # averages are of the first seed
        "export": 8 * 3 + 8 * 1 + 2 + 2,
        "quantize": 8 * 3 + 8 * 1 + 2 + 2,
        "methods": 8 * 2,
        "curvature": 2 * 3 + 2,
        "blocks": 2,
        "step": 2,
        "slice": 2,
        "plane": 1,
        "collect": 1,
        "report": 1,
        "mirror": 1,
    }
    train = by_name["train-lr6e-3-seed1"]
    assert len(train.outputs) == 3 + 1
    assert train.slots == 1
    assert train.outputs[-2:] == (
        "lr6e-3-seed1/checkpoints/step00000960/checkpoint.json",
        "lr6e-3-seed1/checkpoints/lawa5x16-step00000960/checkpoint.json",
    )


def test_an_export_waits_for_its_own_checkpoint_alone(by_name):
    export = by_name["export-lr3e-3-step00000192"]
    assert export.after == ("train-lr3e-3",)
    assert export.reads == ("lr3e-3/checkpoints/step00000192/checkpoint.json",)
    words = "export {study}/lr3e-3/checkpoints/step00000192 --into {study}/lr3e-3/hf"
    assert export.command[3:] == tuple(words.split())
    quantize = by_name["quantize-lr3e-3-step00000192-gptq-b3-g32"]
    texts = ("data/calibration.json", "data/held_out.json")
    assert quantize.reads == ("lr3e-3/hf/step00000192/lineage.json", *texts)
    assert quantize.outputs == ("lr3e-3/hf/step00000192/quant/gptq-b3-g32/result.json",)


def test_a_soup_is_made_of_exports_and_quantized_as_they_are(by_name):
    average = by_name["average-lr3e-3-soup-stable-step00000448"]
    names = ("soup-stable-step00000448", "step00000192", "step00000320", "step00000448")
    paths = (f"{{study}}/lr3e-3/hf/{name}" for name in names)
    assert average.command == ("{python}", "-m", "ckpt_tools", "average", *paths)
    assert average.outputs == ("lr3e-3/hf/soup-stable-step00000448/lineage.json",)
    assert average.after == tuple(f"export-lr3e-3-step00000{step}" for step in (192, 320, 448))
    readers = [
        step for step in by_name.values() if any("/soup-stable" in word for word in step.command)
    ]
    quantize = by_name["quantize-lr3e-3-soup-stable-step00000448-gptq-b4-g32"]
    assert average.name in quantize.after
    # curvature is not measured of averages
    assert {step.kind for step in readers} == {"average", "quantize"}


def test_methods_and_blocks_are_measured_of_the_last_checkpoint_as_every_other(by_name):
    """Settings of blocks: tests.study.test_command_lines."""
    last, quantize = "lr3e-3/hf/step00000640", by_name["quantize-lr3e-3-step00000640-gptq-b3-g32"]
    blocks, words = by_name["blocks-lr3e-3"], ("-m", "quant_eval", "run", f"{{study}}/{last}")
    for spec in ("rtn-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "int8-t6"):
        methods = by_name[f"methods-lr3e-3-{spec}"]
        # other projects' code runs in one process
        assert methods.command == ("{python}", *words, "--spec", spec, *quantize.tail)
        assert methods.outputs == (f"{last}/quant/{spec}/result.json",)
        assert methods.name in by_name["collect"].after
    specs = [f"gptq-b{bits}-g32" for bits in (3, 4, 8)]
    places = [f"{last}/blocks/{spec}" for spec in specs]
    asked = [word for spec in specs for word in ("--spec", spec)]
    outs = [word for directory in places for word in ("--out", f"{{study}}/{directory}")]
    assert blocks.command[: 5 + len(asked)] == ("{launch}", *words, *asked)
    assert blocks.command[-len(outs) :] == tuple(outs)
    assert blocks.outputs == tuple(f"{directory}/result.json" for directory in places)
    # the report compares document by document what the table only sums
    assert {quantize.name, blocks.name, "methods-lr3e-3-int8-t6"} <= set(by_name["report"].after)


def test_steps_and_slice_are_of_the_last_checkpoint_and_what_its_blocks_left(by_name):
    last, blocks = "lr1e-2/hf/step00000640", by_name["blocks-lr1e-2"]
    along, plane = by_name["step-lr1e-2"], by_name["slice-lr1e-2"]
    quantized = [output.removesuffix("/result.json") for output in blocks.outputs]
    named = [after for word, after in pairwise(along.command) if word == "--quantized"]
    assert named == [f"{{study}}/{directory}" for directory in quantized]
    before = "lr1e-2/hf/step00000576"
    points = [f"{{study}}/{path}" for path in (last, before, quantized[0])]
    assert list(plane.command[4:7]) == points
    names = [after for word, after in pairwise(plane.command) if word == "--name"]
    assert names == ["base", "previous", "quantized"]
    for step, command in ((along, "step"), (plane, "slice")):
        assert step.command[:5] == ("{launch}", "-m", "curvature", command, f"{{study}}/{last}")
        assert {"export-lr1e-2-step00000640", "prepare-held_out", blocks.name} <= set(step.after)
        assert set(blocks.outputs) <= set(step.reads)
        assert step.name in by_name["report"].after
    assert f"{before}/lineage.json" in plane.reads
    assert along.outputs == tuple(
        f"{last}/curvature/step-gptq-b{bits}-g32/result.json" for bits in (3, 4, 8)
    )
    assert plane.outputs == (f"{last}/curvature/slice-gptq-b3-g32/result.json",)


def test_a_branch_waits_for_the_checkpoint_that_it_starts_from():
    study = resolve_recipe("olmo2-7b-lr", "full")
    branch = next(run for run in study.trained if run.branch_from)
    assert branch.branch_from
    parent = branch.branch_from.run.removeprefix("../")
    train = next(step for step in steps_of(study) if step.name == f"train-{branch.name}")
    assert f"train-{parent}" in train.after
    assert f"{parent}/checkpoints/step00072000/checkpoint.json" in train.reads
    # not for the parent's end
    assert not any(f"{parent}/checkpoints/step000840" in name for name in train.reads)


def model_step(model: str, spec: str, kind: str = "quantize") -> Step:
    name, specs = f"{kind}-{model}-{spec}", ("--spec", spec)
    return Step(name, kind, ("q",), (), models=(model,), specs=specs, tail=("t",))


def test_steps_share_a_process_only_where_each_model_goes_with_each_spec():
    steps = [model_step(*pair) for pair in product("abc", "xyz") if pair != ("b", "y")]
    every = [*steps, model_step("a", "x", kind="curvature")]
    groups = batches(every, 2, 9)
    assert sorted(chain(*groups), key=every.index) == every
    for batch in groups:
        command = shared(batch)
        models = [word for word in command if word in "abc"]
        specs = [word for word in command if word in "xyz"]
        of_specs = (word for spec in specs for word in ("--spec", spec))
        assert command == ("q", *models, *of_specs, "t")
        # the command does what the steps say and nothing else
        assert len(batch) == len(models) * len(specs)
        assert len(models) <= 2
    assert [len(batch) for batch in batches(steps, 1, 1)] == [1] * len(steps)
    assert max(len(batch) for batch in batches(steps, 9, 2)) == 4


def test_placeholders_stand_for_places_and_for_the_machine(tmp_path):
    command = [
        "{launch}",
        "-m",
        "x",
        "{study}/run",
        "{root}/texts",
        "--device",
        "{device}",
        "{cores}",
        "a{study}",
    ]
    machine = Machine(("{python}", "-m", "torchrun"), "cuda", 2, "fsdp", 8, "/usr/bin/py")
    resolved = resolve(command, tmp_path / "s", machine)
    assert resolved[:5] == ["/usr/bin/py", "-m", "torchrun", "-m", "x"]
    places = [f"{tmp_path}/s/run", f"{tmp_path}/texts"]
    assert resolved[5:] == [*places, "--device", "cuda", "8", "a{study}"]


def test_the_largest_eigenvalue_is_asked_for_or_left_out():
    seven, one = (
        [step for step in steps_of(resolve_recipe(name, "full")) if step.kind == "curvature"]
        for name in ("olmo2-7b-lr", "olmo2-1b-lr")
    )
    assert len(seven) == 4 * 18 + 7 * 8 + 2 + 3 * 3
    assert all("--no-lambda-max" in step.command for step in seven)
    measurement = one[0]
    assert "--lambda-max" in measurement.command
    assert measurement.command[measurement.command.index("--max-iterations") + 1] == "16"


@pytest.mark.parametrize("recipe", ["tiny", "olmo2-7b-lr"])
def test_what_the_table_reads_is_what_a_step_leaves(recipe):
    study = resolve_recipe(recipe, "full")
    outputs = {output: step.kind for step in steps_of(study) for output in step.outputs}
    columns = set(schema_of(study).names)
    for kind, settings in study.measurements:
        assert columns.issuperset(kind.columns(settings))
        if kind.models == "several":
            assert not kind.columns(settings)
            continue
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
    tasks = TasksSettings(specs=("gptq-b3-g32",), tasks="piqa,sciq", shots=2, limit=9)
    changed = study.model_copy(update={"tasks": tasks})
    steps = [step for step in steps_of(changed) if step.kind == "tasks"]
    assert len(steps) == 4
    command = " ".join(steps[0].command)
    assert command.startswith(
        "{launch} -m quant_eval tasks {study}/lr1e-3/hf/step00000640 --spec gptq-b3-g32 --"
    )
    assert "--tasks piqa,sciq --shots 2 --limit 9 --device {device}" in command
    assert "--calibration {study}/data/calibration" in command
    path = study_dir / "lr1e-3/hf/step00000640/tasks/gptq-b3-g32/result.json"
    assert study_dir / steps[0].outputs[0] == path
    path.parent.mkdir(parents=True)
    figures = {"accuracy": 0.5, "accuracy_quantized": 0.4, "degradation": 0.2}
    intervals = {"degradation": [0.1, 0.3], "accuracy": None}
    measured = {"tasks": {"piqa": figures}, "mean": figures | {"intervals": intervals}}
    model, spec = {"path": str(path.parents[2])}, {"name": "gptq-b3-g32", "tasks": ["piqa"]}
    reseal(path, {"model": model, "spec": spec, "measured": measured})
    rows = collect_rows(study_dir, changed).rows
    row = row_at(rows, "lr1e-3", 640)
    column = "tasks/gptq-b3-g32"
    assert (row[f"{column}/degradation_low"], row[f"{column}/accuracy_low"]) == (0.1, None)
    assert (row[f"{column}/piqa/accuracy_quantized"], row[f"{column}/sciq/accuracy"]) == (0.4, None)


def test_tasks_along_training_are_of_every_checkpoint_and_of_controls_too():
    study = resolve_recipe("tiny", "smoke")
    tasks = TasksSettings(specs=("gptq-b3-g32", "rtn-b3-g32"), tasks="piqa", along=True)
    changed = study.model_copy(update={"tasks": tasks})
    steps = [step for step in steps_of(changed) if step.kind == "tasks"]
    planned = {
        f"tasks-{run.name}-step{step:08}-{spec}"
        for run in study.trained
        for step in run.save_steps
        for spec in tasks.specs
    }
    assert {step.name for step in steps} == planned
    assert len(steps) == len(planned) == 2 * 6
    # The averages and soups of the study are not asked.
    assert any(model.average for run in study.trained for model in study.models_of(run))
    # One process may ask several checkpoints: the command is the same but for model and spec.
    assert len({step.process for step in steps if step.run == "lr3e-3"}) == 1
    assert all("step00000048" not in step.name for step in steps if "control" in step.run)


def test_perplexity_is_the_exponential_of_the_mean_loss_with_the_ends_of_its_interval(
    study_dir, study
):
    """The mean is taken over the documents that the result file has."""
    path = study_dir / "lr1e-3/hf/step00000640/quant/gptq-b3-g32/result.json"
    measured = json.loads(path.read_text())["measured"]
    documents = measured["per_document"]
    row = row_at(collect_rows(study_dir, study).rows, "lr1e-3", 640)
    for name, sums, loss in (
        ("perplexity", "nll", "cross_entropy"),
        ("perplexity_quantized", "nll_quantized", "cross_entropy_quantized"),
    ):
        column = f"quant/gptq-b3-g32/{name}"
        mean = sum(documents[sums]) / sum(documents["tokens"])
        assert row[column] == pytest.approx(math.e**mean, rel=1e-9)
        ends = [math.e**end for end in measured["intervals"][loss]]
        assert [row[f"{column}_low"], row[f"{column}_high"]] == pytest.approx(ends, rel=1e-9)
        assert row[f"{column}_low"] < row[column] < row[f"{column}_high"]


def test_methods_without_calibration_wait_for_no_calibration_text():
    """They name it where they share a process with methods that read it."""
    for profile, named in (("full", True), ("smoke", False)):
        steps = [
            step for step in steps_of(resolve_recipe("tiny", profile)) if step.kind == "methods"
        ]
        assert len({step.process for step in steps if step.run == steps[0].run}) == 1
        for step in steps:
            assert ("--calibration" in step.command) is named
            needed = step.specs[1].startswith(("gptq", "awq", "nvfp4"))
            assert ("data/calibration.json" in step.reads) is needed


def test_a_table_of_an_older_version_has_its_new_columns_empty(study_dir, study, tmp_path):
    write_table(tmp_path, study, collect_rows(study_dir, study).rows)
    tasks = TasksSettings(specs=("gptq-b3-g32",), tasks="piqa")
    newer = study.model_copy(update={"tasks": tasks})
    for row in read_table(tmp_path, newer):
        assert row["tasks/gptq-b3-g32/piqa/accuracy"] is None
        assert row["weight_decay"] == row.weight_decay == 0.1
        assert (row.engine, row.seed, row.batch_size) == ("megatron", 6198, 16)


def test_a_result_of_an_older_version_has_its_new_columns_empty(study_dir, study):
    path = study_dir / "lr1e-3/hf/step00000064/quant/gptq-b3-g32/result.json"
    with edited(path) as content:
        del content["measured"]["top1_agreement"], content["measured"]["intervals"]["kl_divergence"]
    row = collect_rows(study_dir, study).rows[0]
    assert row["quant/gptq-b3-g32/top1_agreement"] is None
    assert row["quant/gptq-b3-g32/kl_divergence_low"] is None
    assert row["quant/gptq-b3-g32/kl_divergence"] == content["measured"]["kl_divergence"]


def test_a_study_that_is_of_another_version_or_no_text_is_refused_with_what_helps(study_dir):
    with edited(study_dir / "study.json") as content:
        content["heading"] = "peak"
    with pytest.raises(UserError, match="unknown key 'heading'; run the recipe again"):
        load_study(study_dir)
    (study_dir / "study.json").write_bytes(b'{"name": "\xff')
    with pytest.raises(UserError, match=r"study.json is not valid JSON .*; run the recipe again"):
        load_study(study_dir)
