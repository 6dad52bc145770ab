"""The axes of a study follow from its runs: what differs, how it is called, and the labels."""

import pyarrow as pa
import pytest

from base.errors import UserError
from base.frozen import fingerprint
from study.axes import amount_name, axes_of, text_of
from study.definition import Study
from study.design import control_among, with_controls, with_seeds
from study.recipes.parts import sweep, wsd_run
from study.recipes.resolve import resolve, whole_recipes
from study.results.table import axis_columns, schema_of
from study.tracking.described import run_params
from tests.present import present
from tests.study import factors
from tests.study.ablation import tiny
from tests.study.mine import MODEL, TEXT
from tests.study.synthetic import table_of, write_study
from train.data.config import RepetitionFilter
from train.run.config import RunConfig, StartFrom, with_settings
from train.run.schedules import learning_rate


def _runs(*settings: tuple[str, ...]) -> tuple[RunConfig, ...]:
    base = tiny().trained[0]
    return tuple(with_settings(base, list(each)) for each in settings)


def _grid(first: str, second: str) -> tuple[RunConfig, ...]:
    return _runs(*((f"{first}={a}", f"{second}={b}") for a in (1e-3, 1e-2) for b in (0, 0.1)))


def test_two_factors_are_two_axes():
    runs = _grid("optimizer.peak_lr", "optimizer.weight_decay")
    study = tiny().model_copy(update={"runs": runs})
    assert study.heading == "peak learning rate and weight decay"
    assert [study.label_of(run) for run in runs] == [
        "0.001, 0",
        "0.001, 0.1",
        "0.01, 0",
        "0.01, 0.1",
    ]
    peaks, decays = study.axes
    assert (peaks.key, peaks.scale) == ("peak_lr", "log")
    assert (decays.key, decays.scale) == ("weight_decay", "linear"), "0 has no place on a log axis"
    assert study.varied is not None
    assert study.varied.key == peaks.key
    assert list(study.varied.groups.values()) == ["0", "0.1", "0", "0.1"]


@pytest.mark.parametrize(
    ("settings", "keys", "labels"),
    [
        (("seed=1",), ["peak_lr"], ["0.001, seed 6198", "0.001, seed 1"]),
        (("engine=deepspeed",), ["engine"], ["megatron", "deepspeed"]),
        (("batch_size=32",), ["batch_size"], ["16", "32"]),
        (("optimizer.eps=1e-6",), ["eps"], ["1e-08", "1e-06"]),
        (("evaluate_every_steps=9",), ["peak_lr"], ["lr1e-3", "lr1e-3-evaluate_every_steps=9"]),
    ],
)
def test_what_differs_is_an_axis_and_the_rest_a_name(settings, keys, labels):
    study = tiny().model_copy(update={"runs": _runs((), settings)})
    assert [axis.key for axis in study.axes] == keys, "tokens follow from the batch"
    assert [study.label_of(run) for run in study.runs] == labels


def test_budgets_and_schedules_have_words():
    study = resolve("pythia-160m-budgets", "full")
    assert study.heading == "budget", "what anneals differs in its length alone"
    assert [study.label_of(run) for run in study.runs][:2] == ["constant rate", "10.5B"]
    big = resolve("olmo2-7b-lr", "full")
    axes = axes_of(big.runs, big.controls)
    assert text_of(axes, "lr6e-4-anneal100b") == "0.0006, 100B anneal"


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (50e9, "50b"),
        (28311552000, "28.3b"),
        (1907 * 524288, "1b"),  # 999.8M
        (999_499_999, "999m"),
        (999_950, "1m"),
        (999.9, "1k"),
        (999, "999"),
        (5.2e15, "5.2e+03t"),
        (0, "0"),
    ],
)
def test_amounts_are_rounded_before_their_unit_is_chosen(tokens, name):
    assert amount_name(tokens) == name


CORPORA = ["../../texts/web", "../../texts/code"]


