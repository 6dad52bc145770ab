"""`--set settings=paper`: the values of the paper and of its code, for every study.

The constants are read from arXiv 2510.06213v2 (sections 3.1 and 3.2, appendices A and D) and from
aldakata/TrainingDynamicsQuantizationRobustness at b2f3b49 (gptqmodel_quantize.py, hf_tasks.py), not
from the preset.
"""

from pathlib import Path
from typing import Any

import pytest

from base.errors import UserError
from quant_eval.specs import parse_spec
from study.definition import Study
from study.machine.measurable import check_measurable
from study.recipes.resolve import resolve, whole_recipes
from study.steps import steps_of
from study.text_kinds import PreparedText
from tests.study.commands import refused

PAPER = "settings=paper"
# GPTQModel's QuantizeConfig before version 5: group_size, sym, desc_act, damp_percent.
GPTQ = {"group_size": 128, "symmetric": True, "order": "actorder", "damping": 0.05}
TASKS = (
    *("arc_challenge", "arc_easy", "openbookqa", "piqa", "hellaswag", "winogrande"),
    *("mathqa", "pubmedqa", "sciq", "social_iqa", "commonsense_qa", "mmlu"),
)


def test_the_preset_has_the_values_of_the_paper():
    study = resolve("pythia-160m-lr", "full", (PAPER,))
    quantization, tasks, text = study.quantization, study.tasks, study.text
    assert study.name == "pythia-160m-lr-settings=paper"
    # 3 and 4 bits by gptqmodel, AWQ and LLM.int8(), of every checkpoint and nothing else
    assert [(spec.library, spec.bits) for spec in map(parse_spec, quantization.specs)] == [
        ("gptqmodel", 3),
        ("gptqmodel", 4),
    ]
    for spec in map(parse_spec, quantization.specs):
        assert {name: getattr(spec, name) for name in GPTQ} == GPTQ
    assert quantization.along == ("awq-b3-g128", "awq-b4-g128", "int8-t6")
    assert not quantization.methods
    # the first 1,024 texts of c4-train.00001-of-01024, each for itself; one quantization of each
    assert (quantization.calibration_sequences, quantization.calibration_seeds) == (1024, 1)
    assert quantization.calibration_documents == "separate"
    assert isinstance(text, PreparedText)
    assert (text.calibration.dataset, text.calibration.files) == ("allenai/c4", "2")
    # some 600,000 tokens of RefinedWeb, joined, in blocks of 2,048
    assert (quantization.eval_tokens, quantization.documents) == (600_000, "concatenated")
    assert text.held_out.dataset == "tiiuae/falcon-refinedweb"
    assert all(run.data.sequence_length == 2048 for run in study.trained)
    assert quantization.measure == "relative_error"
    # twelve tasks with five examples, of every checkpoint
    assert tasks
    assert (set(tasks.names), tasks.shots, tasks.limit) == (set(TASKS), 5, None)
    assert (tasks.along, tasks.specs) == (True, quantization.specs)
    assert (tasks.calibration_sequences, tasks.calibration_documents) == (1024, "separate")
    checkpoints = sum(len(run.save_steps) for run in study.trained)
    for kind, of_each in (("quantize", 5), ("tasks", 2)):
        steps = [step for step in steps_of(study) if step.kind == kind]
        assert len(steps) == of_each * checkpoints
        assert len({step.name for step in steps}) == len(steps)
    # another project's library takes one process
    by_gptqmodel = [step for step in steps_of(study) if "gptqmodel" in step.specs[-1:].__str__()]
    assert {step.head[0] for step in by_gptqmodel if step.kind == "quantize"} == {"{python}"}


