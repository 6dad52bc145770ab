"""Verdicts on the paper's claims where the truth is known by construction."""

import math
import re
from functools import partial
from itertools import count, permutations

import numpy as np
import pytest
from scipy.stats import kendalltau

from base.statistics import holm
from dynamics.claims.data import tokens
from dynamics.claims.sweep import kendall
from study.claims import page
from study.claims.verdict import Evidence
from study.design import with_controls
from study.report.text import claims_lines
from study.results.paired import Paired
from tests.present import present
from tests.study.claimed import (
    SPEC,
    branched,
    cosine,
    diverge,
    outcomes,
    released,
    rows_of,
    run_of,
    study_of,
    table,
)

YES, NO, OPEN, NONE = "supported", "contradicted", "not decided", "not tested"


ONE = study_of(*(run_of(f"seed{seed}", seed=seed) for seed in (1, 2, 3)))


def doublings(model) -> float:
    """Doublings of the tokens since the first checkpoint."""
    return math.log2(model.step / 40)


def annealed(run, model) -> bool:
    return run.schedule.anneal is not None and model.step > 320


def along(growth: float, rise: float):
    """An error that grows by so much with every doubling, and rises in the anneal."""
    return lambda run, model: 0.02 + growth * doublings(model) + rise * annealed(run, model)


@pytest.mark.parametrize(
    ("error", "noise", "flat", "surge"),
    [
        (along(0.0, 0.01), 0.02, YES, YES),
        (along(0.003, 0.01), 0.02, NO, YES),
        (along(0.006, 0.0), 0.02, NO, OPEN),
        (along(-0.003, 0.01), 0.02, NO, YES),
        (along(0.0, -0.005), 0.02, OPEN, NO),
    ],
    ids=[
        "flat, then up",
        "as much before the anneal as in it",
        "growing with the tokens alone",
        "falling, then up",
        "down",
    ],
)
def test_flatness_and_surge(tmp_path, error, noise, flat, surge):
    verdicts = outcomes(tmp_path, ONE, rows_of(tmp_path, ONE, error, noise=noise))
    assert (verdicts["flat"], verdicts["surge"]) == (flat, surge)


def test_an_anneal_that_does_not_decay_is_not_tested(tmp_path):
    schedule = run_of("x").schedule
    anneal = present(schedule.anneal).model_copy(update={"floor": 0.9})
    study = study_of(run_of("held", schedule=schedule.model_copy(update={"anneal": anneal})))
    rows = rows_of(tmp_path, study, along(0.006, 0.01))
    assert outcomes(tmp_path, study, rows)["surge"] == NONE


def test_the_growth_by_data_alone_is_beside_the_surge(tmp_path):
    line = table(tmp_path, ONE, rows_of(tmp_path, ONE, along(0.003, 0.01)))["surge"]
    detail_of_error = next(
        detail for detail in line.details if detail.measure.startswith("relative error")
    )
    alone = float(detail_of_error.statistic.partition("before the anneal: ")[2].split()[0])
    assert alone == pytest.approx(0.3 * math.log2(400 / 320), rel=0.1)  # the noise of documents
    assert float(detail_of_error.effect.split()[0]) == pytest.approx(1.0, rel=0.02)
    assert detail_of_error.effect.endswith("]%")


def test_loss_and_error_part_only_where_the_loss_falls(tmp_path):
    for name, sign, expected in (("falls", -1, YES), ("rises", 1, NO), ("stays", 0, OPEN)):
        loss = lambda run, model, sign=sign: 4.0 + sign * 0.3 * annealed(run, model)  # noqa: E731
        rows = rows_of(tmp_path / name, ONE, along(0.0, 0.01), loss=loss)
        assert outcomes(tmp_path / name, ONE, rows)["divergence"] == expected


PEAKS = study_of(
    *(
        run_of(f"peak{index}-seed{seed}", peak=1e-3 * 2**index, seed=seed)
        for index in range(3)
        for seed in (1, 2, 3)
    )
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
        (lambda run, model: (0.04, 0.01, 0.014)[index_of(run)], 0.02, OPEN),
        (lambda run, model: 0.02 * (0.97, 1.0, 1.04)[run.seed - index_of(run) - 1], 0.001, OPEN),
    ],
    ids=["smaller", "larger", "alike", "smaller, but for the last", "less than among seeds"],
)
def test_larger_peaks(tmp_path, error, noise, expected):
    rows = rows_of(tmp_path, PEAKS, error, noise=noise)
    assert outcomes(tmp_path, PEAKS, rows)["peaks"] == expected


