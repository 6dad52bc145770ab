"""The steps of a study: a graph of commands, each with what it reads and the files it leaves."""

from itertools import pairwise

import pytest

from dynamics.recipes import RECIPES
from dynamics.recipes import resolve as resolve_recipe
from study.pipeline.step import Machine, Step, batches, resolve, shared
from study.pipeline.steps import steps_of
from tests.study.ablation import tiny as four_peaks


@pytest.fixture(scope="module")
def tiny():
    return four_peaks()


@pytest.fixture(scope="module")
def by_name(tiny):
    return {step.name: step for step in steps_of(tiny)}


PROFILES = [
    (name, profile) for name in RECIPES for profile in ("full", "smoke") if name != "trajectory"
]


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
        assert not any(argument.startswith("/") for argument in step.command), (
            "a study can be moved"
        )
    assert len(set(outputs)) == len(outputs)


def test_tiny_has_a_step_for_everything_that_is_measured():
    by_name = {step.name: step for step in steps_of(resolve_recipe("tiny", "full"))}
    kinds: dict[str, int] = {}
    for step in by_name.values():
        kinds[step.kind] = kinds.get(step.kind, 0) + 1
    # 2 peaks with 4 seeds: 3 checkpoints and an average, 2 specs of each; as many controls, 1 and 1;
    # the first seed's have curvature, and its annealed ones 5 methods and all along their steps
    assert kinds == {
        "corpus": 1,
        "prepare": 3,
        "train": 8 + 8,
        "export": 8 * (3 + 1) + 8 * (1 + 1),
        "quantize": 8 * (3 + 1) * 2 + 8 * (1 + 1) * 2,
        "methods": 2 * 5,
        "curvature": 2 * 3 + 2,
        "blocks": 2,
        "step": 2,
        "slice": 2,
        "collect": 1,
        "report": 1,
        "mirror": 1,
    }
    train = by_name["train-lr1.2e-2-seed1"]
    assert len(train.outputs) == 3 + 1
    assert train.slots == 1
    assert train.outputs[-2:] == (
        "lr1.2e-2-seed1/checkpoints/step00001024/checkpoint.json",
        "lr1.2e-2-seed1/checkpoints/lawa5x16-step00001024/checkpoint.json",
    )


def test_an_export_waits_for_its_own_checkpoint_alone(by_name):
    export = by_name["export-lr3e-3-step00000192"]
    assert export.after == ("train-lr3e-3",)
    assert export.reads == ("lr3e-3/checkpoints/step00000192/checkpoint.json",)
    assert export.command[3:] == (
        "export",
        "{study}/lr3e-3/checkpoints/step00000192",
        "--into",
        "{study}/lr3e-3/hf",
    )
    quantize = by_name["quantize-lr3e-3-step00000192-gptq-b3-g32"]
    assert quantize.reads == (
        "lr3e-3/hf/step00000192/lineage.json",
        "data/calibration.json",
        "data/held_out.json",
    )
    assert quantize.outputs == ("lr3e-3/hf/step00000192/quant/gptq-b3-g32/result.json",)


def test_a_soup_is_made_of_exports_and_quantized_as_they_are(by_name):
    average = by_name["average-lr3e-3-soup-stable-step00000448"]
    hf = "{study}/lr3e-3/hf"
    paths = (
        f"{hf}/soup-stable-step00000448",
        *(f"{hf}/step00000{step}" for step in (192, 320, 448)),
    )
    assert average.command == ("{python}", "-m", "ckpt_tools", "average", *paths)
    assert average.outputs == ("lr3e-3/hf/soup-stable-step00000448/lineage.json",)
    assert average.after == tuple(f"export-lr3e-3-step00000{step}" for step in (192, 320, 448))
    readers = {
        name: step
        for name, step in by_name.items()
        if any("/soup-stable" in word for word in step.command)
    }
    quantize = by_name["quantize-lr3e-3-soup-stable-step00000448-gptq-b4-g32"]
    assert average.name in quantize.after
    assert {step.kind for step in readers.values()} == {
        "average",
        "quantize",
    }, "curvature is not measured of averages"


