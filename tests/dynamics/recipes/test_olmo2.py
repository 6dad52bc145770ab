"""The OLMo2 ablation against figures of its papers and scripts, and against sums worked by hand."""

from itertools import pairwise

import pytest
from pydantic import ValidationError

from study.axes import Value
from study.definition import Study
from study.machine.disk import needed_bytes, restart_bytes
from study.machine.hardware import planned
from study.machine.needs import Needs
from study.machine.prices import Prices
from study.recipes.resolve import resolve
from study.recipes.shown import gpu_hours, trained_tokens
from study.steps import steps_of
from train.planning.flops import GPUS
from train.planning.memory import rank_memory
from train.planning.plan import fit
from train.planning.speed import Roofline
from train.run.config import RunConfig
from train.run.parallel import ParallelConfig
from train.run.schedules import learning_rate

STEP = 4_194_304  # tokens of a step of the 7B: 1024 x 4096
NAMES = ["lr3e-4", "lr6e-4", "lr9e-4", "lr1.2e-3"]
ANNEALS = ["lr3e-4-anneal50b"]
ANNEALS += [f"{name}-anneal{length}" for name in NAMES[1:] for length in ("50b", "100b")]


def runs_of(recipe: str, profile: str = "full") -> dict[str, RunConfig]:
    return {run.name: run for run in resolve(recipe, profile).trained}


def test_four_parents_seven_anneals_and_four_controls():
    runs = runs_of("olmo2-7b-lr")
    assert [name for name, run in runs.items() if not run.branch_from] == NAMES
    assert [name for name, run in runs.items() if run.schedule.anneal] == ANNEALS
    rest = [name for name in runs if name not in NAMES + ANNEALS]
    assert rest == [f"{name}-control" for name in NAMES]


@pytest.mark.parametrize(
    ("name", "rate"),
    [("lr3e-4", 2.9770e-4), ("lr6e-4", 5.9540e-4), ("lr9e-4", 8.9311e-4), ("lr1.2e-3", 1.19081e-3)],
)
def test_rates_where_the_anneals_start(name, rate):
    """0.99234 of each peak, by OLMo's formula at 301,989,888,000 of 5e12 tokens.

    Ai2's scripts read them from the parents' logs.
    """
    runs = runs_of("olmo2-7b-lr")
    assert learning_rate(runs[name], 72_000) == pytest.approx(rate, rel=2e-5)
    for run in runs.values():
        if run.branch_from and run.branch_from.run == f"../{name}":
            assert run.branch_from.step == 72_000
            halfway = (72_000 + run.total_steps) / 2
            assert learning_rate(run, 72_000) == pytest.approx(rate, rel=2e-5)
            if not run.schedule.anneal:  # hardly falls
                assert learning_rate(run, run.total_steps) > 0.98 * rate
                continue
            assert learning_rate(run, int(halfway)) == pytest.approx(rate / 2, rel=1e-4)
            assert learning_rate(run, run.total_steps) == 0


def test_steps_and_tokens():
    runs = runs_of("olmo2-7b-lr")
    for name, run in runs.items():
        assert run.tokens_per_step == STEP
        ends = {"50b": 83_921, "100b": 95_842, "control": 95_842, "lr3e-4-control": 83_921}
        end = ends.get(name) or ends.get(name.split("-")[-1].removeprefix("anneal"), 72_000)
        assert run.total_steps == end
        peak = run.optimizer.peak_lr
        assert learning_rate(run, 1) == pytest.approx(peak / 2000)  # OLMo: update n uses LR(n)
        assert learning_rate(run, 2000) == pytest.approx(peak)
    short = runs["lr9e-4-anneal50b"]
    assert short.total_steps * short.tokens_per_step == pytest.approx(351.99e9, rel=1e-5)
    # 4 parents, 4 anneals of 11,921 and 3 of 23,842 steps, and controls of 1 and of 3
    total = (4 * 72_000 + 4 * 11_921 + 3 * 23_842 + 11_921 + 3 * 23_842) * STEP
    assert trained_tokens(resolve("olmo2-7b-lr", "full")) == total
    # 47.768 GFLOP a token; at the share of 989 TFLOP/s that the roofline has for one replica
    study = resolve("olmo2-7b-lr", "full")
    mfu = Roofline(study.trained[0], 1, 8, GPUS["h100"]).mfu
    hours = total * 47.768e9 / (mfu * 989e12) / 3600
    assert gpu_hours(study).expected == pytest.approx(hours, rel=1e-5)


