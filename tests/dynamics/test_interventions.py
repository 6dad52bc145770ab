"""Verdicts on training at changed weights, convergence and outliers, where the truth is planted."""

import math
import re
import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest

from dynamics.claims.convergence import convergence, has_warmdowns
from dynamics.claims.data import budgets
from dynamics.claims.interventions import has_arms, interventions, qat_averages, widths
from dynamics.claims.outliers import OUTLIERS, outliers
from dynamics.mechanism.correlation import advantage
from study.claims.page import judge_all
from study.claims.verdict import Evidence, Verdict
from study.design import unperturbed_among
from study.measurements.quantization import R_L
from study.recipes.parts import annealed
from study.results.paired import Paired
from tests.present import present
from tests.study.claimed import SPEC, rows_of, run_of, study_of
from train.run.optimization import Lawa
from train.run.perturbation import Noise, Qat, Sam

YES, NO, OPEN, NONE = "supported", "contradicted", "not decided", "not tested"
SEEDS = (1, 2, 3)
START, END = 320, 400
SAVES = (160, 320, 360, 400)
ARMS = {
    "plain": None,
    "qat": Qat(spec="rtn-b3-g32"),
    "qat4": Qat(spec="rtn-b4-g32"),
    "noise": Noise(spec="rtn-b3-g32"),
    "sam": Sam(rho=0.05),
}


def arms(*names: str, **changes):
    """Anneals of every seed, with these perturbations and without."""
    return study_of(
        *(
            run_of(f"{name}-{seed}", seed=seed, perturbation=ARMS[name], save_steps=SAVES)
            for name in ("plain", *names)
            for seed in SEEDS
        ),
        controls=False,
        **changes,
    )


def name_of(run) -> str:
    return run.name.partition("-")[0]


def scatter(run, model, size: float, draw: int = 0) -> float:
    """A normal number that another training, or another draw, does not have."""
    key = f"{run.name}/{model.step}/{model.average}/{draw}"
    return size * np.random.default_rng(zlib.crc32(key.encode())).normal()


def loss_of(run, model, costs: float = 0.05) -> float:
    """Falls in the anneal; a perturbation leaves it higher, by some nats."""
    progress = max(0, model.step - START) / (END - START)
    is_changed = run.perturbation and model.step > START
    return 4 - 0.1 * math.log2(model.step / 160) - 0.3 * progress + costs * bool(is_changed)


def error_of(run, model, factors: dict[str, float], draw: int = 0) -> float:
    """Log-linear in the loss, the same for all runs, times the factor of a perturbed arm.

    A seed has 1% of its own.
    """
    factor = factors.get(name_of(run), 1.0) if model.step > START else 1.0
    size = 0.02 * math.exp(-1.5 * (loss_of(run, model) - 4))
    return size * factor * math.exp(scatter(run, model, 0.01, draw))


def judged(tmp_path, study, claim, error, loss=loss_of) -> list[Verdict]:
    rows = rows_of(tmp_path, study, error, loss=loss)
    return claim.judge(Evidence(study, rows, Paired(tmp_path)))


@pytest.mark.parametrize(
    ("factor", "expected"), [(0.8, YES), (1.25, NO), (1.0, OPEN)], ids=["less", "more", "the same"]
)
def test_an_intervention_is_judged_at_equal_loss(tmp_path, factor, expected):
    """An arm of the same error at equal loss has 7% less at its end, where its loss is higher."""
    study = arms("sam")
    verdict, *_ = judged(tmp_path, study, interventions, partial(error_of, factors={"sam": factor}))
    assert verdict.outcome == expected
    assert "arm minus control at equal loss" in verdict.statistic
    assert verdict.measure.startswith("loss increase")
    # At the arm's end the loss is 3.618.
    at = 4 - 0.1 * math.log2(END / 160) - 0.25
    planted = at * 0.02 * math.exp(-1.5 * (at - 4)) * (factor - 1)
    assert float(verdict.effect.split()[0]) == pytest.approx(1000 * planted, abs=2)


def test_an_arm_that_shows_nothing_speaks_against_the_mean_of_all(tmp_path):
    """QAT takes half of the error, noise nothing: their mean is significant, noise is not."""
    study = arms("qat", "noise")
    verdict, *_ = judged(
        tmp_path, study, interventions, partial(error_of, factors={"qat": 0.5, "noise": 0.999})
    )
    assert verdict.outcome == YES
    assert verdict.against.count("not significant by itself") == 1
    assert "noise of rtn-b3-g32: not significant by itself, -" in verdict.against
    assert verdict.why == "", "it speaks against"


