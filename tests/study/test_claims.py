"""What is said of the paper's claims where the truth is known by construction."""

import math
from functools import partial

import numpy as np
import pytest

from quant_eval.measuring.bootstrap import Statistic, resample
from study.claims import page
from study.claims.verdict import significant_above
from study.results import paired
from study.results.paired import Paired
from study.results.summary import summarize
from study.soups import SoupSettings
from tests.study.claimed import (
    SPEC,
    branched,
    cosine,
    outcomes,
    released,
    rows_of,
    run_of,
    study_of,
)
from train.run.optimization import Lawa

YES, NO, OPEN, NONE = {"supported"}, {"contradicted"}, {"not decided"}, {"not tested"}


@pytest.fixture(autouse=True)
def _fewer_samples(monkeypatch):
    """A fifth of the resamplings: no p-value here is near its bound."""
    monkeypatch.setattr(paired, "SAMPLES", 1_999)


ONE = study_of(run_of("one"), run_of("two", seed=7))


def doublings(model) -> float:
    """Of the tokens, since the first checkpoint."""
    return math.log2(model.step / 40)


def annealed(model) -> bool:
    return model.step > 320


@pytest.mark.parametrize(
    ("error", "noise", "flat", "surge"),
    [
        (lambda run, model: 0.02 + 0.01 * annealed(model), 0.02, YES, YES),
        (
            lambda run, model: 0.02 + 0.006 * min(doublings(model), 3) + 0.01 * annealed(model),
            0.02,
            NO,
            YES,
        ),
        (lambda run, model: 0.02 + 0.01 * annealed(model), 3.0, OPEN, OPEN),
        (lambda run, model: 0.02 - 0.005 * annealed(model), 0.02, OPEN, NO),
        (
            lambda run, model: 0.02 + (-1 if run.name == "one" else 1) * 0.005 * annealed(model),
            0.02,
            OPEN,
            OPEN,
        ),
        (
            lambda run, model: 0.02 - 0.006 * min(doublings(model), 2.5) + 0.01 * annealed(model),
            0.02,
            NO,
            YES,
        ),
    ],
    ids=[
        "flat, then up",
        "rising all along",
        "lost in noise",
        "down",
        "one down, one up",
        "falling, then up",
    ],
)
def test_flatness_and_surge(tmp_path, error, noise, flat, surge):
    found = outcomes(tmp_path, ONE, rows_of(tmp_path, ONE, error, noise=noise))
    assert (found["flat"], found["surge"]) == (flat, surge)


def test_flatness_gives_the_slope_in_the_unit_of_a_doubling(tmp_path):
    rows = rows_of(
        tmp_path,
        ONE,
        lambda run, model: 0.02 + 0.001 * min(doublings(model), 3) + 0.01 * annealed(model),
    )
    text = page.claims_text(ONE, page.judge_all(ONE, rows, Paired(tmp_path)))
    assert (
        "relative error (GPTQ, 3 bits, groups of 32): slope significantly within 0.25"
        in " ".join(text.split())
    )
    own = " ".join(text.split()).partition("relative error (GPTQ")[2]
    first = own.partition("one: +")[2].partition("%")[0]
    assert float(first) == pytest.approx(
        0.1, rel=0.05
    )  # per cent; the noise moves it by some hundredths


def test_loss_and_error_part_only_where_the_loss_falls(tmp_path):
    rises = lambda run, model: 0.02 + 0.01 * annealed(model)  # noqa: E731
    for name, sign, expected in (("falls", -1, YES), ("rises", 1, NO), ("stays", 0, OPEN)):
        loss = lambda run, model, sign=sign: 4.0 + sign * 0.3 * annealed(model)  # noqa: E731
        rows = rows_of(tmp_path / name, ONE, rises, loss=loss)
        assert outcomes(tmp_path / name, ONE, rows)["divergence"] == expected


PEAKS = study_of(
    *(run_of(f"peak{index}", peak=1e-3 * 2**index) for index in range(4)), run_of("other", seed=3)
)


def index_of(run) -> int:
    """Doublings of the peak."""
    return round(math.log2(run.optimizer.peak_lr / 1e-3))


@pytest.mark.parametrize(
    ("error", "noise", "expected"),
    [
        (lambda run, model: 0.02 * 0.8 ** index_of(run), 0.02, YES),
        (lambda run, model: 0.02 * 1.2 ** index_of(run), 0.02, NO),
        (lambda run, model: 0.02, 0.5, OPEN),
        (lambda run, model: (0.04, 0.02, 0.01, 0.013)[index_of(run)], 0.02, OPEN),
    ],
    ids=["smaller", "larger", "alike", "smaller, but for the last"],
)
def test_larger_peaks(tmp_path, error, noise, expected):
    rows = rows_of(tmp_path, PEAKS, error, noise=noise)
    assert outcomes(tmp_path, PEAKS, rows)["peaks"] == expected


