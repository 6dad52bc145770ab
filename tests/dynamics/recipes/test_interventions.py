"""Arms at equal tokens: they differ in the anneal alone, and each finds what it is compared with."""

import json
from typing import Any

import pytest

from base.errors import UserError
from study.definition import Study
from study.design import Group, unperturbed_among, with_controls, with_seeds
from study.recipes.parts import wsd_run
from study.recipes.resolve import resolve
from study.results.averages import averagings_of
from study.results.table import axis_columns
from study.tracking.described import run_params
from tests.study.mine import MODEL, TEXT
from train.run.config import RunConfig
from train.run.perturbation import Noise, Qat, Sam
from train.run.schedules import learning_rate

RECIPES = [f"{size}-interventions" for size in ("tiny", "olmo2-30m", "olmo2-190m", "olmo2-1b")]
QAT = '{"kind":"qat","spec":"rtn-b3-g32"}'


def first_seed(study: Study) -> dict[str, RunConfig]:
    """The runs by name, of the first seed where there are several."""
    seed = study.trained[0].seed
    return {run.name.removesuffix(f"-seed{seed}"): run for run in study.trained if run.seed == seed}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("profile", ["full", "smoke"])
def test_arms_are_the_control_up_to_their_anneal_and_end_where_it_ends(name, profile):
    runs = first_seed(resolve(name, profile))
    stable = runs.pop("stable")
    rate, end = stable.optimizer.peak_lr, stable.total_steps
    assert learning_rate(stable, end) == rate
    for run in runs.values():
        assert run.branch_from is not None
        assert run.schedule.anneal is not None
        start = run.branch_from.step
        assert run.branch_from.run.startswith("../stable")
        assert (run.schedule.anneal.start_step, run.total_steps) == (start, end)
        assert start in stable.save_steps
        assert (run.data, run.seed, run.batch_size) == (stable.data, stable.seed, stable.batch_size)
        # What is changed begins with the fall of the rate.
        assert learning_rate(run, start) == rate > learning_rate(run, start + 1)
        assert not run.perturbed_at(start)
        assert run.perturbed_at(start + 1) == run.perturbed_at(end) == bool(run.perturbation)
        floor = 0.1 if run.name.split("-seed")[0].endswith("floor10") else 0.0
        assert learning_rate(run, end) == pytest.approx(floor * rate, abs=1e-12)


@pytest.mark.parametrize("name", RECIPES)
def test_lengths_and_what_is_changed(name):
    study = resolve(name)
    runs = first_seed(study)
    shares = {
        arm: round(100 * (1 - run.branch_from.step / run.total_steps))
        for arm, run in runs.items()
        if run.branch_from and not run.perturbation
    }
    assert shares == {
        "anneal10": 10, "anneal20": 20, "anneal33": 33, "anneal50": 50, "anneal20-floor10": 20,
    }  # fmt: skip
    group = 32 if name.startswith("tiny") else 128
    specs = (f"rtn-b3-g{group}", f"rtn-b4-g{group}")
    changed = {arm: run.perturbation for arm, run in runs.items() if run.perturbation}
    bits = ("qat2",) if name.startswith("tiny") else ()
    names = (*bits, "qat3", "qat4", "noise3", "sam")
    assert list(changed) == [f"anneal20-{arm}" for arm in names]
    first, second, noise, sam = list(changed.values())[-4:]
    assert (first, second, noise) == (Qat(spec=specs[0]), Qat(spec=specs[1]), Noise(spec=specs[0]))
    assert sam == Sam(rho=0.05)
    # What QAT rounds to is what is measured.
    assert set(specs) <= set(study.quantization.specs)


@pytest.mark.parametrize("name", RECIPES)
def test_every_arm_finds_its_control_and_the_same_run_without_its_perturbation(name):
    study = resolve(name)
    for run in study.trained:
        seed = f"-seed{run.seed}" if len(first_seed(study)) < len(study.trained) else ""
        control, unperturbed = study.control_of(run), study.unperturbed_of(run)
        assert (control and control.name) == (f"stable{seed}" if run.schedule.anneal else None)
        assert (unperturbed and unperturbed.name) == (
            f"anneal20{seed}" if run.perturbation else None
        )
    assert study.controls == {run.name for run in study.trained if not run.schedule.anneal}