def test_errors_below_zero_are_compared_at_equal_loss(tmp_path):
    """QAT may make the quantized model better than the exact one: against plain interpolation."""
    study = arms("qat")

    def error(run, model) -> float:
        is_perturbed = name_of(run) == "qat" and model.step > START
        return error_of(run, model, {}) - 0.05 * is_perturbed

    rows = rows_of(tmp_path, study, error, loss=loss_of)
    increases = {(row["run"], row["step"]): row[f"quant/{SPEC}/absolute_error"] for row in rows}
    qat, plain = (
        next(run for run in study.trained if name_of(run) == name) for name in ("qat", "plain")
    )
    models = {model.step: model for model in study.models_of(qat)}
    at = loss_of(qat, models[END])
    expected = []
    for seed in SEEDS:
        assert increases[f"qat-{seed}", END] < 0
        of_control = np.interp(
            at,
            [loss_of(plain, models[step]) for step in (END, 360)],
            [increases[f"plain-{seed}", step] for step in (END, 360)],
        )
        expected.append(increases[f"qat-{seed}", END] - of_control)
    verdict, *_ = interventions.judge(Evidence(study, rows, Paired(tmp_path)))
    assert verdict.outcome == YES
    assert float(verdict.effect.split()[0]) == pytest.approx(1000 * np.mean(expected), rel=1e-2)


def test_an_arm_without_an_anneal_is_compared_with_a_longer_run_that_others_leave(tmp_path):
    """No update after the end of the arm counts, where its control has tiny errors."""
    template, saves = run_of("template"), (160, 320, 360, 400, 800)
    constant = template.schedule.model_copy(update={"anneal": None})
    runs = []
    for seed in SEEDS:
        settings: dict[str, Any] = {"seed": seed, "schedule": constant}
        plain = run_of(f"plain-{seed}", total=800, save_steps=saves, **settings)
        sam = Sam(rho=0.05, from_step=START + 1)
        arm = run_of(f"sam-{seed}", perturbation=sam, save_steps=saves[:-1], **settings)
        runs += [plain, arm, annealed(plain, f"later-{seed}", start=END, save_steps=(800,))]

    def error(run, model) -> float:
        return 1e-4 if model.step > END else error_of(run, model, {"sam": 0.8})

    # The arm's loss is the lower one: its control gets there after the arm's end alone.
    loss = partial(loss_of, costs=-0.05)
    study = study_of(*runs, controls=False)
    verdict, *_ = judged(tmp_path, study, interventions, error, loss)
    assert (verdict.outcome, verdict.runs) == (YES, "1 of 1 lower")
    assert "without a control" not in verdict.statistic


def test_kinds_of_intervention_are_judged_apart(tmp_path):
    study = arms("qat", "noise", "sam")
    factors = {"qat": 0.7, "noise": 1.0, "sam": 1.2}
    verdicts = judged(tmp_path, study, interventions, partial(error_of, factors=factors))
    outcomes = {verdict.measure.partition(":")[0]: verdict.outcome for verdict in verdicts[2:]}
    assert outcomes == {"QAT": YES, "noise": OPEN, "SAM": NO}
    assert verdicts[0].outcome == OPEN  # one of them is significantly the other way
    assert verdicts[0].runs.startswith(("1 of 3", "2 of 3"))


def test_an_arm_that_costs_more_loss_than_the_anneal_gains_is_left_out(tmp_path):
    study = arms("sam", "noise")
    error = partial(error_of, factors={"noise": 0.7})
    loss = lambda run, model: loss_of(run, model, 0.5 if name_of(run) == "sam" else 0.05)  # noqa: E731
    verdict, *_ = judged(tmp_path, study, interventions, error, loss)
    assert verdict.outcome == YES
    assert "left out: " in verdict.statistic
    assert re.search(r"is 3\.9000 nats per token, and sam-1 passes it before", verdict.statistic)


@pytest.mark.parametrize(("factor", "expected"), [(0.8, YES), (1.25, NO), (1.0, OPEN)])
def test_qat_at_another_width(tmp_path, factor, expected):
    """At 3 bits QAT for 4 bits is of another width, and QAT for 3 bits is not asked about."""
    study = arms("qat", "qat4")
    error = partial(error_of, factors={"qat": 0.5, "qat4": factor})
    verdict, *_ = judged(tmp_path, study, widths, error)
    assert (verdict.outcome, verdict.runs[:4]) == (expected, "1 of")
    (own, *_) = judged(tmp_path / "own", study, interventions, error)
    assert own.outcome == YES
    assert own.runs == "1 of 1 lower"


SOUP = {"name": "soup", "steps": (360, 400)}


def averaged(run, model, factors: dict[str, float]) -> float:
    """The error of weights, and of averages by the factor of their own."""
    name = f"{name_of(run)} average" if model.average else name_of(run)
    return 0.02 * factors.get(name, 1.0) * math.exp(scatter(run, model, 0.01))


