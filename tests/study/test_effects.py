"""The effect of each factor at the end: what is compared with what, by which noise, in its unit."""

import csv
import math

import numpy as np
import pytest

from quant_eval.estimate import DOCUMENTS, SEEDS
from study.claims.verdict import in_words
from study.measurements.kind import Column
from study.measurements.quantization import CROSS_ENTROPY, DIVERGENCE, RELATIVE_ERROR
from study.recipes.parts import sweep
from study.recipes.resolve import resolve
from study.report.cells import Bounded, Cell, Table, cell, csv_rows, write_tables
from study.report.tables import (
    effect_tables,
    end_table,
    heat_tables,
    method_table,
    step_table,
)
from study.report.text import effects_lines
from study.results.effects import Effect, effects_of
from study.results.paired import Paired
from study.results.summary import summarize
from tests.study import factors
from tests.study.claimed import released, rows_of

SPEC = "gptq-b3-g32"
KL, SHARE = DIVERGENCE, RELATIVE_ERROR


def error(run, model) -> float:
    """Grows with the weight decay, by other amounts in other trainings, and with the layers."""
    decay, layers = run.optimizer.weight_decay, run.model.num_hidden_layers
    return 0.02 * (1 + decay * (1 + 0.1 * run.seed)) + 0.001 * layers


def measured(directory, study, **more):
    rows = rows_of(directory, study, error, **more)
    return rows, effects_of(study, rows, Paired(directory))


def effect_on(effects: list[Effect], figure: Column, spec: str = SPEC) -> Effect:
    (effect,) = (each for each in effects if each.measure == (spec, figure))
    return effect


def end(rows, run: str, figure: Column) -> float:
    """The figure of the last weights of a run, from the table."""
    return next(
        row[figure.of(SPEC)]
        for row in reversed(rows)
        if row["run"] == run and row["average"] is None
    )


def test_a_factor_is_compared_seed_by_seed(tmp_path):
    study = factors.of("own", sweep(factors.run, weight_decay=[0.0, 0.1]), seeds=(1, 2, 3))
    rows, effects = measured(tmp_path, study)
    assert list(effects) == ["weight_decay"]
    for figure in (KL, SHARE):
        effect = effect_on(effects["weight_decay"], figure)
        assert (effect.reference, effect.value, effect.pairs) == ("0", "0.1", 3)
        differences = [
            end(rows, f"wd0.1-seed{seed}", figure) - end(rows, f"wd0-seed{seed}", figure)
            for seed in (1, 2, 3)
        ]
        assert effect.estimate.value == pytest.approx(np.mean(differences), rel=1e-6)
        # what the seeds add is the standard error of the mean of their differences; jackknife values
        # of a ratio over 28 documents differ by some 1e-4 from it in their mean
        expected = np.std(differences, ddof=1) / math.sqrt(3)
        assert effect.estimate.sources.keys() == {SEEDS, DOCUMENTS}
        assert effect.estimate.sources[SEEDS].standard_error == pytest.approx(expected, rel=1e-3)
    change = effect_on(effects["weight_decay"], CROSS_ENTROPY)
    assert change.estimate.value == pytest.approx(0.0, abs=1e-12)


def test_crossed_factors_are_compared_at_equal_values_of_the_others(tmp_path):
    """The layers add the same at either weight decay; one run that is not measured takes its pair
    with it.
    """
    runs = sweep(factors.run, layers=[2, 6], weight_decay=[0.0, 0.1])
    study = factors.of("own", runs, seeds=(1, 2))
    rows, effects = measured(tmp_path, study, noise=0.0)
    layers = effect_on(effects["layers"], SHARE)
    assert (layers.reference, layers.value, layers.pairs) == ("2", "6", 4)
    assert layers.estimate.value == pytest.approx(0.004, rel=1e-6)
    decay = effect_on(effects["weight_decay"], SHARE)
    assert decay.estimate.value == pytest.approx(0.02 * 0.1 * 1.15, rel=1e-6)

    missing = [row for row in rows if row["run"] != "layers6-wd0.1-seed2"]
    fewer = effect_on(effects_of(study, missing, Paired(tmp_path))["weight_decay"], SHARE)
    assert fewer.pairs == 2, "both seeds have a pair at 2 layers alone"
    assert fewer.estimate.value == pytest.approx(0.02 * 0.1 * 1.15, rel=1e-6)


