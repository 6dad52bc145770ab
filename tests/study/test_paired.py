"""What is said of differences: by document, against another library's paired test, and in words."""

import json
import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from ckpt_tools.holm import holm
from study.collect import trained
from study.paired import Order, Paired, Verdict
from study.summary import anneal_finding, findings, loss_finding, order_finding, summarize
from tests.study.synthetic import change_losses, table_of
from train.command import UserError
from train.run_directory import write_json

SPEC, LAST = "gptq-b3-g32", 640


def last_rows(directory, study) -> dict[str, dict]:
    rows = trained(table_of(directory, study))
    return {row["run"]: row for row in rows if row["step"] == LAST}


def kl_of(directory, run: str) -> list[float]:
    path = directory / run / f"hf/step{LAST:08d}/quant" / SPEC / "result.json"
    return json.loads(path.read_text())["measured"]["per_document"]["kl"]


def test_the_verdicts_are_those_of_a_paired_t_test_with_holm(study_dir, study):
    """Documents of equal length, where the divergence is a mean over documents and the t-test applies."""
    generator = np.random.default_rng(0)
    base = generator.lognormal(size=28)
    for run, shift in zip(study.runs, (0.0, 0.0, 0.5, 0.5), strict=True):
        kl = base + shift + 0.08 * generator.normal(size=28)
        change_losses(study_dir, run.name, SPEC, tokens=[1000] * 28, kl=[1000 * value for value in kl])
    rows = last_rows(study_dir, study)
    order = Paired(study_dir).order(rows, SPEC, "kl_divergence")
    tests = {pair: ttest_rel(kl_of(study_dir, pair[1]), kl_of(study_dir, pair[0])) for pair in order}
    adjusted = dict(zip(tests, holm([test.pvalue for test in tests.values()]), strict=True))
    assert all(not 0.02 < p < 0.1 for p in adjusted.values()), "no pair is near the border, where the tests may differ"
    expected = {
        pair: ("higher" if test.statistic > 0 else "lower") if adjusted[pair] < 0.05 else "not told apart"
        for pair, test in tests.items()
    }
    assert order == expected
    assert sorted(order.values()) == ["higher"] * 4 + ["not told apart"] * 2
    # each for itself, all their intervals would overlap
    errors = [np.std(kl_of(study_dir, run.name)) / math.sqrt(28) / 1000 for run in study.runs]
    assert min(errors) > 0.5 / 4


def test_the_direction_is_that_of_the_second_row(study_dir, study):
    rows = last_rows(study_dir, study)
    low, high = rows["lr1e-3"], rows["lr3e-2"]
    assert Paired(study_dir).verdicts([(low, high), (high, low)], SPEC, "kl_divergence") == ["higher", "lower"]
    assert Paired(study_dir).verdicts([], SPEC, "kl_divergence") == []


def test_results_of_other_documents_or_another_time_are_refused(study_dir, study):
    rows = last_rows(study_dir, study)
    pair = [(rows["lr1e-3"], rows["lr3e-3"])]
    path = study_dir / "lr3e-3/hf/step00000640/quant" / SPEC / "result.json"
    whole = path.read_text()
    content = json.loads(whole)
    content["measured"]["per_document"]["document"][0] = 99
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="other documents"):
        Paired(study_dir).verdicts(pair, SPEC, "kl_divergence")
    path.write_text(whole)
    change_losses(study_dir, "lr3e-3", SPEC, kl=[2 * value for value in kl_of(study_dir, "lr3e-3")])
    with pytest.raises(UserError, match="another kl_divergence than the table; run 'python -m study collect'"):
        Paired(study_dir).verdicts(pair, SPEC, "kl_divergence")
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        Paired(study_dir).verdicts(pair, SPEC, "kl_divergence")


def order_of(labels: str, *verdicts: Verdict) -> Order:
    pairs = [(first, second) for index, first in enumerate(labels) for second in labels[index + 1 :]]
    return dict(zip(pairs, verdicts, strict=True))


SAME: Verdict = "not told apart"


def test_orders_are_said_as_far_as_pairs_are_told_apart():
    head = "At the end of training, it "
    assert order_finding(order_of("abc", "higher", SAME, "higher"), "it").startswith(f"{head}rises with every step")
    assert order_finding(order_of("abc", "lower", "lower", "lower"), "it").startswith(f"{head}falls with every step")
    assert (
        order_finding(order_of("abc", SAME, SAME, SAME), "it")
        == f"{head}does not tell any two peak learning rates apart."
    )
    mixed = order_finding(order_of("abc", "higher", "lower", SAME), "it")
    assert (
        mixed == f"{head}orders these peak learning rates: a below b and c below a; the other pairs are not told apart."
    )
    full = order_finding(order_of("abc", "higher", "higher", "lower"), "it")
    assert full == f"{head}orders these peak learning rates: a below b, a below c and c below b."


def test_changes_are_said_of_the_runs_that_show_them():
    changes: dict[str, Verdict] = {"a": "higher", "b": "lower", "c": SAME, "d": "higher"}
    assert anneal_finding(changes, "it") == (
        "Over the anneal, it rose for peak learning rates a and d; it fell for peak learning rate b; it shows no "
        "change for peak learning rate c that could be told from none."
    )