@pytest.mark.parametrize(
    ("average", "control", "expected"),
    [(1.0, 1.0, YES), (0.4, 1.0, NO), (0.6, 1.2, NO), (0.5, 1.0, OPEN)],
    ids=["undone", "better still", "less than without QAT", "as the last weights"],
)
def test_averages_after_qat(tmp_path, average, control, expected):
    study = arms("qat", soups=[SOUP])
    factors = {"qat": 0.5, "qat average": average, "plain average": control}
    verdict, *_ = judged(tmp_path, study, qat_averages, partial(averaged, factors=factors))
    assert verdict.outcome == expected
    assert verdict.measure.startswith("soup of steps 360 and 400: loss increase")
    assert "QAT minus control: weights -" in verdict.statistic


def test_averages_of_weights_before_qat_are_no_test_of_it(tmp_path):
    study = arms("qat", soups=[SOUP | {"steps": (320, 400)}])
    assert judged(tmp_path, study, qat_averages, partial(averaged, factors={})) == []
    # weights of steps 320 to 400, and to 384
    for lawa in (Lawa(interval_steps=20, window=5), Lawa(interval_steps=32, window=3)):
        runs = [run.model_copy(update={"averages": (lawa,)}) for run in study.trained]
        kept = study_of(*runs, controls=False, averaged_steps=(END,))
        assert judged(tmp_path / lawa.name, kept, qat_averages, partial(averaged, factors={})) == []


SHARES = study_of(
    *(
        run_of(
            f"from{start}-{seed}",
            seed=seed,
            start=start,
            save_steps=(40, 80, 160, 240, 320, 360, END),
        )
        for start in (160, 240)
        for seed in SEEDS
    )
)


def decay_of(run, model) -> float:
    """Progress of the anneal, from 0 to 1."""
    anneal = run.schedule.anneal
    return max(0, model.step - anneal.start_step) / (END - anneal.start_step) if anneal else 0.0


def warmed_down(run, model, per_doubling: float = 0.1) -> float:
    return 4 - per_doubling * math.log2(model.step / 40) - 0.4 * decay_of(run, model)


def by_decay(run, model) -> float:
    return 0.02 * (1 + 2 * decay_of(run, model)) * math.exp(scatter(run, model, 0.01))


def by_updates(run, model) -> float:
    """Rises with the updates at the constant rate, and with none of the anneal."""
    anneal = run.schedule.anneal
    constant = min(model.step, anneal.start_step) if anneal else model.step
    return 0.02 * (constant / 40) ** 0.5 * math.exp(scatter(run, model, 0.01))


def by_loss(run, model) -> float:
    """A draw of the scatter that is not decided: of 24 draws one was, which fits 5%."""
    size = 0.02 * math.exp(-2 * (warmed_down(run, model) - 4))
    return size * math.exp(scatter(run, model, 0.01, draw=1))


@pytest.mark.parametrize(
    ("error", "expected"),
    [(by_updates, YES), (by_decay, NO), (by_loss, OPEN)],
    ids=["updates", "decay", "loss"],
)
def test_decay_and_convergence_part_at_equal_loss(tmp_path, error, expected):
    verdicts = judged(tmp_path, SHARES, convergence, error, warmed_down)
    assert verdicts[0].outcome == expected
    # The constant rate lowers the loss by 2.5% with every doubling: it has not converged.
    assert verdicts[2].outcome == NONE
    assert "has not converged" in verdicts[2].statistic


@pytest.mark.parametrize(("error", "expected"), [(by_updates, YES), (by_decay, OPEN)])
def test_the_error_along_a_converged_constant_rate(tmp_path, error, expected):
    loss = partial(warmed_down, per_doubling=0.01)
    verdicts = judged(tmp_path, SHARES, convergence, error, loss)
    assert verdicts[2].measure.endswith("constant after convergence")
    assert verdicts[2].outcome == expected


def test_anneals_of_several_lengths_that_end_together_are_no_budgets(tmp_path):
    verdicts = judged(tmp_path, SHARES, budgets, by_decay, warmed_down)
    assert {verdict.outcome for verdict in verdicts} == {NONE}
    assert "differ in their length alone" in verdicts[0].statistic


def planted(target: str, noise: float = 0.3):
    """Rows of ten trainings in which one statistic follows the error, and the others do not."""
    study = study_of(*(run_of(f"r{seed}", seed=seed) for seed in range(10)), controls=False)
    generator, rows = np.random.default_rng(3), []
    for run in study.trained:
        for step in run.save_steps:
            error = math.exp(generator.normal())
            row: dict[str, Any] = {"run": run.name, "average": None, "step": step}
            row |= {"phase": "stable"}
            row |= {"tokens": step, f"quant/{SPEC}/kl_divergence": error}
            for column in (R_L, *OUTLIERS):
                name = column.of(SPEC)
                follows = target in name
                row[name] = generator.normal() + (math.log(error) / noise if follows else 0)
            rows.append(row)
    return study, rows


