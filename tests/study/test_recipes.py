"""Recipes: what they promise, checked with numbers worked out by hand."""

import pytest
from pydantic import ValidationError

from study.recipes import RECIPES, learning_rate_name, resolve, tiny
from study.settings import Study, load_study, save_study, spec_title, write_run_configurations
from train.command import UserError
from train.schedules import learning_rate

PROFILES = [(recipe, profile) for recipe, profiles in RECIPES.items() for profile in profiles]


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_every_profile_builds_and_survives_its_file(tmp_path, recipe, profile):
    study = resolve(recipe, profile)
    save_study(tmp_path, study)
    assert load_study(tmp_path) == study


def test_study_names_are_unique():
    names = [resolve(*pair).name for pair in PROFILES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_the_anneal_has_checkpoints_at_both_ends(recipe, profile):
    for run in resolve(recipe, profile).runs:
        assert run.schedule.anneal is not None
        assert run.schedule.anneal.start_step in run.save_steps
        assert run.save_steps[-1] == run.total_steps
        assert learning_rate(run, run.total_steps) == 0


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_the_rate_is_near_constant_as_in_the_7b_ablation(recipe, profile):
    # There the anneal starts at 0.99234 of the peak. The warm-up here is a larger part of the run, and the cosine
    # runs from its end, so the share may be slightly higher.
    for run in resolve(recipe, profile).runs:
        assert run.schedule.anneal is not None
        share = learning_rate(run, run.schedule.anneal.start_step) / run.optimizer.peak_lr
        assert share == pytest.approx(0.993, abs=0.0015)


@pytest.mark.parametrize(("recipe", "profile"), PROFILES)
def test_averages_are_measured_over_one_phase_each(recipe, profile):
    study = resolve(recipe, profile)
    for run in study.runs:
        assert run.schedule.anneal is not None
        start = run.schedule.anneal.start_step
        assert {start, run.total_steps} <= set(study.averaged_steps)
        for average in run.averages:
            assert average.kind == "lawa"
            back = (average.window - 1) * average.interval_steps
            for step in study.averaged_steps:
                assert step % average.interval_steps == 0
                assert (start if step > start else run.warmup_steps) < step - back, "a window reaches into two phases"


def test_settings_name_the_study_and_change_every_run(tmp_path):
    study = resolve("tiny", "full", ("engine=deepspeed", "optimizer.weight_decay=0"))
    assert study.name == "tiny-engine=deepspeed-weight_decay=0"
    assert study.settings == ("engine=deepspeed", "optimizer.weight_decay=0")
    assert [run.name for run in study.runs] == [run.name for run in tiny().runs]
    for run, plain in zip(study.runs, tiny().runs, strict=True):
        optimizer = plain.optimizer.model_copy(update={"weight_decay": 0.0})
        assert run == plain.model_copy(update={"engine": "deepspeed", "optimizer": optimizer})
    save_study(tmp_path, study)
    assert load_study(tmp_path) == study


def test_tiny_is_the_ablation_in_small():
    study = tiny()
    assert [run.name for run in study.runs] == ["lr1e-3", "lr3e-3", "lr1e-2", "lr3e-2"]
    assert [run.optimizer.peak_lr for run in study.runs] == [1e-3, 3e-3, 1e-2, 3e-2]
    shared = {run.model_copy(update={"name": "", "optimizer": None}).model_dump_json() for run in study.runs}
    assert len(shared) == 1  # nothing but the peak differs
    model = study.runs[0].model
    width, inner = model.hidden_size, model.intermediate_size
    block = 4 * width * width + 3 * width * inner + 4 * width
    parameters = 2 * model.vocab_size * width + model.num_hidden_layers * block + width
    assert 0.5e6 < parameters < 2e6
    # denser in the anneal
    run = study.runs[0]
    assert run.schedule.anneal is not None
    start = run.schedule.anneal.start_step
    gaps = [later - earlier for earlier, later in zip(run.save_steps, run.save_steps[1:], strict=False)]
    before = [gap for gap, step in zip(gaps, run.save_steps[1:], strict=True) if step <= start]
    after = [gap for gap, step in zip(gaps, run.save_steps[1:], strict=True) if step > start]
    assert max(after) < min(before)


@pytest.mark.parametrize(
    ("peak_lr", "name"), [(1e-3, "lr1e-3"), (3e-2, "lr3e-2"), (0.01, "lr1e-2"), (2.5e-4, "lr2.5e-4"), (3.0, "lr3e0")]
)
def test_runs_are_named_by_value(peak_lr, name):
    assert learning_rate_name(peak_lr) == name


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
        ({"by_block": ["int8-t6"]}, "int8-t6 rounds activations too, it is no step of weights"),
    ):
        with pytest.raises(ValidationError, match=words):
            Study.model_validate(content | {"quantization": content["quantization"] | changed})