@pytest.mark.parametrize(
    ("run", "values", "name", "labels"),
    [
        (factors.run, {"layers": [2, 4, 6]}, "layers", ["2", "4", "6"]),
        (factors.run, {"width": [64, 96]}, "width", ["64", "96"]),
        (factors.with_warmup, {"warmup_tokens": [0, 16384]}, "warm-up", ["0", "16.4K"]),
        (factors.with_optimizer, {"clip_grad_norm": [0.5, 1.0]}, None, ["0.5", "1"]),
        (factors.with_optimizer, {"z_loss": [0.0, 1e-4]}, "z-loss", ["0", "0.0001"]),
        (factors.with_data, {"sequence_length": [64, 128]}, "sequence length", ["64", "128"]),
        (factors.with_data, {"document_mask": [False, True]}, "document mask", ["no", "yes"]),
        (factors.with_data, {"order": ["olmo", "sequential"]}, "order", ["olmo", "sequential"]),
        (factors.with_corpus, {"corpus": CORPORA}, "corpus", ["web", "code"]),
        (
            factors.with_betas,
            {"betas": [(0.9, 0.95), (0.8, 0.99)]},
            "betas",
            ["(0.9, 0.95)", "(0.8, 0.99)"],
        ),
        (factors.with_limit, {"limit": [None, 8, 32]}, "limit", ["none", "8", "32"]),
        (
            factors.with_data,
            {"repetition_filter": [None, RepetitionFilter(max_count=8)]},
            "repetition filter",
            None,
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_swept_factor_is_an_axis_and_a_column_under_its_own_name(run, values, name, labels):
    ((key, swept),) = values.items()
    study = factors.of("own", sweep(run, **values), seeds=(1, 2))
    (axis,) = study.axes
    assert axis.key == key
    assert axis.name == study.heading == (name or "clipping of the gradient norm")
    groups = [group.label for group in study.groups if not group.label.endswith("no anneal")]
    assert len(set(groups)) == len(swept)
    assert labels in (None, groups)
    are_numbers = {type(value) for value in swept} <= {int, float}
    assert axis.scale == (("log" if min(swept) > 0 else "linear") if are_numbers else "category")
    varied = present(study.varied)
    assert varied.key == key
    assert varied.values.keys() == {run.name for run in study.runs}
    field = schema_of(study).field(key)
    assert field.metadata[b"unit"].decode() == axis.unit
    assert run_params(study, study.runs[0])[key] == str(axis.values[study.runs[0].name])


def test_the_table_holds_the_factors_of_every_run(tmp_path):
    """A control that runs of several values share has none."""
    study = factors.of("own", sweep(factors.with_start, start=[32, 48]))
    rows = table_of(write_study(tmp_path / "own", study), study)
    starts = {row["run"]: row["start"] for row in rows}
    assert starts == {"start32": 32, "start32-control": None, "start48": 48}
    assert schema_of(study).field("start").type == pa.int64()
    words = factors.of("words", sweep(factors.with_data, order=["olmo", "sequential"]))
    rows = table_of(write_study(tmp_path / "words", words), words)
    assert {row["run"]: row["order"] for row in rows} == {
        **dict.fromkeys(("olmo", "olmo-control"), "olmo"),
        **dict.fromkeys(("sequential", "sequential-control"), "sequential"),
    }


def test_two_swept_factors_are_two_axes_in_their_order():
    study = factors.of("own", sweep(factors.run, layers=[2, 4], weight_decay=[0.0, 0.1]))
    assert study.heading == "layers and weight decay"
    assert [group.label for group in study.groups][::2] == ["2, 0", "2, 0.1", "4, 0", "4, 0.1"]
    assert present(study.varied).key == "layers"
    assert study.runs[0].name == "layers2-wd0"


def test_settings_that_differ_are_axes_without_a_sweep():
    deep = factors.of("own", [factors.run(f"deep{count}", layers=count) for count in (2, 4)])
    assert (deep.heading, deep.axes[0].key) == ("layers", "num_hidden_layers")
    wide = factors.of("own", [factors.run("slim", width=64), factors.run("wide", width=96)])
    assert [axis.name for axis in wide.axes] == ["width"], "that of the MLP follows from it"
    both = [factors.with_corpus("a", corpus) for corpus in CORPORA]
    named = [run.model_copy(update={"name": f"run{number}"}) for number, run in enumerate(both)]
    data = factors.of("own", named)
    assert (data.heading, data.groups[0].label) == ("training data", "web")
    confounded = [
        factors.run("a", layers=2, peak_lr=1e-2),
        factors.run("b", layers=4, peak_lr=3e-3),
    ]
    assert factors.of("own", confounded).heading == "peak learning rate and layers"


def test_a_factor_named_like_another_quantity_keeps_its_own_values():
    """A word of the user's for something else, and one that the table has for the checkpoint."""

    def run(name, decay):
        return factors.run(name, weight_decay=decay / 10)

    (axis,) = factors.of("own", sweep(run, decay=[1, 2])).axes
    assert (axis.key, axis.name, set(axis.values.values())) == ("swept_decay", "decay", {1, 2})

    def of_step(name, step):
        return factors.run(name, layers=step)

    study = factors.of("own", sweep(of_step, step=[2, 4]))
    assert list(axis_columns(study)) == ["factor_step"]


def test_anneals_from_several_steps_by_a_sweep_share_a_control():
    """Before 64 they are the same run at a constant rate: one control is saved where they end."""
    study = factors.of("own", sweep(factors.with_start, start=[32, 48]))
    assert [run.name for run in study.runs] == ["start32", "start32-control", "start48"]
    assert {
        present(study.control_of(run)).name for run in study.trained if run.schedule.anneal
    } == {"start32-control"}
    assert [group.label for group in study.groups] == ["32", "no anneal", "48"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("optimizer.peak_lr=1e6",), "with optimizer.peak_lr=1e6 runs lr6e-3-seed1 and lr7.2e-2"),
        (("seed=1",), "with seed=1 runs lr6e-3-seed1 and lr6e-3-seed2 are the same training"),
    ],
)
def test_runs_that_became_the_same_are_named_with_what_made_them_so(settings, words):
    with pytest.raises(UserError, match=words) as refused:
        resolve("tiny", "full", settings)
    assert "\n" not in str(refused.value)
    twice = [factors.run("a"), factors.run("b")]
    with pytest.raises(ValueError, match=r"a and b are the same training.*parts\.annealed"):
        factors.of("own", twice)


def runs() -> list[RunConfig]:
    """Two peaks."""

    def run(name, peak_lr):
        return wsd_run(name, model=MODEL, text=TEXT, steps=40, peak_lr=peak_lr)

    return sweep(run, peak_lr=[3e-3, 1e-2])


@pytest.mark.parametrize("profile", ["full", "smoke"])
@pytest.mark.parametrize("recipe", whole_recipes())
def test_every_anneal_has_a_control_of_equal_tokens(recipe, profile):
    """The rate of both is the same up to the anneal; then one falls to its floor and the other does not."""
    study = resolve(recipe, profile)
    annealed = [run for run in study.trained if run.schedule.anneal]
    for run in annealed:
        control = study.control_of(run)
        assert control is not None
        assert run.total_steps in control.save_steps
        assert control.seed == run.seed
        assert run.schedule.anneal is not None
        start = run.schedule.anneal.start_step
        first = control.branch_from.step if control.branch_from else 0
        for step in range(max(first, 1), start + 1, 1 + start // 50):
            assert learning_rate(control, step) == learning_rate(run, step)
        end = learning_rate(run, run.total_steps)
        assert end == pytest.approx(run.schedule.anneal.floor * learning_rate(run, start))
        assert learning_rate(control, run.total_steps) > end
    assert len(study.controls) <= len(annealed)


def test_a_control_branches_off_where_the_anneal_starts():
    first, second = runs()
    assert [run.name for run in with_controls([first, second])] == [
        "lr3e-3",
        "lr3e-3-control",
        "lr1e-2",
        "lr1e-2-control",
    ]
    control = with_controls([first])[1]
    assert first.save_steps == (10, 20, 30, 40)
    assert control.branch_from is not None
    assert control.branch_from.model_dump() == {
        "run": "../lr3e-3",
        "step": 30,
        "fingerprint": fingerprint(first),
    }
    assert control.save_steps == (40,)
    assert control_among([first, second, control], first) == control
    assert control_among([first, second, control], second) is None
    assert with_controls(with_controls([first, second])) == with_controls([first, second])


def test_a_run_from_imported_weights_has_a_control_too():
    """The control branches off the run, and so has the run's beginning, not one of its own."""
    first, _ = runs()
    imported = StartFrom(checkpoint="/imported", sha256="0" * 64)
    started = RunConfig.model_validate(dict(first) | {"start_from": imported})
    started, control = with_controls([started])
    assert control.branch_from
    assert control.start_from is None
    assert control.branch_from.fingerprint == fingerprint(started)
    assert control_among([started, control], started) == control


def test_a_run_that_saves_nothing_where_its_anneal_starts_has_no_control():
    (first, _) = runs()
    changed = first.model_copy(update={"save_steps": (10, 40)})
    with pytest.raises(ValueError, match="add 30 to save_steps"):
        with_controls([changed])


def test_replicates_differ_in_their_seed_and_their_parents():
    three = with_seeds(with_controls(runs()), (1, 2, 3))
    assert len(three) == 3 * 4
    names = {run.name: run for run in three}
    for name, run in names.items():
        assert run.seed == int(name[-1])
        if run.branch_from:
            parent = names[run.branch_from.run.removeprefix("../")]
            assert parent.seed == run.seed
            assert run.branch_from.fingerprint == fingerprint(parent)
    plain = {
        run.model_copy(update={"name": "", "seed": 0, "branch_from": None}).model_dump_json()
        for run in three
    }
    assert len(plain) == 4


def test_labels_say_the_control_and_the_seed():
    content = resolve("pythia-160m-lr", "smoke").model_dump()
    content |= {"text": TEXT.model_dump(), "planes": []}
    content["runs"] = [run.model_dump() for run in with_seeds(with_controls(runs()), (1, 2))]
    study = Study.model_validate(content)
    assert [group.label for group in study.groups] == [
        "0.003",
        "0.003, no anneal",
        "0.01",
        "0.01, no anneal",
    ]
    assert [study.label_of(run) for run in study.groups[1].runs] == [
        "0.003, no anneal, seed 1",
        "0.003, no anneal, seed 2",
    ]
    assert [axis.key for axis in study.axes] == ["peak_lr"]