@pytest.mark.parametrize(
    ("target", "expected"), [("r_l", YES), ("weight_kurtosis", NO), ("nothing", OPEN)]
)
def test_r_l_and_outliers_are_compared_by_rank(tmp_path, target, expected):
    study, rows = planted(target)
    over_ends, within = outliers.judge(Evidence(study, rows, Paired(tmp_path)))
    assert over_ends.measure.endswith("over ends of training")
    assert within.outcome == expected
    assert over_ends.outcome in {expected, OPEN}  # ten ends say less than fifty checkpoints
    assert "near to a definition" in within.against


def test_statistics_that_are_not_measured_are_no_evidence(tmp_path):
    study, rows = planted("r_l")
    for row in rows:
        row[OUTLIERS[0].name] = None
    verdicts = outliers.judge(Evidence(study, rows, Paired(tmp_path)))
    assert {verdict.outcome for verdict in verdicts} == {NONE}


def test_claims_that_a_study_is_not_about_are_not_listed(tmp_path):
    plain = study_of(run_of("plain"))
    listed = {claim.name for claim, _ in judge_all(plain, [], Paired(tmp_path))}
    asked = {claim.name for claim in (interventions, widths, qat_averages, convergence, outliers)}
    assert not listed & asked
    assert "surge" in listed
    study = arms("qat", "sam")
    assert {"interventions", "widths", "qat-averages"} <= {
        claim.name for claim, _ in judge_all(study, [], Paired(tmp_path))
    }
    assert has_arms(study)
    assert has_warmdowns(SHARES)
    assert not has_warmdowns(plain)


def test_an_arm_without_its_control_is_named(tmp_path):
    study = arms("qat", "sam")
    study = study_of(*(run for run in study.trained if run.name != "plain-3"), controls=False)
    error = partial(error_of, factors={"qat": 0.5, "sam": 0.6})
    verdict, *_ = judged(tmp_path, study, interventions, error)
    assert (verdict.outcome, verdict.runs) == (YES, "2 of 2 lower")
    assert "without a control: " in verdict.statistic
    alone = study_of(*(run for run in study.trained if name_of(run) == "sam"), controls=False)
    assert judged(tmp_path / "alone", alone, interventions, error) == []


def test_perturbed_anneals_say_nothing_of_the_decay(tmp_path):
    study = arms("qat")
    rows = rows_of(tmp_path, study, partial(error_of, factors={}), loss=loss_of)
    evidence = Evidence(study, rows, Paired(tmp_path))
    assert {name_of(end.run) for end in evidence.annealed} == {"plain"}


def test_the_same_run_without_its_perturbation():
    plain, qat = (
        run_of(name, save_steps=SAVES, perturbation=ARMS[name]) for name in ("plain", "qat")
    )
    other = run_of("other", peak=2e-3, save_steps=SAVES)
    assert unperturbed_among([other, qat, plain], qat) is plain
    assert unperturbed_among([other, qat], qat) is None
    assert unperturbed_among([qat, plain], plain) is None


def false_positives(tmp_path, studies: int) -> int:
    """Studies of which the claim decides, without an effect of the intervention."""
    count = 0
    for draw in range(studies):
        study = arms("sam")
        error = partial(error_of, factors={}, draw=draw)
        loss = lambda run, model, draw=draw: loss_of(run, model) + scatter(run, model, 0.003, draw)  # noqa: E731
        verdict, *_ = judged(tmp_path / str(draw), study, interventions, error, loss)
        count += present(verdict.p) <= 0.05
    return count


def test_an_intervention_without_effect_is_seldom_decided(tmp_path):
    assert false_positives(tmp_path, 4) <= 2  # of 5% in 4 there are more with a chance of 0.05%


@pytest.mark.stress
def test_an_intervention_without_effect_is_decided_in_a_twentieth(tmp_path):
    # of 5% in 200: 10, and more than 20 with a chance of 0.1%
    assert false_positives(tmp_path, 200) <= 20


def no_advantages(draws: int) -> float:
    """Share of draws in which one of two equal quantities correlates significantly more."""
    generator, count = np.random.default_rng(5), 0
    trainings = np.repeat(list("abcdef"), 5).tolist()
    for _ in range(draws):
        target_N = generator.normal(size=30)
        first_N, second_N = (target_N + generator.normal(size=30) for _ in range(2))
        better = advantage(target_N, first_N, second_N, trainings, within=True)
        count += present(better).p_value <= 0.05
    return count / draws


def test_quantities_that_predict_alike_have_no_advantage():
    assert no_advantages(40) <= 0.175  # of 5%: more with a chance of 0.02%


@pytest.mark.stress
def test_quantities_that_predict_alike_have_an_advantage_in_a_twentieth():
    assert 0.03 < no_advantages(1000) < 0.08
