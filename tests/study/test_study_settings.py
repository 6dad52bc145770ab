"""Refusals of a study, and its names of things."""

from typing import Any

import pytest
from pydantic import ValidationError

from base.errors import UserError
from study.definition import Study
from study.machine.needs import write_run_configurations
from study.measurements.titles import spec_title
from study.recipes.resolve import resolve
from tests.study.ablation import tiny

RUNS = [run.model_dump(mode="json") for run in tiny().trained]
BARE: dict[str, Any] = {"averaged_steps": [], "soups": []}
SOUP = {"name": "soup", "steps": [576, 640]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # runs, and names
        ({"runs": RUNS[:1] * 2}, "share a name"),
        (
            BARE | {"runs": [RUNS[0], RUNS[1] | {"save_steps": [640]}]},
            "lr3e-3 has no checkpoint before its last one",
        ),
        # specs are canonical, and fit the model
        ({"quantization": {"specs": ["gptq-b3-g32-sym"]}}, "write gptq-b3-g32 instead"),
        ({"quantization": {"methods": ["rtn-b3-g32-sym"]}}, "write rtn-b3-g32 instead"),
        ({"quantization": {"methods": ["gptq-b4-g32"]}}, "listed twice"),
        ({"quantization": {"by_block": ["gptq-b3-g32-sym"]}}, "write gptq-b3-g32 instead"),
        ({"quantization": {"by_block": ["gptq-b3-g32"] * 2}}, "listed twice"),
        (
            {"quantization": {"by_block": ["int8-t6"]}},
            "int8-t6 rounds activations too",
        ),
        ({"quantization": {"methods": ["gptq-b3-g36"]}}, "36 does not divide .* choose a divisor"),
        ({"quantization": {"by_block": ["rtn-b3-g36"]}}, "cannot be measured with spec rtn-b3-g36"),
        ({"tasks": {"specs": ["rtn-b3-g36"]}}, "cannot be measured with spec rtn-b3-g36"),
        *(
            (
                {part: {"sequence_length": 129}},
                f"{part}.sequence_length 129 is beyond the context of 128 tokens of run lr1e-3",
            )
            for part in ("quantization", "curvature", "step", "slice")
        ),
        # averages are of saved steps and have names of their own
        ({"soups": [SOUP | {"steps": [576, 600]}]}, r"steps \[576, 600\], which no run saves all"),
        ({"soups": [SOUP | {"steps": [640]}]}, "at least 2 items"),
        ({"soups": [SOUP | {"steps": [576, 576]}]}, "do not rise"),
        ({"soups": [SOUP | {"steps": [640, 576]}]}, "do not rise"),
        ({"soups": [SOUP] * 2}, "share a name among soup, soup, lawa5x16"),
        ({"soups": [SOUP | {"name": "lawa5x16"}]}, "share a name among lawa5x16, lawa5x16"),
        ({"soups": [SOUP | {"name": "a/soup"}]}, "should match pattern"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changed, words):
    content = tiny().model_dump(mode="json")
    for key, values in changed.items():
        content[key] = (content[key] or {}) | values if isinstance(values, dict) else values
    with pytest.raises(ValidationError, match=words):
        Study.model_validate(content)


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


def test_many_settings_name_a_directory_that_can_be_made(tmp_path):
    """Their order decides, too, as the last of one path is what holds."""
    settings = (
        "quantization.eval_tokens=4096",
        "quantization.calibration_sequences=8",
        "curvature.pairs=4",
        "optimizer.weight_decay=0.3",
        "optimizer.beta2=0.9",
    )
    names = [resolve("tiny", "smoke", given).name for given in (settings, settings[::-1])]
    assert len(set(names)) == 2
    for name in names:
        assert name.startswith("tiny-smoke-set=sha")
        (tmp_path / name).mkdir()
    assert resolve("tiny", "smoke", settings[:1]).name == "tiny-smoke-quantization.eval_tokens=4096"