def test_the_table_of_two_factors_shows_the_means_of_the_seeds(tmp_path):
    runs = sweep(factors.run, layers=[2, 6], weight_decay=[0.0, 0.1])
    study = factors.of("own", runs, seeds=(1, 2))
    rows, _ = measured(tmp_path, study)
    shown, *_ = heat_tables(study, summarize(study, rows), Paired(tmp_path))
    for line, layers in zip(shown.body, (2, 6), strict=True):
        for shown_mean, decay in zip(line[1:], ("0", "0.1"), strict=True):
            of_seeds = [end(rows, f"layers{layers}-wd{decay}-seed{seed}", KL) for seed in (1, 2)]
            assert shown_mean.numbers[0] == pytest.approx(1000 * np.mean(of_seeds), rel=1e-6)
    assert "Means over 2 seeds" in shown.note

    first = [row for row in rows if not row["run"].endswith("seed2")]
    shown, *_ = heat_tables(study, summarize(study, first), Paired(tmp_path))
    one = 1000 * end(rows, "layers2-wd0-seed1", KL)
    assert shown.body[0][1].numbers[0] == pytest.approx(one)


def test_three_values_are_compared_with_the_least_and_words_with_the_first(tmp_path):
    deep = factors.of("deep", sweep(factors.run, layers=[6, 2, 4]))
    _, effects = measured(tmp_path / "deep", deep)
    compared = [each for each in effects["layers"] if each.measure == (SPEC, KL)]
    assert [(each.reference, each.value) for each in compared] == [("2", "4"), ("2", "6")]
    order = factors.of("order", sweep(factors.with_data, order=["sequential", "olmo"]))
    _, effects = measured(tmp_path / "order", order)
    assert effect_on(effects["order"], KL).reference == "sequential"


def test_what_is_confounded_is_not_compared(tmp_path):
    both = [factors.run("a", layers=2, peak_lr=1e-2), factors.run("b", layers=4, peak_lr=3e-3)]
    study = factors.of("own", both)
    _, effects = measured(tmp_path, study)
    assert effects == {"peak_lr": [], "num_hidden_layers": []}
    first, second = effect_tables(study, effects)
    assert first.note.startswith("No two measured ends differ in peak learning rate alone")
    assert second.body == []
    stage = released({10: 1e-3, 20: 1e-3})
    stages = study.model_copy(update={"runs": (stage,)})
    assert effects_of(stages, [], Paired(tmp_path)) == {}


@pytest.mark.parametrize("seeds", [(), (1, 2)])
def test_the_table_says_which_noise_its_intervals_leave_out(tmp_path, seeds):
    study = factors.of("own", sweep(factors.run, weight_decay=[0.0, 0.1]), seeds=seeds)
    _, effects = measured(tmp_path, study)
    (table,) = effect_tables(study, effects)
    assert table.title == "Effect of weight decay at the end"
    assert table.head[0] == "weight decay"
    (line,) = table.body
    assert line[0].text == "0.1 against 0"
    sources = "seeds and documents" if seeds else "documents"
    assert f", hold {sources}." in table.note
    assert ("leave out the seed of training" in table.note) == (not seeds)
    assert line[2].interval.endswith("*") == (not seeds)
    text = list(effects_lines([table], whole=True))
    assert max(map(len, text)) <= 100
    assert any("relative error, %" in row and line[3].text in row for row in text)
    share = 100 * effect_on(effects["weight_decay"], SHARE).estimate.value
    assert float(line[3].text) == pytest.approx(share, rel=0.1)
    _, title, head, row = effects_lines([table])
    assert title == "Effect of weight decay at the end, as above, p uncorrected"
    assert head.split("  ")[-1].strip() == "GPTQ, 3 bits, groups of 32: KL divergence"
    assert head.split("  GPTQ")[0].strip() == "final loss"
    assert row.startswith("0.1 against 0  ")


