"""The demo: what it promises, checked with numbers worked out by hand."""

from itertools import pairwise
from typing import Any

import pytest

from dynamics.recipes.demo import tiny
from quant_eval.measuring.sequential import check_spec
from quant_eval.specs import parse_spec
from study.recipes.parts import learning_rate_name
from study.recipes.resolve import resolve, whole_recipes
from tests.study.test_command import without_weights
from train.run.schedules import learning_rate

PROFILES = ["full", "smoke"]


def swept(study):
    """The runs that anneal; the others are their controls."""
    return [run for run in study.trained if run.schedule.anneal]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_rate_is_near_constant_as_in_the_7b_ablation(profile):
    # There the anneal starts at 0.99234 of the peak. The warm-up here is a larger part of the run,
    # and the cosine runs from its end, so the share may be slightly higher.
    for run in swept(resolve("tiny", profile)):
        share = learning_rate(run, run.schedule.anneal.start_step) / run.optimizer.peak_lr
        assert share == pytest.approx(0.993, abs=0.0015)


@pytest.mark.parametrize("profile", PROFILES)
def test_averages_are_measured_over_one_phase_each(profile):
    study = resolve("tiny", profile)
    for run in swept(study):
        start = run.schedule.anneal.start_step
        assert run.total_steps in study.averaged_steps
        for average in run.averages:
            assert average.kind == "lawa"
            back = (average.window - 1) * average.interval_steps
            for step in study.averaged_steps:
                assert step % average.interval_steps == 0
                assert (start if step > start else run.warmup_steps) < step - back, (
                    "a window reaches into two phases"
                )


def test_tiny_is_the_ablation_in_small():
    study = tiny()
    runs = swept(study)
    peaks, seeds = (6e-3, 7.2e-2), (1, 2, 3, 4)
    assert [(run.optimizer.peak_lr, run.seed) for run in runs] == [
        (peak, seed) for seed in seeds for peak in peaks
    ]
    rest: dict[str, Any] = {"name": "", "factors": {}, "optimizer": runs[0].optimizer, "seed": 0}
    assert len({run.model_copy(update=rest).model_dump_json() for run in runs}) == 1
    assert len({run.optimizer.weight_decay for run in runs}) == 1
    # rate x decay x steps before the anneal, as of the 7B's with 6e-4, and twelve times that
    start = runs[0].schedule.anneal.start_step
    kept = [start * run.optimizer.peak_lr * run.optimizer.weight_decay for run in runs[:2]]
    assert kept == pytest.approx([72_000 * peak * 0.1 for peak in (6e-4, 72e-4)])
    model = study.trained[0].model
    width, inner = model.hidden_size, model.intermediate_size
    block = 4 * width * width + 3 * width * inner + 4 * width
    parameters = 2 * model.vocab_size * width + model.num_hidden_layers * block + width
    assert parameters == 238_144  # 0.2 million
    # denser in the anneal
    run = runs[0]
    start = run.schedule.anneal.start_step
    gaps = {later: later - earlier for earlier, later in pairwise(run.save_steps)}
    before = [gap for step, gap in gaps.items() if step <= start]
    assert max(gap for step, gap in gaps.items() if step > start) < min(before)


@pytest.mark.parametrize(
    ("peak_lr", "name"),
    [(1e-3, "lr1e-3"), (3e-2, "lr3e-2"), (0.01, "lr1e-2"), (2.5e-4, "lr2.5e-4"), (3.0, "lr3e0")],
)
def test_runs_are_named_by_value(peak_lr, name):
    assert learning_rate_name(peak_lr) == name


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("recipe", whole_recipes())
def test_every_spec_has_a_place(recipe, profile):
    study = resolve(recipe, profile)
    for of_run in {run.model for run in study.trained}:
        model = without_weights(of_run.model_copy(update={"num_hidden_layers": 1}))
        for spec in (*study.quantization.at_the_end, *study.quantization.by_block):
            check_spec(model, parse_spec(spec))