RISES = {0: (0.0005, 0.009, 0.004), 1: (0.0145, 0.007, 0.0115)}  # by peak, of each seed
TWO_PEAKS = study_of(
    *(run for run in PEAKS.trained if index_of(run) < 2 and "control" not in run.name),
    quantization=PEAKS.quantization.model_copy(update={"calibration_seeds": 1}),
)


def test_why_a_peak_that_shows_nothing_is_no_objection(tmp_path):
    """Three seeds of the first peak scatter about 0, those of both agree."""
    error = lambda run, model: (  # noqa: E731
        0.02 + RISES[index_of(run)][run.seed - 1] * annealed(run, model)
    )
    lines = table(tmp_path, TWO_PEAKS, rows_of(tmp_path, TWO_PEAKS, error, noise=0.0))
    assert (lines["surge"].outcome, lines["surge"].against) == (YES, "")

    # KL divergence is 1.1 times what the loss of 4 rises by, in thousandths of a nat
    alone, mean = 4400 * np.mean(RISES[0]), 4400 * np.mean([*RISES.values()])
    sentence = re.fullmatch(
        r"Peak learning rate 0\.001 alone shows nothing, (\S+) \[(\S+), (\S+)\] holds 0\. The"
        r" verdict is on the mean over 0\.001 and 0\.002, (\S+) \[(\S+), (\S+)\] x 10\^-3 nats/token:"
        r" both together have more data\.",
        lines["surge"].why,
    )
    value, low, high, both, least, most = map(float, present(sentence).groups())
    assert [value, both] == [pytest.approx(alone, abs=1), pytest.approx(mean, abs=0.1)]
    # of three seeds Student's t by hand: 4.303 standard errors, and a little more by documents
    half = 4.303 * 4400 * np.std(RISES[0], ddof=1) / math.sqrt(3)
    assert [low, high] == pytest.approx([alone - half, alone + half], abs=2)
    assert low < 0 < least < both < most
    assert lines["peaks"].why == "", "one step of the peak is the whole"


def stepping(step: float, run, model) -> float:
    """A loss that rises by `step` with every doubling of the peak."""
    return 4 + step * index_of(run)


def test_larger_peaks_at_equal_loss_are_those_of_the_same_loss(tmp_path):
    error = lambda run, model: 0.02 * 0.8 ** index_of(run)  # noqa: E731
    for name, step, expected in (("same", 0.0, YES), ("better", -0.1, NONE), ("worse", 0.1, NONE)):
        rows = rows_of(tmp_path / name, PEAKS, error, loss=partial(stepping, step))
        assert outcomes(tmp_path / name, PEAKS, rows)["matched"] == expected


def test_the_runs_the_other_way_are_named(tmp_path):
    study = study_of(*(run_of(f"peak{index}", peak=1e-3 * 2**index) for index in range(4)))
    error = lambda run, model: (  # noqa: E731
        0.02 + (0.01, 0.01, 0.01, -0.002)[index_of(run)] * annealed(run, model)
    )
    line = table(tmp_path, study, rows_of(tmp_path, study, error))["surge"]
    assert line.runs == "3 of 4 higher"
    assert line.against.startswith("0.008: lower, -8.")
    assert line.p.endswith("*")  # one seed


def test_methods_and_bits(tmp_path):
    study = study_of(
        *(run for run in PEAKS.trained if "control" not in run.name),
        methods=("rtn-b3-g32", "gptq-b4-g32"),
    )
    for name, cost, bits in (("less", 0.2, YES), ("more", 1.5, NO)):
        rows = rows_of(
            tmp_path / name,
            study,
            lambda run, model: 0.02 * 0.8 ** index_of(run),
            cost={"gptq-b4-g32": cost},
        )
        verdicts = outcomes(tmp_path / name, study, rows)
        assert (verdicts["methods"], verdicts["bits"]) == (YES, bits)


HARD = {1: 0.02, 2: 0.04, 3: 0.08}  # the error of a seed, by far more than a peak changes it


def by_seed_and_peak(run, model) -> float:
    """An error that a doubling of the peak raises by 0.004, and the anneal by half of its seed's."""
    return HARD[run.seed] * (1 + 0.5 * annealed(run, model)) + 0.004 * index_of(run)


def left_out_of(tmp_path, peaks: int, *diverged: str):
    """The claims on peaks of three seeds each, some of whose runs diverged at step 3."""
    study = study_of(
        *(run for run in PEAKS.trained if index_of(run) < peaks and "control" not in run.name),
        methods=("rtn-b3-g32",),
    )
    for run in study.trained:
        if run.name in diverged:
            diverge(tmp_path, run)
    return table(tmp_path, study, rows_of(tmp_path, study, by_seed_and_peak, noise=0.001))