def test_methods_and_blocks_are_measured_of_the_last_checkpoint_as_every_other(by_name):
    last, quantize = "lr3e-3/hf/step00000640", by_name["quantize-lr3e-3-step00000640-gptq-b3-g32"]
    blocks = by_name["blocks-lr3e-3"]
    for spec in ("rtn-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "int8-t6"):
        methods = by_name[f"methods-lr3e-3-{spec}"]
        run = ("{python}", "-m", "quant_eval", "run", f"{{study}}/{last}", "--spec", spec)
        assert methods.command == (*run, *quantize.tail), "other projects' code runs in one process"
        assert methods.outputs == (f"{last}/quant/{spec}/result.json",)
        assert methods.name in by_name["collect"].after
    by_block = tuple(f"gptq-b{bits}-g32" for bits in (3, 4, 8))
    places = [f"{last}/blocks/{spec}" for spec in by_block]
    asked = [word for spec in by_block for word in ("--spec", spec)]
    outs = [word for place in places for word in ("--out", f"{{study}}/{place}")]
    fewer = ["16384" if word == "32768" else word for word in quantize.tail]  # tokens
    assert fewer[-2:] == ["--calibration-seeds", "3"]  # block by block there is one draw
    head = ("{launch}", "-m", "quant_eval", "run", f"{{study}}/{last}")
    assert list(blocks.command) == [*head, *asked, *fewer[:-2], "--per-block", "--dense", *outs]
    assert blocks.outputs == tuple(f"{place}/result.json" for place in places)
    # the report compares document by document what the table only sums
    assert {quantize.name, blocks.name, "methods-lr3e-3-int8-t6"} <= set(by_name["report"].after)


def test_steps_and_slice_are_of_the_last_checkpoint_and_what_its_blocks_left(by_name):
    last, blocks = "lr1e-2/hf/step00000640", by_name["blocks-lr1e-2"]
    along, plane = by_name["step-lr1e-2"], by_name["slice-lr1e-2"]
    quantized = [output.removesuffix("/result.json") for output in blocks.outputs]
    for step, command, given in ((along, "step", quantized), (plane, "slice", quantized[:1])):
        assert step.command[:5] == ("{launch}", "-m", "curvature", command, f"{{study}}/{last}")
        named = [after for word, after in pairwise(step.command) if word == "--quantized"]
        assert named == [f"{{study}}/{place}" for place in given]
        assert {"export-lr1e-2-step00000640", "prepare-held_out", blocks.name} <= set(step.after)
        assert set(blocks.outputs) <= set(step.reads)
        assert step.name in by_name["report"].after
    assert plane.command[plane.command.index("--previous") + 1] == "{study}/lr1e-2/hf/step00000576"
    assert "lr1e-2/hf/step00000576/lineage.json" in plane.reads
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
    assert not any(f"{parent}/checkpoints/step000840" in name for name in train.reads), (
        "not for the parent's end"
    )


def model_step(model: str, spec: str, kind: str = "quantize") -> Step:
    return Step(
        f"{kind}-{model}-{spec}",
        kind,
        ("q",),
        (),
        models=(model,),
        specs=("--spec", spec),
        tail=("t",),
    )


def test_steps_share_a_process_only_where_each_model_goes_with_each_spec():
    steps = [
        model_step(model, spec)
        for model in "abc"
        for spec in ("x", "y", "z")
        if (model, spec) != ("b", "y")
    ]
    other = model_step("a", "x", kind="curvature")
    groups = batches([*steps, other], 2, 9)
    assert sorted(step.name for batch in groups for step in batch) == sorted(
        step.name for step in [*steps, other]
    )
    for batch in groups:
        command = shared(batch)
        models = [word for word in command if word in "abc"]
        specs = [word for word in command if word in "xyz"]
        assert command == (
            "q",
            *models,
            *(word for spec in specs for word in ("--spec", spec)),
            "t",
        )
        assert len(batch) == len(models) * len(specs), (
            "the command does what the steps say and nothing else"
        )
        assert len(models) <= 2
    assert [len(batch) for batch in batches(steps, 1, 1)] == [1] * len(steps)
    assert max(len(batch) for batch in batches(steps, 9, 2)) == 4


def test_placeholders_stand_for_places_and_for_the_machine(tmp_path):
    command = (
        "{launch}",
        "-m",
        "x",
        "{study}/run",
        "{root}/texts",
        "--device",
        "{device}",
        "{cores}",
        "a{study}",
    )
    machine = Machine(("{python}", "-m", "torchrun"), "cuda", 2, "fsdp", 8, "/usr/bin/py")
    resolved = resolve(command, tmp_path / "s", machine)
    assert resolved[:5] == ["/usr/bin/py", "-m", "torchrun", "-m", "x"]
    assert resolved[5:] == [
        f"{tmp_path}/s/run",
        f"{tmp_path}/texts",
        "--device",
        "cuda",
        "8",
        "a{study}",
    ]


def test_the_largest_eigenvalue_is_asked_for_or_left_out():
    seven = [
        step for step in steps_of(resolve_recipe("olmo2-7b-lr", "full")) if step.kind == "curvature"
    ]
    assert len(seven) == 4 * 18 + 7 * 8 + 2 + 3 * 3
    for step in seven:
        assert "--no-lambda-max" in step.command
        assert not {"--tolerance", "--max-iterations", "--fixed-sequences"} & set(step.command)
    measurement = next(
        step for step in steps_of(resolve_recipe("olmo2-1b-lr", "full")) if step.kind == "curvature"
    )
    assert measurement.command[measurement.command.index("--max-iterations") + 1] == "16"