def test_files_of_tables_hold_numbers_with_their_units_in_the_head(tmp_path):
    study = factors.of("own", sweep(factors.run, weight_decay=[0.0, 0.1]), seeds=(1, 2))
    rows, effects = measured(tmp_path, study)
    tables = [
        *effect_tables(study, effects),
        end_table(study, summarize(study, rows), Paired(tmp_path)),
    ]
    write_tables(tmp_path, tables)

    with (tmp_path / "tables/effect_of_weight_decay_at_the_end.csv").open() as file:
        (line,) = csv.DictReader(file)
    share = effect_on(effects["weight_decay"], SHARE).estimate
    name = "GPTQ, 3 bits, groups of 32: relative error, %"
    values = [float(line[name + ending]) for ending in ("", ", low", ", high", ", p")]
    assert values == [*(100 * value for value in (share.value, *share.interval())), share.p_value()]

    with (tmp_path / "tables/end_of_training.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["weight decay"] for line in lines] == ["0", "0.1"], "means over the seeds"
    for line, run in zip(lines, ("wd0", "wd0.1"), strict=True):
        divergence = float(line["GPTQ, 3 bits, groups of 32: KL divergence, 10^-3 nats/token"])
        ends = [end(rows, f"{run}-seed{seed}", KL) for seed in (1, 2)]
        assert divergence == pytest.approx(1000 * np.mean(ends), rel=1e-6)
        control = float(line["GPTQ, 3 bits, groups of 32: the same, not annealed"])
        ends = [end(rows, f"{run}-control-seed{seed}", KL) for seed in (1, 2)]
        assert control == pytest.approx(1000 * np.mean(ends), rel=1e-6)


def test_cells_without_a_number_are_words_or_empty():
    body = [
        [Cell("a"), cell(Bounded(-0.0001, -0.0002, 0.0001), digits=3)],
        [Cell("b"), Cell("not measured")],
    ]
    assert body[0][1].text == "0.000", "what is rounded to zero has no sign"
    assert body[0][1].interval == "[0.000, 0.000]"
    assert list(csv_rows(Table("t", "", ["name", "loss, nats"], body))) == [
        ["name", "loss, nats", "loss, nats, low", "loss, nats, high"],
        ["a", -0.0001, -0.0002, 0.0001],
        ["b", "", "", ""],
    ]


def test_tables_have_no_rows_of_what_a_study_does_not_measure(tmp_path):
    """The demo measures more than the quantization of checkpoints for the first seed alone."""
    demo = resolve("tiny", "full")
    summaries = summarize(demo, [])
    steps, methods = step_table(demo, summaries), method_table(demo, summaries)
    assert steps
    assert methods
    labels = ["0.006, seed 1", "0.072, seed 1"]
    assert [line[0].text for line in steps.body] == labels
    assert list(methods.head) == ["method", *labels]


@pytest.mark.parametrize(
    ("outcome", "of_one", "of_seeds"),
    [
        ("supported", "holds in these runs", "supported"),
        ("contradicted", "fails in these runs", "contradicted"),
        ("not decided", "not decided", "not decided"),
        ("not tested", "not tested", "not tested"),
    ],
)
def test_a_verdict_from_single_trainings_is_of_these_runs(outcome, of_one, of_seeds):
    assert in_words(outcome, holds_seeds=False) == of_one
    assert in_words(outcome, holds_seeds=True) == of_seeds