@pytest.mark.parametrize("diverged", [1, 3])
@pytest.mark.parametrize(
    ("claim", "effect_of"),
    [
        ("surge", lambda seed: 0.5 * HARD[seed]),
        ("divergence", lambda seed: 0.5 * HARD[seed]),
        ("peaks", lambda seed: 0.004),
        ("methods", lambda seed: 0.004),
    ],
)
def test_seeds_are_paired_where_one_diverged(tmp_path, claim, effect_of, diverged):
    lines = left_out_of(tmp_path, 2, f"peak0-seed{diverged}")
    detail = lines[claim].details[0]
    others = [seed for seed in HARD if seed != diverged]
    # KL divergence is 1.1 times what the loss of 4 rises by, in thousandths of a nat
    expected = 4400 * np.mean([effect_of(seed) for seed in others])
    # Two seeds that differ by a factor of two leave one digit.
    assert float(detail.effect.split()[0].rstrip(",")) == pytest.approx(expected, rel=0.1)
    words = "paired over seeds {} and {}; left out, without a partner of the same seed: 0.002, seed"
    assert words.format(*others) + f" {diverged};" in detail.statistic


def test_peaks_that_not_every_seed_has_are_named(tmp_path):
    lines = left_out_of(tmp_path, 3, "peak0-seed1")
    words = lines["peaks"].details[0].statistic
    assert "left out, which not every seed has: 0.001;" in words
    assert "0.001 to" not in words


def test_runs_of_which_no_two_share_a_seed_are_not_compared(tmp_path):
    lines = left_out_of(tmp_path, 2, "peak0-seed1", "peak1-seed2", "peak1-seed3")
    for claim in ("surge", "methods", "peaks"):
        assert lines[claim].outcome == NONE, claim
    assert "which are paired by seed" in lines["methods"].details[0].statistic


STABLE = run_of(
    "stable",
    schedule=run_of("x").schedule.model_copy(update={"anneal": None}),
    total=400,
    save_steps=(40, 80, 100, 160, 200, 320, 400),
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
    [(0.01, 0.0, YES), (0.01, -0.002, YES), (0.01, 0.008, NO)],
    ids=["level", "falling", "growing"],
)
def test_budgets_of_branches_are_judged_by_their_parent(tmp_path, rise, growth, expected):
    rows = rows_of(tmp_path, COOLDOWNS, cooled(rise, growth))
    assert outcomes(tmp_path, COOLDOWNS, rows)["budgets"] == expected


@pytest.mark.parametrize(("slope", "expected"), [(0.006, YES), (-0.006, NO), (0.0, OPEN)])
def test_schedules(tmp_path, slope, expected):
    study = study_of(cosine("cosine200", 200), cosine("cosine400", 400), *COOLDOWNS.trained)

    def error(run, model):
        grown = slope * math.log2(model.step / 100) if run.schedule.phase.kind == "cosine" else 0
        return cooled(0.01, 0.0)(run, model) + grown

    assert outcomes(tmp_path, study, rows_of(tmp_path, study, error))["schedules"] == expected


@pytest.mark.parametrize(("rise", "expected"), [(0.01, YES), (0.0, OPEN)])
def test_a_released_model_is_judged_by_a_change_of_slope(tmp_path, rise, expected):
    """Rows and results of a run that decays, under the names of a released model."""
    template = study_of(run_of("stage1"))
    rows = rows_of(tmp_path, template, along(0.001, rise))
    rows = [row for row in rows if row["run"] == "stage1"]
    run = released({row["step"]: row["learning_rate"] for row in rows})
    study = template.model_copy(update={"runs": (run,), "labels": {}})
    for row in rows:
        row["phase"] = "stage1"
    assert outcomes(tmp_path, study, rows)["surge"] == expected


def test_claims_are_corrected_for_their_number(tmp_path):
    rows = rows_of(tmp_path, PEAKS, along(0.0, 0.01))
    judged = page.judge_all(PEAKS, rows, Paired(tmp_path))
    lines = page.claims_table(judged)
    p_values = [present(line.details[0].p) for line in lines if line.p]
    assert [line.p.rstrip("*") for line in lines if line.p] == [f"{p:.2g}" for p in holm(p_values)]
    assert all(line.details[0].measure.startswith("KL divergence") for line in lines[:2])


