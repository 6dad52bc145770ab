"""The recipes of Pythia against figures of the paper, and against each other."""

from itertools import pairwise

import pytest

from study.axes import Value
from study.recipes.resolve import resolve
from train.planning.memory import rank_memory
from train.run.config import RunConfig
from train.run.schedules import learning_rate

STEP = 524_288  # 256 x 2048 tokens
# Of the authors' landscape.py: the checkpoints of five cooldowns; of the sixth, which follows
# another plan of saving, the end. Their figure of budgets has the rates of all six.
LANDSCAPE = (
    (4_000, 8_000, 12_000, 14_000, 18_000, 20_000),
    (38_000, 42_000, 46_000, 48_000, 52_000, 54_000),
    (72_000, 76_000, 80_000, 82_000, 86_000, 88_000),
    (106_000, 110_000, 114_000, 116_000, 120_000, 122_000),
    (140_000, 144_000, 148_000, 150_000, 154_000, 156_000),
    (190_000,),
)
FALL_FROM = (1.1e9, 18.9e9, 36.7e9, 54.6e9, 72.4e9, 89.8e9)  # tokens, read off the figure
# The authors' figure of LAWA: the first and the last point of each cooldown, in tokens.
LAWA_COOLDOWNS = ((22e9, 41e9), (43e9, 62e9), (64e9, 83e9), (81e9, 100e9))
RECIPES = (
    *("pythia-160m-lr", "pythia-160m-schedules", "pythia-160m-weight-decay", "pythia-160m-budgets"),
    *("pythia-160m-decay", "pythia-160m-lawa", "pythia-70m-kumar"),
)


BLOCK = "gpt_neox.layers.0"
DECAYED = ("gpt_neox.embed_in.weight", "embed_out.weight", f"{BLOCK}.mlp.dense_4h_to_h.weight")
UNDECAYED = (
    *(f"{BLOCK}.mlp.dense_4h_to_h.bias", f"{BLOCK}.input_layernorm.weight"),
    "gpt_neox.final_layer_norm.weight",
)


def runs_of(recipe: str, profile: str = "full") -> dict[str, RunConfig]:
    """The runs of a recipe, less the controls that its design adds; tests of their own are there."""
    trained = resolve(recipe, profile).trained
    return {run.name: run for run in trained if not run.name.endswith("-control")}


def content(run: RunConfig, *without: str) -> dict:
    return {key: value for key, value in run.model_dump().items() if key not in without}


def test_the_learning_rates_under_wsd():
    runs = runs_of("pythia-160m-lr")
    assert [run.optimizer.peak_lr for run in runs.values()] == [3e-4, 1e-3, 3e-3, 1e-2]
    for run in runs.values():
        peak = run.optimizer.peak_lr
        assert run.tokens_per_step == STEP
        assert run.total_steps * STEP == pytest.approx(99.6e9, rel=1e-3)
        assert learning_rate(run, 950) == pytest.approx(peak / 2)  # warm-up of 1,900 steps
        # the authors' figure: from 80e9 to 100e9 tokens
        falls = [step for step in range(1_900, 190_001) if learning_rate(run, step) < peak]
        assert falls[0] * STEP == pytest.approx(80e9, rel=5e-3)
        assert learning_rate(run, 171_000) == pytest.approx(peak / 2)  # 89.7e9 tokens
        assert learning_rate(run, 190_000) == 0
        assert run.save_steps[-2:] == (188_000, 190_000)  # the plane of the paper's landscape
    _first, *others = (content(run, "name", "factors") | {"optimizer": 0} for run in runs.values())
    assert others == [_first] * 3


def test_weight_decay_alone_varies():
    runs = runs_of("pythia-160m-weight-decay")
    products = [3e-3 * run.optimizer.weight_decay for run in runs.values()]
    assert products == pytest.approx([3e-5, 9e-5, 3e-4, 9e-4, 3e-3])
    assert 0.1 in [run.optimizer.weight_decay for run in runs.values()]  # the paper's dashed line
    settings = [
        content(run, "name", "factors")
        | {"optimizer": run.optimizer.model_copy(update={"weight_decay": 0.0})}
        for run in runs.values()
    ]
    assert settings == [settings[0]] * 5


def test_the_rule_of_decay_alone_varies():
    runs = runs_of("pythia-160m-decay")
    assert list(runs) == ["adamw", "adamc"]
    settings = [run.model_dump(exclude={"name", "factors"}) for run in runs.values()]
    rules = [setting["optimizer"].pop("decay") for setting in settings]
    assert rules == list(runs)
    assert settings[0] == settings[1]