@pytest.mark.parametrize("setting", ["norm_pairs", "companion_pairs", "step_microbatches", "slice_sequences"])
def test_no_error_is_told_from_one_value(setting):
    content = tiny().model_dump(mode="json")
    content["curvature"][setting] = 1
    with pytest.raises(ValidationError, match=f"curvature.{setting}"):
        Study.model_validate(content)


def test_a_slice_needs_two_checkpoints():
    content = tiny().model_dump(mode="json") | {"averaged_steps": [], "soups": []}
    content["runs"][1]["save_steps"] = [640]
    with pytest.raises(ValidationError, match="run lr3e-3 saves one checkpoint, a slice goes through the last two"):
        Study.model_validate(content)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"averaged_steps": [448, 600]}, "averages are to be measured at step 600, run lr1e-3 saves none there"),
        ({"soups": [{"name": "soup", "steps": [576, 600]}]}, "soup takes in step 600, run lr1e-3 saves none there"),
        ({"soups": [{"name": "soup", "steps": [640]}]}, "at least 2 items"),
        ({"soups": [{"name": "soup", "steps": [576, 576]}]}, "do not rise"),
        ({"soups": [{"name": "soup", "steps": [640, 576]}]}, "do not rise"),
        ({"soups": [{"name": "soup", "steps": [576, 640]}] * 2}, "share a name among soup, soup, lawa5x16"),
        ({"soups": [{"name": "lawa5x16", "steps": [576, 640]}]}, "share a name among lawa5x16, lawa5x16"),
        ({"soups": [{"name": "a/soup", "steps": [576, 640]}]}, "should match pattern"),
    ],
)
def test_averages_are_of_saved_steps_and_have_names_of_their_own(changed, words):
    with pytest.raises(ValidationError, match=words):
        Study.model_validate(tiny().model_dump(mode="json") | changed)


def test_models_are_measured_by_rising_step_weights_first():
    models = tiny().models_of(tiny().runs[0])
    assert [(model.step, model.average) for model in models] == [
        (64, None),
        (192, None), (192, "lawa5x16"),
        (320, None),
        (448, None), (448, "lawa5x16"), (448, "soup-stable"),
        (512, None),
        (576, None),
        (640, None), (640, "lawa5x16"), (640, "soup-anneal"),
    ]  # fmt: skip
    assert {model.average: model.soup_of for model in models if model.soup_of} == {
        "soup-stable": (192, 320, 448),
        "soup-anneal": (512, 576, 640),
    }


def test_a_run_name_is_not_used_for_another_configuration(tmp_path):
    study = tiny()
    write_run_configurations(tmp_path, study)
    write_run_configurations(tmp_path, study)  # the same again is fine
    other = study.runs[0].model_copy(update={"seed": 1})
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


def test_runs_of_one_peak_are_told_apart_by_their_names():
    first, second = tiny().runs[:2]
    assert tiny().label_of(first) == "0.001"
    same = second.model_copy(update={"optimizer": first.optimizer})
    study = tiny().model_copy(update={"runs": (first, same)})
    assert [study.label_of(run) for run in study.runs] == ["lr1e-3", "lr3e-3"]