def test_the_table_is_short(tmp_path):
    rows = rows_of(tmp_path, PEAKS, along(0.001, 0.01))
    judged = page.judge_all(PEAKS, rows, Paired(tmp_path))
    lines = page.claims_table(judged)
    text = list(claims_lines(lines))
    assert max(map(len, text)) <= 100
    assert len(text) <= 20
    tested = [line.claim.sentence for line in lines if line.outcome != NONE]
    assert [line[:44].strip() for line in text[1 : 1 + len(tested)]] == tested
    every = list(claims_lines(lines, whole=True))
    assert max(map(len, every)) <= 120
    assert every[: len(tested) + 1] != text[: len(tested) + 1], "with the runs"
    assert sum(line.startswith("  KL divergence (GPTQ") for line in every) >= len(tested) - 1
    assert all(len(claim.sentence) <= 44 for claim, _ in judged)


def test_what_is_missing_is_said_and_never_raised(tmp_path):
    rows = rows_of(tmp_path, PEAKS, along(0.0, 0.01))
    last = next(row for row in rows if row["run"] == "peak1-seed1" and row["step"] == 400)
    for figure in ("relative_error", "kl_divergence", "cross_entropy"):
        last[f"quant/{SPEC}/{figure}"] = None
    lines = table(tmp_path, PEAKS, rows)
    for name in ("flat", "surge", "divergence", "peaks", "matched"):
        assert lines[name].outcome == NONE
    assert "kl_divergence of the end of" in lines["surge"].details[0].statistic
    for part in ([], rows[:1], [row for row in rows if row["step"] < 400]):
        assert set(outcomes(tmp_path, PEAKS, part).values()) == {NONE}


def test_kendall_is_that_of_scipy_and_of_all_orders():
    generator = np.random.default_rng(0)
    for runs in (3, 5, 7):
        first, second = generator.normal(size=(2, runs))
        expected = kendalltau(first, second, method="exact")
        assert kendall(first, second) == pytest.approx((expected.statistic, expected.pvalue))
    tied = [1.0, 1.0, 2.0, 3.0]
    every = [
        kendall(range(4), [tied[index] for index in order])[0] for order in permutations(range(4))
    ]
    tau, p = kendall(range(4), tied)
    assert tau == pytest.approx(5 / 6)
    assert p == pytest.approx(min(1.0, 2 * np.mean(np.array(every) >= tau - 1e-9)))


def test_the_permutation_test_keeps_its_size_exactly():
    """Over all 120 equally likely orders of five runs."""
    p_values = [kendall(range(5), order)[1] for order in permutations(range(5))]
    assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(
        2 / 120
    )  # the two perfect orders, at 2/120 each
    assert min(p_values) == pytest.approx(2 / 120)


PEAKS_OF_TOKENS = {"a": 1e-3, "b": 2e-3, "c": 4e-3, "d": 8e-3, "e": 1.6e-2, "f": 3.2e-2}


def growing(noise, run, model, factor: float) -> float:
    """A power law in the step, the factor at the end of an anneal, and noise of 5%."""
    is_annealed = run.schedule.anneal and model.step == run.total_steps
    size = 0.01 * math.sqrt(model.step / 400) * math.exp(0.05 * next(noise))
    return size * (factor if is_annealed else 1.0)


def verdicts(tmp_path, runs, factor: float) -> list:
    """The claim's verdicts if each anneal multiplies the error so."""
    study = study_of(*with_controls(runs))
    generator = np.random.default_rng(0)
    noise = (generator.normal() for _ in count())
    rows = rows_of(tmp_path, study, partial(growing, noise, factor=factor), noise=0.0)
    return tokens.judge(Evidence(study, rows, Paired(tmp_path)))


@pytest.mark.parametrize(
    ("factor", "outcomes"),
    [(2.0, {"contradicted"}), (1.0, {"supported", "not decided"})],
    ids=["the anneal doubles the error", "tokens alone"],
)
def test_the_decay_shows_at_the_same_held_out_ends(tmp_path, factor, outcomes):
    """A power law in tokens is off by log 2 if the anneal doubles the error, and the common
    factor by the noise. Without an effect both are off by noise alone.
    """
    runs = [run_of(name, peak=peak) for name, peak in PEAKS_OF_TOKENS.items()]
    results = verdicts(tmp_path, runs, factor)
    assert {verdict.outcome for verdict in results} <= outcomes
    size = float(results[0].effect.split()[0])
    assert size == pytest.approx(math.log(factor), abs=0.1)
    assert "6 annealed ends" in results[0].statistic
    assert "6 groups of runs" in results[0].statistic


def test_seeds_are_no_further_runs(tmp_path):
    runs = [run_of(name, seed=seed) for name, seed in (("a", 1), ("b", 2))]
    (verdict, *_) = verdicts(tmp_path, runs, 2.0)
    assert verdict.outcome == "not tested"
    words = "annealed runs with a measured control, or released models, but for seeds: 1"
    assert verdict.statistic == words