def test_schedules_share_all_but_the_way_down():
    runs = runs_of("pythia-160m-schedules")
    assert list(runs) == ["cosine-lr1e-3", "wsd-lr1e-3", "cosine-lr3e-3", "wsd-lr3e-3"]
    for peak in ("lr1e-3", "lr3e-3"):
        cosine, wsd = runs[f"cosine-{peak}"], runs[f"wsd-{peak}"]
        first, second = (content(run, "name", "schedule", "saving") for run in (cosine, wsd))
        assert first == second
        assert learning_rate(cosine, 190_000) == pytest.approx(cosine.optimizer.peak_lr / 10)
        # a quarter of the way from the warm-up to the end: 0.1 + 0.9 (1 + cos(pi/4)) / 2 = 0.868198
        rate = learning_rate(cosine, 1_900 + 188_100 // 4)
        assert rate == pytest.approx(0.868198 * cosine.optimizer.peak_lr)


def test_budgets_have_the_cooldowns_of_the_landscape():
    recipe = "pythia-160m-budgets"
    runs = runs_of(recipe)
    cooled = {name: run for name, run in runs.items() if run.branch_from}
    assert list(cooled) == [
        *("wsd-10.5b", "wsd-28.3b", "wsd-46.1b", "wsd-64b", "wsd-81.8b", "wsd-99.6b")
    ]
    for run, checkpoints, falls_from in zip(cooled.values(), LANDSCAPE, FALL_FROM, strict=True):
        assert run.branch_from is not None
        assert run.branch_from.step * STEP == pytest.approx(falls_from, abs=0.5e9)
        assert run.total_steps - run.branch_from.step == 18_000
        assert set(checkpoints) <= set(run.save_steps)
        assert run.total_steps == checkpoints[-1]
        assert learning_rate(run, run.total_steps - 9_000) == pytest.approx(1.5e-3)
        assert learning_rate(run, run.total_steps) == 0
    check_control_of_every_cooldown(recipe)


def test_lawa_has_the_cooldowns_of_its_figure():
    recipe = "pythia-160m-lawa"
    cooled = [run for run in runs_of(recipe).values() if run.branch_from]
    for run, (first, last) in zip(cooled, LAWA_COOLDOWNS, strict=True):
        assert run.save_steps[0] * STEP == pytest.approx(first, abs=0.6e9)
        assert run.total_tokens == pytest.approx(last, abs=0.6e9)
        assert learning_rate(run, run.total_steps) == 0
    check_control_of_every_cooldown(recipe)


def check_control_of_every_cooldown(recipe: str) -> None:
    """A run at the peak to the last budget, saved where each of the cooldowns ends."""
    runs = runs_of(recipe)
    assert runs["stable"].total_steps == 190_000
    ends = {run.total_steps for run in runs.values()}
    assert ends <= set(runs["stable"].save_steps)
    assert resolve(recipe, "full").controls == {"stable"}


def test_a_branch_is_the_single_run_cut_in_two():
    """The last cooldown beside LAWA and the run of the sweep with that peak: the same rate at
    every step.
    """
    single = runs_of("pythia-160m-lr")["lr3e-3"]
    runs = runs_of("pythia-160m-lawa")
    for step in range(1, 190_001, 97):
        run = runs["stable"] if step <= 152_000 else runs["wsd-99.6b"]
        assert learning_rate(run, step) == learning_rate(single, step)


def test_averages_are_a_curve_along_the_constant_rate():
    """Points from 8.4e9 tokens on, as in the paper's figure, and where each cooldown ends."""
    study = resolve("pythia-160m-lawa", "full")
    ends = {run.total_steps for run in study.trained}
    for run in study.trained:
        averaged = [model.step for model in study.models_of(run) if model.average]
        if run.branch_from:
            assert not averaged
            continue
        assert averaged[0] * STEP == pytest.approx(8.4e9, rel=1e-2)
        assert ends <= set(averaged)
        assert averaged == [step for step in run.save_steps if step >= averaged[0]]
        gaps = [later - earlier for earlier, later in pairwise(averaged)]
        assert max(gaps) * STEP < 4.3e9
        assert [average.name for average in run.averages] == ["lawa5x500"]


def test_the_replication_has_a_run_per_budget_and_schedule():
    study = resolve("pythia-70m-kumar", "full")
    runs = {run.name: run for run in study.trained}
    assert study.varied is not None
    lines: dict[str, list[Value]] = {}
    for name, group in study.varied.groups.items():
        lines.setdefault(group, []).append(study.varied.values[name])
    doubled = [steps * STEP for steps in (23_750, 47_500, 95_000, 190_000)]
    assert lines == {"cosine": doubled, "no anneal": [190_000 * STEP], "WSD": doubled}
    for name, run in runs.items():
        if name.startswith("cosine"):
            assert run.branch_from is None
            assert learning_rate(run, run.total_steps) == pytest.approx(3e-4)
        elif run.branch_from:
            assert run.total_steps - run.branch_from.step == 18_000  # whatever the budget
            assert learning_rate(run, run.total_steps) == 0
    hidden, layers = runs["stable"].model.hidden_size, runs["stable"].model.num_hidden_layers
    assert (hidden, layers) == (512, 6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_plainlms(recipe):
    """Biases and norms are not decayed, embeddings are, and there is no z-loss."""
    for profile in ("full", "smoke"):
        for run in runs_of(recipe, profile).values():
            assert run.engine == "deepspeed"
            assert run.model.family == "gpt_neox"
            assert all(map(run.optimizer.decays, DECAYED))
            assert not any(map(run.optimizer.decays, UNDECAYED))
            assert run.optimizer.z_loss == 0


@pytest.mark.parametrize(
    ("recipe", "gigabytes"),
    [("pythia-160m-lr", 18), ("pythia-160m-lawa", 18.2), ("pythia-70m-kumar", 9.2)],
)
def test_runs_fit_gpus_of_80_gb(recipe, gigabytes):
    for run in resolve(recipe, "full").trained:
        assert rank_memory(run, 8).bytes / 1e9 == pytest.approx(gigabytes, abs=0.3)