def test_labels_columns_and_parameters_name_the_arms():
    study = resolve("tiny-interventions")
    assert [group.label for group in study.groups] == [
        "no anneal",
        "anneal 10%",
        "anneal 20%",
        "anneal 33%",
        "anneal 50%",
        "anneal 20%, QAT rtn-b2-g32",
        "anneal 20%, QAT rtn-b3-g32",
        "anneal 20%, QAT rtn-b4-g32",
        "anneal 20%, gaussian noise of rtn-b3-g32",
        "anneal 20%, SAM rho 0.05",
        "anneal 20%, floor 10%",
    ]
    assert all(isinstance(group, Group) and len(group.runs) == 3 for group in study.groups)
    assert list(axis_columns(study)) == ["anneal_share", "floor", "perturbation"]
    params = run_params(study, first_seed(study)["anneal20-qat3"])
    assert params["perturbation"] == "QAT rtn-b3-g32"
    assert float(params["anneal_share"]) == 20
    assert run_params(study, study.trained[0])["perturbation"] == "none"


def test_averages_are_of_the_constant_rate_and_of_qat():
    """A window is within one phase."""
    study = resolve("tiny-interventions")
    kept = {
        arm: [model.average for model in study.models_of(run) if model.average]
        for arm, run in first_seed(study).items()
    }
    lawa, ema, soup = (average.name for average in averagings_of(study))
    assert (lawa, ema) == ("lawa5x25", "ema0.98x1")
    with_lawa = ("anneal20", *(f"anneal20-qat{bits}" for bits in (2, 3, 4)))
    assert {arm: names for arm, names in kept.items() if names} == {
        "stable": [lawa, ema, soup],
        **{arm: [lawa] for arm in with_lawa},
    }
    # 4 x 25 steps back from the end, the anneal starts 200 before it
    (members,) = (each.steps for each in study.soups)
    assert members == (800, 867, 933, 1000)


def test_a_control_has_no_perturbation_that_begins_with_the_anneal():
    def run(name: str, **settings: Any) -> RunConfig:
        return wsd_run(name, model=MODEL, text=TEXT, steps=40, peak_lr=1e-2, **settings)

    qat = run("qat", perturbation=Qat(spec="rtn-b3-g32"))
    _, control = with_controls([qat])
    assert (control.schedule.anneal, control.perturbation) == (None, None)
    # One that begins before is of the control as well: the anneal alone is left out.
    early = Qat(spec="rtn-b3-g32", from_step=5)
    _, control = with_controls([run("early", perturbation=early)])
    assert control.perturbation == early
    # One control is enough for a run and the same with QAT in its anneal.
    plain, other, control = with_controls([run("plain"), qat])
    assert (other.name, control.name) == ("qat", "plain-control")
    assert unperturbed_among([plain, control, other], qat) == plain
    assert unperturbed_among([control, other], qat) is None
    assert unperturbed_among([plain], plain) is None
    seeded = with_seeds([plain, qat], (1, 2))
    assert unperturbed_among(seeded, seeded[3]) == seeded[2]


def test_a_perturbation_that_is_set_is_of_the_runs_that_anneal():
    study = resolve("tiny", "smoke", (f"perturbation={QAT}",))
    for run in study.trained:
        spec = run.perturbation.spec if isinstance(run.perturbation, Qat) else None
        assert spec == ("rtn-b3-g32" if run.schedule.anneal else None)
    assert len(study.controls) == 2, "an anneal has its control"
    # From a step on it is of all runs, as any other setting.
    early = json.dumps(json.loads(QAT) | {"from_step": 8})
    study = resolve("tiny", "smoke", (f"perturbation={early}",))
    assert all(run.perturbation for run in study.trained)
    with pytest.raises(UserError, match=r"there is none; set perturbation\.from_step"):
        resolve("tiny", "smoke", ("schedule.anneal=null", f"perturbation={QAT}"))
    with pytest.raises(UserError, match="no such setting"):
        resolve("tiny", "smoke", ("perturbation.spec=rtn-b4-g32",))