def stepping(step: float, run, model) -> float:
    """A loss that rises by `step` with every doubling of the peak."""
    return 4 + step * index_of(run)


def test_larger_peaks_at_matched_loss_are_those_that_end_no_worse(tmp_path):
    error = lambda run, model: 0.02 * 0.8 ** index_of(run)  # noqa: E731
    for name, step, expected in (("same", 0.0, YES), ("better", -0.1, YES), ("worse", 0.1, NONE)):
        rows = rows_of(tmp_path / name, PEAKS, error, loss=partial(stepping, step))
        found = outcomes(tmp_path / name, PEAKS, rows)
        assert (found["peaks"], found["matched"]) == (YES, expected)


def test_runs_that_differ_in_more_than_the_peak_are_no_sweep(tmp_path):
    decays = study_of(run_of("one"), run_of("two", peak=2e-3, seed=5))
    found = outcomes(tmp_path, decays, rows_of(tmp_path, decays, lambda run, model: 0.02))
    assert found["peaks"] == found["matched"] == NONE


STABLE = run_of(
    "stable",
    schedule=run_of("x").schedule.model_copy(update={"anneal": None}),
    total=320,
    save_steps=(40, 80, 160, 320),
)
COOLDOWNS = study_of(STABLE, *(branched(STABLE, step, step // 4) for step in (80, 160, 320)))


def cooled(rise: float, growth: float):
    """Error of the parent, of cooldowns that add to it, and of what each doubling of the budget
    adds to those.
    """
    return lambda run, model: (
        0.02 + (rise + growth * math.log2(model.step / 100) if run.branch_from else 0)
    )


@pytest.mark.parametrize(
    ("rise", "growth", "expected"),
    [
        (0.01, 0.0, YES),
        (0.01, -0.004, YES),
        (0.01, 0.008, NO),
        (0.01, 0.01 / 3, OPEN),
    ],  # a quarter of the mean rise
    ids=["level", "falling", "growing", "at the margin"],
)
def test_budgets_of_branches_are_judged_by_their_parent(tmp_path, rise, growth, expected):
    rows = rows_of(tmp_path, COOLDOWNS, cooled(rise, growth))
    assert outcomes(tmp_path, COOLDOWNS, rows)["budgets"] == expected
    ends = summarize(COOLDOWNS, rows)
    assert [end.label for end in ends] == [
        "stable-cooldown80",
        "stable-cooldown160",
        "stable-cooldown320",
    ]
    assert [(end.first["run"], end.first["step"]) for end in ends if end.first] == [
        ("stable", 80),
        ("stable", 160),
        ("stable", 320),
    ]
    assert outcomes(tmp_path, COOLDOWNS, rows)["flat"] == YES  # each on its parent's checkpoints


@pytest.mark.parametrize(("slope", "expected"), [(0.006, YES), (-0.006, NO), (0.0, OPEN)])
def test_schedules(tmp_path, slope, expected):
    study = study_of(cosine("cosine200", 200), cosine("cosine400", 400), *COOLDOWNS.trained)

    def error(run, model):
        grown = slope * math.log2(model.step / 100) if run.schedule.phase.kind == "cosine" else 0
        return cooled(0.01, 0.0)(run, model) + grown

    assert outcomes(tmp_path, study, rows_of(tmp_path, study, error))["schedules"] == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.6, YES), (1.4, NO), (1.0, OPEN)])
def test_averages_kept_by_the_parent_stand_beside_the_annealed_branch(tmp_path, factor, expected):
    parent = STABLE.model_copy(update={"averages": (Lawa(interval_steps=5, window=3),)})
    study = study_of(parent, branched(parent, 320, 80), averaged_steps=(320,))
    rows = rows_of(tmp_path, study, lambda run, model: 0.02 * (factor if model.average else 1))
    assert sum(row["average"] is not None for row in rows) == 1
    # the quantized loss of 4 (1 + error) moves the same way
    assert outcomes(tmp_path, study, rows)["averages"] == expected


def test_soups(tmp_path):
    study = study_of(run_of("one"), soups=(SoupSettings(name="soup", steps=(160, 320)),))
    rows = rows_of(tmp_path, study, lambda run, model: 0.01 if model.average else 0.02)
    assert outcomes(tmp_path, study, rows)["averages"] == YES
    other = study_of(
        *study.trained, run_of("two", seed=7, save_steps=(320, 400)), soups=study.soups
    )
    both = rows_of(tmp_path, other, lambda run, model: 0.01 if model.average else 0.02)
    assert outcomes(tmp_path, other, both)["averages"] == YES  # no soup is made of the second run
    missing = [row for row in rows if not row["average"]]
    assert outcomes(tmp_path, study, missing)["averages"] == NONE


