"""Controls and replicates, against what a reader would write down for each run."""

import pytest

from base.frozen import fingerprint
from dynamics.recipes import RECIPES, resolve
from dynamics.recipes.parts import sweep, wsd_run
from study.definition import Study
from study.design import control_among, with_controls, with_seeds
from tests.dynamics.recipes.mine import MODEL, TEXT
from train.run.config import RunConfig, StartFrom
from train.run.schedules import learning_rate


def runs(**values):
    def run(name, **factors):
        return wsd_run(name, model=MODEL, text=TEXT, steps=40, **factors)

    return sweep(run, **({"peak_lr": [3e-3, 1e-2]} | values))


@pytest.mark.parametrize("profile", ["full", "smoke"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_anneal_has_a_control_of_equal_tokens(recipe, profile):
    """The rate of both is the same up to the anneal; then one falls to 0 and the other does not."""
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
        assert learning_rate(run, run.total_steps) == 0
        assert learning_rate(control, run.total_steps) > 0
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
    content["text"] = TEXT.model_dump()
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