def test_checkpoints_are_dense_where_the_error_surges():
    for run in runs_of("olmo2-7b-lr").values():
        if run.branch_from and not run.schedule.anneal:
            continue  # a control: at every second of them
        start = run.branch_from.step if run.branch_from else 0
        gaps = {later - earlier for earlier, later in pairwise((start, *run.save_steps))}
        assert gaps <= ({4000} if start == 0 else {1490, 1491, 2980, 2981})
        assert len(run.save_steps) == (8 if start else 18)


def test_a_cosine_over_300b_enters_the_anneals_at_a_tenth():
    for run in runs_of("olmo2-7b-lr-cosine300b").values():
        peak = run.optimizer.peak_lr
        assert learning_rate(run, 72_000) == pytest.approx(peak / 10)
        # half way between the end of the warm-up and 300e9 tokens: (1 + 0.1) / 2 of the peak
        halfway = (8_388_608_000 + 300_000_000_000) // 2 // STEP
        assert learning_rate(run, halfway) == pytest.approx(0.55 * peak, rel=1e-4)
    names = list(runs_of("olmo2-7b-lr"))
    assert list(runs_of("olmo2-7b-lr-cosine300b")) == names


@pytest.mark.parametrize(
    ("recipe", "step_tokens", "warmup", "start", "ends"),
    [
        # 72,000 x 4,194,304 / 5 / 2,097,152; 10e9 and 20e9 / 2,097,152 = 4768.4 and 9536.7 steps
        ("olmo2-1b-lr", 512 * 4096, 800, 28_800, {28_800 + 4_768, 28_800 + 9_537}),
        # / 25 / 1,048,576; 2e9 and 4e9 / 1,048,576 = 1907.3 and 3814.7 steps
        ("olmo2-190m-lr", 256 * 4096, 320, 11_520, {11_520 + 1_907, 11_520 + 3_815}),
    ],
)
def test_smaller_sizes_go_through_the_same_schedule(recipe, step_tokens, warmup, start, ends):
    runs, big = runs_of(recipe), runs_of("olmo2-7b-lr")["lr3e-4"]
    assert len(runs) == 15
    for run in runs.values():
        assert run.tokens_per_step == step_tokens
        assert run.warmup_steps == warmup
        assert run.total_steps in ({*ends} if run.branch_from else {start})
        if not run.branch_from:
            for part in range(1, 73):
                share = learning_rate(run, start * part // 72) / run.optimizer.peak_lr
                assert share == pytest.approx(learning_rate(big, 1000 * part) / 3e-4, rel=1e-9)
    peaks = sorted({run.optimizer.peak_lr for run in runs.values()})
    assert [peak / peaks[0] for peak in peaks] == pytest.approx([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("recipe", "nodes", "gpu", "gigabytes"),
    [
        ("olmo2-7b-lr", 8, "h100", 73.3),
        ("olmo2-7b-lr", 8, "h200", 73.3),
        ("olmo2-7b-lr", 1, "h200", 98.9),
        ("olmo2-1b-lr", 1, "h100", 44.2),
        ("olmo2-190m-lr", 1, "h100", 34.5),
        ("olmo2-30m-lr", 1, "h100", 6.1),
    ],
)
def test_layouts_that_the_planner_gives_a_recipe(recipe, nodes, gpu, gigabytes):
    """No model is split or recomputed; all are as their recipe says."""
    for run in resolve(recipe, "full").trained:
        assert fit(run, 8 * nodes, gpus_per_node=8, gpu=GPUS[gpu]) == run
        assert run.parallel == ParallelConfig()
        assert rank_memory(run, 8 * nodes).bytes / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_the_7b_on_one_node_of_80_gb_is_two_pipeline_stages():
    for run in resolve("olmo2-7b-lr", "full").trained:
        fitted = fit(run, 8, gpus_per_node=8, gpu=GPUS["h100"])
        assert fitted == run.model_copy(update={"parallel": ParallelConfig(pipeline=2)})


@pytest.mark.parametrize(
    "recipe",
    ["olmo2-7b-lr", "olmo2-1b-lr", "olmo2-190m-lr", "olmo2-30m-lr", "olmo2-7b-lr-cosine300b"],
)
@pytest.mark.parametrize("profile", ["full", "smoke"])
def test_averages_lie_within_one_run(recipe, profile):
    """A window ends where it is measured or less than an interval before, and begins after
    warm-up and branch.
    """
    study = resolve(recipe, profile)
    for run in study.trained:
        measured = [
            model.step for model in study.models_of(run) if (model.average or "").startswith("lawa")
        ]
        assert run.total_steps in measured
        (average,) = run.averages
        first = run.branch_from.step if run.branch_from else run.warmup_steps
        for step in measured:
            last_member = step // average.interval_steps * average.interval_steps
            assert last_member - 4 * average.interval_steps > first - average.interval_steps
    soups = {
        run.name for run in study.trained if any(model.members for model in study.models_of(run))
    }
    assert soups == {run.name for run in study.trained if not run.branch_from}


def test_what_was_varied_has_a_line_per_length_of_anneal():
    varied = resolve("olmo2-7b-lr", "full").varied
    assert varied is not None
    lines: dict[str, list[Value]] = {}
    for name, group in varied.groups.items():
        lines.setdefault(group, []).append(varied.values[name])
    assert lines == {
        "cosine": [3e-4, 6e-4, 9e-4, 1.2e-3],
        "50B anneal": [3e-4, 6e-4, 9e-4, 1.2e-3],
        "100B anneal": [6e-4, 9e-4, 1.2e-3],
        "no anneal": [3e-4, 6e-4, 9e-4, 1.2e-3],
    }


def test_the_30m_is_an_hour_of_one_gpu():
    """Steps of 131,072 tokens, 9 x 128 of them up to the anneals: 72,000 x 4,194,304 / 2,000."""
    study = resolve("olmo2-30m-lr", "full")
    model = study.trained[0].model
    assert (model.hidden_size, model.num_hidden_layers, model.num_attention_heads) == (256, 4, 8)
    # the output layer, and per layer q, k, v, o, an MLP of 768 and four norms
    without_embedding = 100_352 * 256 + 4 * (4 * 256**2 + 3 * 256 * 768 + 4 * 256) + 256
    assert without_embedding == 29_102_336
    # 4 peaks: 1,152 steps, and 191 more twice, with the anneal and without
    assert trained_tokens(study) == 4 * (1_152 + 2 * 191) * 131_072
    flops = 6 * without_embedding + 12 * 4 * 256 * 2048
    at_peak = trained_tokens(study) * flops / 989e12 / 3600
    hours = gpu_hours(study)
    assert at_peak < hours.least < hours.expected < hours.most < 0.5
    needs = Needs(study, planned(1, "h100", 1))
    priced = {price.kind: price for price in Prices(needs, steps_of(study), "h100").by_kind()}
    assert (priced["train"].hours, priced["train"].gpus) == (hours, (1, 1))
    for gpus in (1, 2, 4, 8):
        assert all(rank_memory(run, gpus).bytes < 80e9 for run in study.trained)


def test_the_disk_of_the_7b_study_by_hand():
    """Weights in bf16 at every checkpoint, the state of 34 bytes a parameter where anneals leave.

    LAWA is kept where it is measured: at three steps of a parent, and at 83,921 and 95,842.
    """
    study = resolve("olmo2-7b-lr", "full")
    parameters, state = 7_298_617_344, 2 + 4 + 8 + 4 * 5
    # a control is saved half-way and at the end of its anneals: of two, the one's middle is the
    # other's end
    permanent = 4 * 18 + 7 * 8 + 2 + 3 * 3
    averages = 4 * 3 + 7 + 3 + 4 + 3  # the longer anneals save at the end of the shorter ones, too
    kept = (permanent - 4 + averages) * 2 + 4 * state
    needed = needed_bytes(study)
    assert needed["checkpoints"] == kept * parameters
    assert sum(needed.values()) <= 6e12
    assert restart_bytes(study, at_once=4) == 4 * 3 * state * parameters
    assert restart_bytes(study, at_once=1) + needed["checkpoints"] <= 6e12


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ({"full_steps": ()}, "branches at step 72000, of which lr3e-4 keeps weights only"),
        ({"average_steps": ()}, "lr3e-4 writes none there; add it to saving.average_steps"),
    ],
)
def test_a_study_that_needs_what_is_not_kept_is_refused(steps, reason):
    study = resolve("olmo2-7b-lr", "full")
    parent, *others = study.trained
    changed = parent.model_copy(update={"saving": parent.saving.model_copy(update=steps)})
    with pytest.raises(ValidationError, match=reason):
        Study.model_validate(dict(study) | {"runs": (changed, *others)})