@pytest.mark.parametrize("profile", ["full", "smoke"])
@pytest.mark.parametrize("name", whole_recipes())
def test_every_recipe_takes_it(name, profile):
    """In small too, where models are too narrow for groups of 128 and are asked nothing."""
    plain, study = resolve(name, profile), resolve(name, profile, (PAPER,))
    is_small = profile == "smoke" or name.startswith("tiny")
    size, way = (32, "actorder") if is_small else (128, "paper")
    assert study.quantization.specs == tuple(f"gptqmodel-b{b}-g{size}-{way}" for b in (3, 4))
    assert study.quantization.along == (f"awq-b3-g{size}", f"awq-b4-g{size}", "int8-t6")
    assert (study.tasks is None) is is_small
    if is_small:
        amounts = ("eval_tokens", "calibration_sequences", "block_tokens")
        for amount in amounts:
            assert getattr(study.quantization, amount) == getattr(plain.quantization, amount)
    assert "settings=paper: " in study.description
    # No point of a plane is by a spec that the preset has replaced.
    points = [point.spec for plane in study.resolved_planes for point in plane.points.values()]
    assert set(points) <= {None, *study.quantization.specs}
    assert len(points) == 3 * len(plain.planes)
    # What is trained is the recipe's.
    assert study.runs == plain.runs
    assert study.curvature == plain.curvature


def chosen(study: Study) -> tuple[Any, ...]:
    quantization = study.quantization
    return quantization.measure, quantization.calibration_seeds, quantization.documents


def test_other_settings_win_over_the_preset_wherever_they_stand():
    later = ("quantization.measure=absolute_error", "quantization.calibration_seeds=3")
    studies = [
        resolve("olmo2-190m-lr", "full", settings)
        for settings in ((PAPER, *later), (*later, PAPER), (later[0], PAPER, later[1]))
    ]
    assert {chosen(study) for study in studies} == {("absolute_error", 3, "concatenated")}
    assert all(set(study.settings) == {PAPER, *later} for study in studies)
    without = resolve("olmo2-190m-lr", "full", (PAPER, "tasks=null"))
    assert without.tasks is None
    fewer = resolve("olmo2-190m-lr", "full", (PAPER, "tasks.tasks=piqa,sciq"))
    assert fewer.tasks
    assert fewer.tasks.names == ("piqa", "sciq")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("settings=papre",), "no such preset; did you mean paper"),
        (("settings=",), "no such preset; take one of paper"),
        ((PAPER, PAPER), "settings=paper is given, too; leave one of the two out"),
        (
            ("quantization.calibration_documents=separate", "quantization.along=[\"autoround-b4-g32\"]"),
            "autoround-b4-g32 is learned on sequences of one length",
        ),
        (("quantization.measure=perplexity",), "Input should be 'kl_divergence', 'relative_error'"),
    ],
)  # fmt: skip
def test_what_is_no_preset_is_refused_in_a_line(settings, words):
    with pytest.raises(UserError, match=words) as error:
        resolve("tiny", "smoke", settings)
    assert "\n" not in str(error.value)


def test_documents_of_tasks_are_looked_for_before_anything_is_trained(tmp_path, monkeypatch):
    local = f"tasks.task_files={tmp_path}"
    study = resolve("olmo2-30m-lr", "full", (PAPER, "tasks.tasks=piqa", local))
    with pytest.raises(UserError, match=r"piqa\.jsonl does not exist; put the documents of piqa"):
        check_measurable(study)
    (tmp_path / "piqa.jsonl").touch()
    check_measurable(study)
    of_hub = resolve("olmo2-30m-lr", "full", (PAPER,))
    check_measurable(of_hub)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"on the Hugging Face hub, and HF_HUB_OFFLINE is set"):
        check_measurable(of_hub)
    with pytest.raises(UserError, match=r"task_files data is relative; give an absolute path"):
        resolve("olmo2-30m-lr", "full", (PAPER, "tasks.task_files=data"))


def test_a_library_that_is_missing_is_named_before_anything_is_trained(monkeypatch):
    study = resolve("tiny", "smoke", (PAPER,))
    check_measurable(study)
    monkeypatch.setattr("study.machine.measurable._is_installed", lambda name: name != "gptqmodel")
    with pytest.raises(UserError, match=r"spec gptqmodel-b3-g32-actorder is by gptqmodel, which"):
        check_measurable(study)


def test_a_study_that_runs_says_so_first(tmp_path, monkeypatch):
    """No directory is made for it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["run", "tiny", "--profile", "smoke", "--set", PAPER, "--root", str(tmp_path)]
    question = '{"specs":["gptq-b3-g32"],"tasks":"piqa"}'
    line = refused(*words, "--set", f"tasks={question}")
    assert "HF_HUB_OFFLINE" in line
    assert not [*Path(tmp_path).iterdir()]
