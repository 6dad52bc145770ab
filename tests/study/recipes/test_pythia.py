"""The recipes of Pythia against figures of the paper, and against each other."""

import pytest

from study.differences import Value
from study.recipes import resolve
from train.planning.memory import rank_memory
from train.run.config import RunConfig
from train.run.schedules import learning_rate

STEP = 524_288  # 256 x 2048 tokens
ENDS = (20_000, 54_000, 88_000, 122_000, 156_000, 190_000)  # landscape.py
RECIPES = (
    *("pythia-160m-lr", "pythia-160m-schedules", "pythia-160m-weight-decay", "pythia-160m-budgets"),
    *("pythia-160m-decay", "pythia-160m-lawa", "pythia-70m-kumar"),
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
        assert learning_rate(run, 1_900) == learning_rate(run, 171_000) == peak
        assert learning_rate(run, 180_500) == pytest.approx(peak / 2)  # half of 19,000
        assert learning_rate(run, 190_000) == 0
        assert run.save_steps[-2:] == (188_000, 190_000)  # the plane of the paper's landscape
        assert sum(step > 171_000 for step in run.save_steps) == 10
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
        assert content(cosine, "name", "schedule", "saving") == content(
            wsd, "name", "schedule", "saving"
        )
        assert learning_rate(cosine, 190_000) == pytest.approx(cosine.optimizer.peak_lr / 10)
        # a quarter of the way from the warm-up to the end: 0.1 + 0.9 (1 + cos(pi/4)) / 2 = 0.868198
        assert learning_rate(cosine, 1_900 + 188_100 // 4) == pytest.approx(
            0.868198 * cosine.optimizer.peak_lr
        )


@pytest.mark.parametrize("recipe", ["pythia-160m-budgets", "pythia-160m-lawa"])
def test_cooldowns_end_at_the_budgets(recipe):
    runs = runs_of(recipe)
    cooled = {name: run for name, run in runs.items() if run.branch_from}
    assert tuple(run.total_steps for run in cooled.values()) == ENDS
    assert list(cooled) == [
        "wsd-10.5b",
        "wsd-28.3b",
        "wsd-46.1b",
        "wsd-64b",
        "wsd-81.8b",
        "wsd-99.6b",
    ]
    for run in cooled.values():
        assert run.branch_from is not None
        assert run.branch_from.step == run.total_steps * 9 // 10
        assert len(run.save_steps) == 10
        assert learning_rate(run, run.total_steps) == 0
    # without an anneal to the last budget, and saved at all: the control of every cooldown
    assert runs["stable"].total_steps == 190_000
    assert set(ENDS) <= set(runs["stable"].save_steps)
    assert resolve(recipe, "full").controls == {"stable"}


def test_a_branch_is_the_single_run_cut_in_two():
    """The last cooldown of the budgets and the run of the sweep with that peak: the same rate at
    every step.
    """
    single = runs_of("pythia-160m-lr")["lr3e-3"]
    runs = runs_of("pythia-160m-budgets")
    for step in range(1, 190_001, 97):
        run = runs["stable"] if step <= 171_000 else runs["wsd-99.6b"]
        assert learning_rate(run, step) == learning_rate(single, step)


def test_averages_are_measured_where_cooldowns_end():
    study = resolve("pythia-160m-lawa", "full")
    for run in study.trained:
        averaged = [model.step for model in study.models_of(run) if model.average]
        assert averaged == ([] if run.branch_from else list(ENDS))
        for average in run.averages:
            assert average.name == "lawa5x500"


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
            decayed = [
                run.optimizer.decays(name)
                for name in (
                    *(
                        "gpt_neox.embed_in.weight",
                        "embed_out.weight",
                        "gpt_neox.layers.0.mlp.dense_4h_to_h.weight",
                    ),
                    *(
                        "gpt_neox.layers.0.mlp.dense_4h_to_h.bias",
                        "gpt_neox.layers.0.input_layernorm.weight",
                    ),
                    "gpt_neox.final_layer_norm.weight",
                )
            ]
            assert decayed == [True] * 3 + [False] * 3
            assert run.optimizer.z_loss == 0


@pytest.mark.parametrize(
    ("recipe", "gigabytes"),
    [("pythia-160m-lr", 40), ("pythia-160m-lawa", 40), ("pythia-70m-kumar", 31)],
)
def test_runs_fit_gpus_of_80_gb(recipe, gigabytes):
    for run in resolve(recipe, "full").trained:
        assert rank_memory(run, 8).bytes / 1e9 == pytest.approx(gigabytes, abs=1.5)
