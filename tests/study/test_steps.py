"""The steps of a study: a graph of commands, each with the files it leaves."""

from itertools import pairwise

from study.recipes import tiny
from study.steps import steps_of


def test_the_steps_form_a_graph_over_distinct_outputs():
    study = tiny()
    steps = steps_of(study)
    seen: set[str] = set()
    for step in steps:
        assert seen.issuperset(step.after), step.name
        seen.add(step.name)
    # text; per run: training, export, two soups, a process for each of the two measurements along the run, and for the
    # methods, the blocks, the steps and the slice of its end; table, report, MLflow (averages are quantized by the
    # process that works on the checkpoints of their steps)
    assert len(seen) == len(steps) == 3 + 4 * (1 + 1 + 2 + 2 + 4) + 3
    outputs = [output for step in steps for output in step.outputs]
    assert len(set(outputs)) == len(outputs)
    # every input of a command lies below the study, so that the study can be moved
    for step in steps:
        assert not any(argument.startswith("/") for argument in step.command)
    train = next(step for step in steps if step.kind == "train")
    assert len(train.outputs) == 7 + 3
    assert train.slots == 2
    assert train.outputs[-2:] == (
        "lr1e-3/checkpoints/step00000640/checkpoint.json",
        "lr1e-3/checkpoints/lawa5x16-step00000640/checkpoint.json",
    )
    words = [word for step in steps for word in step.command if "/hf/lawa" in word]
    assert words == [
        f"{{study}}/{run.name}/hf/lawa5x16-step{step:08d}" for run in study.runs for step in study.averaged_steps
    ], "an average is quantized, once, and nothing else"


def test_a_soup_is_made_of_exports_and_quantized_as_they_are():
    steps = {step.name: step for step in steps_of(tiny())}
    average = steps["average-lr3e-3-soup-stable-step00000448"]
    hf = "{study}/lr3e-3/hf"
    made = (f"{hf}/soup-stable-step00000448", *(f"{hf}/step00000{step}" for step in (192, 320, 448)))
    assert average.command == ("{python}", "-m", "ckpt_tools", "average", *made)
    assert average.outputs == ("lr3e-3/hf/soup-stable-step00000448/lineage.json",)
    assert average.after == ("export-lr3e-3",)
    export = steps["export-lr3e-3"]
    assert not any("soup" in word for word in (*export.command, *export.outputs)), "no engine ever held it"
    readers = {name: step for name, step in steps.items() if any("/soup-stable" in word for word in step.command)}
    quantize = readers["quantize-lr3e-3-step00000064"]
    assert average.name in quantize.after
    specs = tiny().quantization.specs
    results = {f"lr3e-3/hf/soup-stable-step00000448/quant/{spec}/result.json" for spec in specs}
    assert results <= set(quantize.outputs)
    assert {step.kind for step in readers.values()} == {"average", "quantize"}, "curvature is not measured of averages"


def test_methods_and_blocks_are_measured_of_the_last_checkpoint_as_every_other():
    steps = {step.name: step for step in steps_of(tiny())}
    last, quantize = "lr3e-3/hf/step00000640", steps["quantize-lr3e-3-step00000064"]
    settings = quantize.command[quantize.command.index("--calibration") :]
    methods, blocks = steps["methods-lr3e-3"], steps["blocks-lr3e-3"]
    run = ("{python}", "-m", "quant_eval", "run", f"{{study}}/{last}")
    specs = ("rtn-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "int8-t6")
    assert methods.command == (*run, *(word for spec in specs for word in ("--spec", spec)), *settings)
    assert methods.outputs == tuple(f"{last}/quant/{spec}/result.json" for spec in specs)
    by_block = tuple(f"gptq-b{bits}-g32" for bits in (3, 4, 8))
    places = [f"{last}/blocks/{spec}" for spec in by_block]
    asked = [word for spec in by_block for word in ("--spec", spec)]
    outs = [word for place in places for word in ("--out", f"{{study}}/{place}")]
    fewer = ["16384" if word == "32768" else word for word in settings]  # tokens
    assert list(blocks.command) == [*run, *asked, *fewer, "--per-block", "--dense", *outs]
    assert blocks.outputs == tuple(f"{place}/result.json" for place in places)
    assert {"export-lr3e-3", "prepare-train", "prepare-held_out"} == set(methods.after) == set(blocks.after)
    assert methods.name in steps["collect"].after
    # the report compares document by document what the table only sums
    assert {quantize.name, methods.name, blocks.name} <= set(steps["report"].after)


def test_steps_and_slice_are_of_the_last_checkpoint_and_what_its_blocks_left():
    steps = {step.name: step for step in steps_of(tiny())}
    last, blocks = "lr1e-2/hf/step00000640", steps["blocks-lr1e-2"]
    along, plane = steps["step-lr1e-2"], steps["slice-lr1e-2"]
    quantized = [output.removesuffix("/result.json") for output in blocks.outputs]
    for step, command, given in ((along, "step", quantized), (plane, "slice", quantized[:1])):
        assert step.command[:5] == ("{python}", "-m", "curvature", command, f"{{study}}/{last}")
        named = [after for word, after in pairwise(step.command) if word == "--quantized"]
        assert named == [f"{{study}}/{place}" for place in given]
        assert {"export-lr1e-2", "prepare-held_out", blocks.name} <= set(step.after)
        assert step.name in steps["report"].after
    assert plane.command[plane.command.index("--previous") + 1] == "{study}/lr1e-2/hf/step00000576"
    assert along.outputs == tuple(f"{last}/curvature/step-gptq-b{bits}-g32/result.json" for bits in (3, 4, 8))
    assert plane.outputs == (f"{last}/curvature/slice-gptq-b3-g32/result.json",)
    assert along.name in steps["collect"].after


def test_a_study_without_methods_and_blocks_has_neither_their_steps_nor_their_figures():
    settings = tiny().quantization.model_copy(update={"methods": (), "by_block": ()})
    plain, whole = (steps_of(study) for study in (tiny().model_copy(update={"quantization": settings}), tiny()))
    assert {step.kind for step in whole} - {step.kind for step in plain} == {"methods", "blocks", "step", "slice"}
    figures = {f"figures/{name}.png" for name in ("methods", "blocks", "prediction", "slices")}
    assert set(whole[-2].outputs) - set(plain[-2].outputs) == figures
