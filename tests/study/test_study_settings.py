"""Refusals of a study, and its names of things."""

import pytest
from pydantic import ValidationError

from base.errors import UserError
from study.definition import Study
from study.machine.needs import write_run_configurations
from study.measurements.titles import spec_title
from study.recipes.changed import with_study_settings
from study.recipes.resolve import resolve
from tests.study.ablation import tiny


def test_a_spec_must_be_canonical_and_runs_must_differ():
    content = tiny().model_dump(mode="json")
    twice = content | {"runs": [content["runs"][0]] * 2}
    with pytest.raises(ValidationError, match="share a name"):
        Study.model_validate(twice)
    spelt = content | {"quantization": content["quantization"] | {"specs": ["gptq-b3-g32-sym"]}}
    with pytest.raises(ValidationError, match="write gptq-b3-g32 instead"):
        Study.model_validate(spelt)
    for changed, words in (
        ({"methods": ["rtn-b3-g32-sym"]}, "write rtn-b3-g32 instead"),
        ({"methods": ["gptq-b4-g32"]}, "listed twice"),
        ({"by_block": ["gptq-b3-g32-sym"]}, "write gptq-b3-g32 instead"),
        ({"by_block": ["gptq-b3-g32"] * 2}, "listed twice"),
        ({"by_block": ["int8-t6"]}, "int8-t6 rounds activations too, it is not a step of weights"),
    ):
        with pytest.raises(ValidationError, match=words):
            Study.model_validate(content | {"quantization": content["quantization"] | changed})


@pytest.mark.parametrize(
    "path",
    ["curvature.norm_pairs", "curvature.companion_pairs", "step.microbatches", "slice.sequences"],
)
def test_no_error_is_told_from_one_value(path):
    with pytest.raises(UserError, match=path):
        with_study_settings(tiny(), (f"{path}=1",))


def test_a_slice_needs_two_checkpoints():
    content = tiny().model_dump(mode="json") | {"averaged_steps": [], "soups": []}
    runs = {run["name"]: run for run in content["runs"]}
    runs["lr3e-3"]["save_steps"] = [640]
    content["runs"] = [runs["lr1e-3"], runs["lr3e-3"]]
    with pytest.raises(
        ValidationError, match="run lr3e-3 saves one checkpoint, a slice goes through the last two"
    ):
        Study.model_validate(content)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"soups": [{"name": "soup", "steps": [576, 600]}]},
            r"soup takes in steps \[576, 600\], which no run saves all",
        ),
        ({"soups": [{"name": "soup", "steps": [640]}]}, "at least 2 items"),
        ({"soups": [{"name": "soup", "steps": [576, 576]}]}, "do not rise"),
        ({"soups": [{"name": "soup", "steps": [640, 576]}]}, "do not rise"),
        (
            {"soups": [{"name": "soup", "steps": [576, 640]}] * 2},
            "share a name among soup, soup, lawa5x16",
        ),
        (
            {"soups": [{"name": "lawa5x16", "steps": [576, 640]}]},
            "share a name among lawa5x16, lawa5x16",
        ),
        ({"soups": [{"name": "a/soup", "steps": [576, 640]}]}, "should match pattern"),
    ],
)
def test_averages_are_of_saved_steps_and_have_names_of_their_own(changed, words):
    with pytest.raises(ValidationError, match=words):
        Study.model_validate(tiny().model_dump(mode="json") | changed)


def test_a_run_name_is_not_used_for_another_configuration(tmp_path):
    study = tiny()
    write_run_configurations(tmp_path, study)
    write_run_configurations(tmp_path, study)  # the same again is fine
    other = study.trained[0].model_copy(update={"seed": 1})
    with pytest.raises(UserError, match="another configuration"):
        write_run_configurations(tmp_path, study.model_copy(update={"runs": (other,)}))


@pytest.mark.parametrize(
    ("spec", "title"),
    [
        ("gptq-b3-g32", "GPTQ, 3 bits, groups of 32"),
        (
            "gptq-b4-perchannel-asym-actorder-damp0.01",
            "GPTQ, 4 bits, one scale per channel, asymmetric, activation order, damping 0.01",
        ),
        ("gptqmodel-b4-g128-paper", "GPTQ by gptqmodel, 4 bits, groups of 128, activation order"),
        ("gptaq-b3-g32-alpha0.5", "GPTAQ, 3 bits, groups of 32, alpha 0.5"),
        ("awq-b3-g32", "AWQ, 3 bits, groups of 32"),
        ("rtn-b2-g64-s16", "RTN, 2 bits, groups of 64, fp16 scales"),
        ("int8-t6", "LLM.int8(), threshold 6"),
        ("int8-t0", "LLM.int8(), threshold 0"),
        ("nf4-g64", "NF4, groups of 64"),
    ],
)
def test_titles_say_all_that_a_name_says(spec, title):
    assert spec_title(spec) == title


def test_runs_that_differ_in_their_name_alone_are_refused():
    first = tiny().trained[0]
    assert tiny().label_of(first) == "0.001"
    content = tiny().model_dump() | {"soups": (), "averaged_steps": ()}
    content["runs"] = [first.model_dump(), first.model_dump() | {"name": "again"}]
    with pytest.raises(ValidationError, match=r"runs lr1e-3 and again are the same training"):
        Study.model_validate(content)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"run": "../lr5"}, r"branches from \.\./lr5, which is not a run of the study"),
        ({"run": "../lr3e-3-anneal32.8k"}, "a branch itself; branch from its parent"),
        ({"step": 95}, "branches at step 95, lr1e-2 saves none there"),
        ({"fingerprint": "0" * 16}, "names another fingerprint than that of its parent lr1e-2"),
    ],
)
def test_a_branch_has_its_parent_in_the_study(changed, words):
    content = resolve("olmo2-7b-lr", "smoke").model_dump(mode="json")
    last = content["runs"][-2]
    assert last["name"] == "lr1e-2-anneal65.5k"
    last["branch_from"] |= changed
    with pytest.raises(ValidationError, match=words):
        Study.model_validate(content)