def test_methods_and_bits(tmp_path):
    study = study_of(*PEAKS.trained[:3], methods=("rtn-b3-g32", "gptq-b4-g32"))
    for name, cost, bits in (("less", 0.2, YES), ("more", 1.5, NO)):
        rows = rows_of(
            tmp_path / name,
            study,
            lambda run, model: 0.02 * 0.8 ** index_of(run),
            cost={"gptq-b4-g32": cost},
        )
        found = outcomes(tmp_path / name, study, rows)
        assert (found["methods"], found["bits"]) == (YES, bits)


def test_what_is_missing_is_said_and_never_raised(tmp_path):
    study = study_of(*PEAKS.trained[:3], methods=("rtn-b3-g32",), curvature=True)
    rows = rows_of(tmp_path, study, lambda run, model: 0.02, trace=lambda run, model: 900.0)
    last = next(row for row in rows if row["run"] == "peak1" and row["step"] == 400)
    for figure in ("relative_error", "kl_divergence", "cross_entropy"):
        last[f"quant/{SPEC}/{figure}"] = None
    found = outcomes(tmp_path, study, rows)
    for name in ("flat", "surge", "divergence", "peaks", "matched", "sharpness"):
        assert found[name] == NONE
    text = " ".join(page.claims_text(study, page.judge_all(study, rows, Paired(tmp_path))).split())
    assert "missing: quant/gptq-b3-g32/kl_divergence of the end of peak1 is not measured" in text
    for part in ([], rows[:1], [row for row in rows if row["step"] < 400]):
        assert set.union(*outcomes(tmp_path, study, part).values()) == NONE


def test_a_released_model_is_judged_by_its_learning_rates(tmp_path):
    """Rows and results of a run that decays, under the names of a released model."""
    template = study_of(run_of("stage1"))
    rows = rows_of(tmp_path, template, lambda run, model: 0.02 + 0.01 * annealed(model))
    for known, expected in ((True, YES), (False, NONE)):
        run = released({row["step"]: row["learning_rate"] if known else None for row in rows})
        study = template.model_copy(update={"runs": (run,), "labels": {}, "heading": "stage"})
        for row in rows:
            row |= {"phase": "stage1", "learning_rate": run.at(row["step"]).learning_rate}
        results = Paired(tmp_path)
        judged = {
            claim.name: {one.outcome for one in found}
            for claim, found in page.judge_all(study, rows, results)
        }
        assert judged.pop("flat") == judged.pop("surge") == expected
        assert set.union(*judged.values()) <= NONE | OPEN


def test_runs_are_in_the_order_of_their_axis(tmp_path):
    study = study_of(*(PEAKS.trained[place] for place in (2, 0, 1)))
    rows = rows_of(tmp_path, study, lambda run, model: 0.02 * 0.8 ** index_of(run))
    assert [end.label for end in summarize(study, rows)] == ["peak0", "peak1", "peak2"]


def test_every_claim_is_discovered_once_and_in_order(tmp_path):
    rows = rows_of(tmp_path, ONE, lambda run, model: 0.02 + 0.01 * annealed(model))
    judged = page.judge_all(ONE, rows, Paired(tmp_path))
    names = [claim.name for claim, _ in judged]
    assert len(set(names)) == len(names) == 14
    assert names[:4] == ["flat", "surge", "divergence", "peaks"]
    text = " ".join(page.claims_text(ONE, judged).split())
    assert all(claim.sentence in text for claim, _ in judged)


def test_a_claim_has_its_effect_in_a_few_words(tmp_path):
    rows = rows_of(tmp_path, ONE, lambda run, model: 0.02 + 0.01 * annealed(model))
    judged = {claim.name: found for claim, found in page.judge_all(ONE, rows, Paired(tmp_path))}
    assert page.tally(judged["surge"]) == "supported by all 2"
    effect = page.headline(judged["surge"])
    assert effect.startswith("KL divergence (GPTQ, 3 bits, groups of 32): +0.04")
    assert page.tally(judged["peaks"]) == "not tested"
    assert page.headline(judged["peaks"]) == ""


def test_equivalence_is_told_falsely_at_its_level_at_most():
    """Slope exactly at the margin: margin - slope has mean 0, margin + slope lies far above."""
    generator, told, repetitions = np.random.default_rng(1), 0, 400
    ones_D = np.ones(28)
    for _ in range(repetitions):
        edge_D, far_D = generator.normal(size=28), 2 + generator.normal(size=28)
        statistics = [Statistic("x", (value_D, ones_D)) for value_D in (edge_D, far_D)]
        told += significant_above(
            [resample(statistics, [None, None], samples=999, seed=0)], one_sided=True
        )[0]
    assert told / repetitions <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repetitions)
    assert told > 0.02 * repetitions, "nor is it told far too rarely"