def test_the_lowest_loss_is_named_with_those_that_may_be_as_low():
    losses = {"a": 3.1, "b": 3.0, "c": 3.05}
    head = "The lowest final loss is 3.000 nats per token, at a peak learning rate of b"
    assert loss_finding(losses, order_of("abc", "lower", "lower", "higher")) == f"{head}, told apart from all others."
    assert loss_finding(losses, order_of("abc", "lower", "lower", SAME)) == f"{head}; c is not told apart from it."
    assert loss_finding(losses, order_of("abc", SAME, "lower", SAME)) == f"{head}; a and c are not told apart from it."
    assert loss_finding({"b": 3.0}, {}) == f"{head}."


def test_a_study_is_summed_up_by_what_its_documents_bear_out(study_dir, study):
    """Losses of neighbours differ by less than their intervals, document by document the same way."""
    alike = kl_of(study_dir, "lr3e-3")
    # as far above as below the divergence of 0.003, document by document
    change_losses(study_dir, "lr1e-2", SPEC, kl=[kl * (1 + 0.3 * (-1) ** index) for index, kl in enumerate(alike)])
    rows = table_of(study_dir, study)
    said = findings(study, summarize(study, rows), Paired(study_dir))
    assert said[0] == (
        "The lowest final loss is 3.061 nats per token, at a peak learning rate of 0.01, told apart from all others."
    )
    intervals = [
        (row[f"quant/{SPEC}/cross_entropy_low"], row[f"quant/{SPEC}/cross_entropy_high"])
        for row in last_rows(study_dir, study).values()
    ]
    assert max(low for low, _ in intervals) < min(high for _, high in intervals), "all overlap"
    quantity = "the KL divergence (GPTQ, 3 bits, groups of 32)"
    assert (
        f"At the end of training, {quantity} orders these peak learning rates: 0.001 below 0.003, 0.001 below 0.01, "
        "0.001 below 0.03, 0.003 below 0.03 and 0.01 below 0.03; the other pairs are not told apart."
    ) in said
    assert f"Over the anneal, {quantity} rose for peak learning rates 0.001, 0.003, 0.01 and 0.03." in said
    quantity = "the trace of the Hessian"
    assert said[-2:] == [
        f"Over the anneal, {quantity} rose for peak learning rates 0.001, 0.003, 0.01 and 0.03.",
        f"At the end of training, {quantity} falls with every step of the peak learning rate.",
    ]


def change_trace(directory, run: str, values: list[float], step: int = LAST) -> None:
    """Gives a result other products of the microbatches."""
    path = directory / run / f"hf/step{step:08d}/curvature/hutchinson/result.json"
    content = json.loads(path.read_text())
    content["measured"]["trace"] |= {"mean": float(np.mean(values)), "per_microbatch": values}
    write_json(path, content)


def test_traces_are_compared_microbatch_by_microbatch(study_dir, study):
    """By another library's paired test; each for itself, their intervals overlap."""
    generator = np.random.default_rng(0)
    base = 1000 + 300 * generator.normal(size=16)
    for run, shift in zip(study.runs, (0.0, 0.0, 60.0, 60.0), strict=True):
        change_trace(study_dir, run.name, list(base + shift + 20 * generator.normal(size=16)))
    rows = last_rows(study_dir, study)
    order = Paired(study_dir).order_of_traces(rows)
    results = [study_dir / run.name / "hf/step00000640/curvature/hutchinson/result.json" for run in study.runs]
    found = {path.parts[-6]: json.loads(path.read_text())["measured"]["trace"]["per_microbatch"] for path in results}
    tests = {(first, second): ttest_rel(found[second], found[first]) for first, second in order}
    adjusted = dict(zip(tests, holm([test.pvalue for test in tests.values()]), strict=True))
    assert all(not 0.02 < p < 0.1 for p in adjusted.values()), "no pair is near the border"
    assert order == {
        pair: ("higher" if test.statistic > 0 else "lower") if adjusted[pair] < 0.05 else "not told apart"
        for pair, test in tests.items()
    }
    assert sorted(order.values()) == ["higher"] * 4 + ["not told apart"] * 2
    assert np.std(base) / 4 > 60, "by their own errors no two would be told apart"
    low, high = rows["lr1e-3"], rows["lr3e-2"]
    assert Paired(study_dir).traces([(low, high), (high, low)]) == ["higher", "lower"]
    assert Paired(study_dir).traces([]) == []


def test_traces_of_other_pairs_or_another_time_are_refused(study_dir, study):
    rows = last_rows(study_dir, study)
    pair = [(rows["lr1e-3"], rows["lr3e-3"])]
    path = study_dir / "lr3e-3/hf/step00000640/curvature/hutchinson/result.json"
    whole = path.read_text()
    content = json.loads(whole)
    content["spec"]["seed"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="not measured on the same"):
        Paired(study_dir).traces(pair)
    path.write_text(whole)
    change_trace(study_dir, "lr3e-3", [900.0 + index for index in range(16)])
    with pytest.raises(UserError, match="another trace than the table; run 'python -m study collect'"):
        Paired(study_dir).traces(pair)
    path.write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        Paired(study_dir).traces(pair)
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        Paired(study_dir).traces(pair)
