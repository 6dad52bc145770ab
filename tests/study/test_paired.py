"""What is said of differences: by document, against another library's paired test, and in words."""

import json
import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from ckpt_tools.holm import holm
from study.collect import trained
from study.layout import quantization_result
from study.paired import Order, Paired, Verdict
from study.released import ReleasedRevision, ReleasedRun
from study.settings import MeasuredModel, save_study
from study.summary import anneal_finding, findings, loss_finding, order_finding, summarize
from tests.study.synthetic import change_losses, per_document, result_of, table_of
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
    assert order_finding(order_of("abc", "higher", SAME, "higher"), "it", "peak").startswith(
        f"{head}rises with every step"
    )
    assert order_finding(order_of("abc", "lower", "lower", "lower"), "it", "peak").startswith(
        f"{head}falls with every step"
    )
    none = order_finding(order_of("abc", SAME, SAME, SAME), "it", "peak")
    assert none == f"{head}does not tell any two runs apart (peak a, b and c)."
    mixed = order_finding(order_of("abc", "higher", "lower", SAME), "it", "peak")
    assert mixed == f"{head}orders the runs by peak: a below b and c below a; the other pairs are not told apart."
    full = order_finding(order_of("abc", "higher", "higher", "lower"), "it", "peak")
    assert full == f"{head}orders the runs by peak: a below b, a below c and c below b."


def test_changes_are_said_of_the_runs_that_show_them():
    changes: dict[str, Verdict] = {"a": "higher", "b": "lower", "c": SAME, "d": "higher"}
    assert anneal_finding(changes, "it", "weight decay") == (
        "Over the anneal, it rose for weight decay a and d; it fell for weight decay b; it shows no change for weight "
        "decay c that could be told from none."
    )


def test_the_lowest_loss_is_named_with_those_that_may_be_as_low():
    losses = {"a": 3.1, "b": 3.0, "c": 3.05}
    head = "The lowest final loss is 3.000 nats per token, at peak b"
    assert (
        loss_finding(losses, order_of("abc", "lower", "lower", "higher"), "peak")
        == f"{head}, told apart from all others."
    )
    assert (
        loss_finding(losses, order_of("abc", "lower", "lower", SAME), "peak") == f"{head}; c is not told apart from it."
    )
    assert (
        loss_finding(losses, order_of("abc", SAME, "lower", SAME), "peak")
        == f"{head}; a and c are not told apart from it."
    )
    assert loss_finding({"b": 3.0}, {}, "peak") == f"{head}."


def test_a_study_is_summed_up_by_what_its_documents_bear_out(study_dir, study):
    """Losses of neighbours differ by less than their intervals, document by document the same way."""
    alike = kl_of(study_dir, "lr3e-3")
    # as far above as below the divergence of 0.003, document by document
    change_losses(study_dir, "lr1e-2", SPEC, kl=[kl * (1 + 0.3 * (-1) ** index) for index, kl in enumerate(alike)])
    rows = table_of(study_dir, study)
    said = findings(study, summarize(study, rows), Paired(study_dir))
    assert said[0] == (
        "The lowest final loss is 3.061 nats per token, at peak learning rate 0.01, told apart from all others."
    )
    intervals = [
        (row[f"quant/{SPEC}/cross_entropy_low"], row[f"quant/{SPEC}/cross_entropy_high"])
        for row in last_rows(study_dir, study).values()
    ]
    assert max(low for low, _ in intervals) < min(high for _, high in intervals), "all overlap"
    quantity = "the KL divergence (GPTQ, 3 bits, groups of 32)"
    assert (
        f"At the end of training, {quantity} orders the runs by peak learning rate: 0.001 below 0.003, 0.001 below "
        "0.01, 0.001 below 0.03, 0.003 below 0.03 and 0.01 below 0.03; the other pairs are not told apart."
    ) in said
    assert f"Over the anneal, {quantity} rose for peak learning rate 0.001, 0.003, 0.01 and 0.03." in said
    quantity = "the trace of the Hessian"
    assert said[-2:] == [
        f"Over the anneal, {quantity} rose for peak learning rate 0.001, 0.003, 0.01 and 0.03.",
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


WEIGHTS = {"lr1e-3": -1.5, "lr3e-3": -0.5, "lr1e-2": 0.5, "lr3e-2": 1.5}


def weighted(directory, study) -> list[tuple[dict, float]]:
    rows = last_rows(directory, study)
    return [(rows[run], weight) for run, weight in WEIGHTS.items()]


def test_a_contrast_is_a_mean_over_documents_where_they_are_alike(study_dir, study):
    """Documents of equal length: the weighted sum of divergences is a mean, and the one-sample t-test applies."""
    generator, kl_of_run = np.random.default_rng(0), {}
    for index, run in enumerate(study.runs):
        kl_of_run[run.name] = 2 + 0.02 * index + 0.1 * generator.normal(size=28)
        change_losses(study_dir, run.name, SPEC, tokens=[1000] * 28, kl=list(1000 * kl_of_run[run.name]))
    found = Paired(study_dir).contrast(weighted(study_dir, study), SPEC, "kl_divergence")
    test = ttest_1samp(sum(weight * kl_of_run[run] for run, weight in WEIGHTS.items()), 0)
    interval = test.confidence_interval(0.95)
    assert found.value == pytest.approx(test.statistic * test._standard_error)
    width = found.interval(0.95)[1] - found.interval(0.95)[0]
    assert width == pytest.approx(interval.high - interval.low, rel=0.1)  # of the bootstrap's and Student's quantile
    assert found.p_value() == pytest.approx(test.pvalue, abs=0.03)


def test_a_contrast_of_ratios_has_the_error_that_leaving_documents_out_shows(study_dir, study):
    """Relative errors, each over its own losses, of documents of other lengths: against the delete-one jackknife."""
    generator = np.random.default_rng(0)
    sums = {}
    for index, run in enumerate(study.runs):
        path = study_dir / run.name / f"hf/step{LAST:08d}/quant" / SPEC / "result.json"
        nll = np.array(json.loads(path.read_text())["measured"]["per_document"]["nll"])
        quantized = nll * (1.02 + 0.01 * index + 0.01 * generator.normal(size=28))
        change_losses(study_dir, run.name, SPEC, nll_quantized=list(quantized))
        sums[run.name] = (nll, quantized)

    def contrast(kept) -> float:
        return sum(
            weight * (sums[run][1][kept].sum() / sums[run][0][kept].sum() - 1) for run, weight in WEIGHTS.items()
        )

    whole = np.arange(28)
    left_out = np.array([contrast(np.delete(whole, document)) for document in whole])
    error = math.sqrt(27 / 28 * ((left_out - left_out.mean()) ** 2).sum())
    found = Paired(study_dir).contrast(weighted(study_dir, study), SPEC, "relative_error")
    assert found.value == pytest.approx(contrast(whole))
    low, high = found.interval(0.6826895)  # of a normal error: one standard error to either side
    assert (high - low) / 2 == pytest.approx(error, rel=0.1)


def test_a_contrast_needs_one_text(study_dir, study):
    path = study_dir / "lr3e-3/hf/step00000640/quant" / SPEC / "result.json"
    rows = weighted(study_dir, study)
    for key, value, words in (("sha256", "1" * 64, "the text"), ("sequence_length", 64, "sequence_length")):
        content = json.loads(path.read_text())
        kept = content["spec"]["evaluation"][key]
        content["spec"]["evaluation"][key] = value
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"differ in {words}"):
            Paired(study_dir).contrast(rows, SPEC, "kl_divergence")
        content["spec"]["evaluation"][key] = kept
        path.write_text(json.dumps(content))


def test_released_checkpoints_lie_under_the_names_of_their_revisions(tmp_path, study):
    revisions = [ReleasedRevision(name=f"stage1-step{step}", step=step) for step in (1000, 2000)]
    run = ReleasedRun(name="stage1", source="someone/model", revisions=tuple(revisions))
    save_study(tmp_path, study.model_copy(update={"runs": (run,), "labels": {}, "soups": (), "averaged_steps": ()}))
    rows = []
    for revision, error in zip(revisions, (0.02, 0.03), strict=True):
        model = MeasuredModel(revision.step, revision=revision.name)
        result = result_of(tmp_path, SPEC, per_document(4.0, 4 * error, 4 * error))
        path = tmp_path / quantization_result("stage1", model, SPEC)
        assert f"hf/{revision.name}/quant" in str(path)
        path.parent.mkdir(parents=True)
        write_json(path, result)
        rows.append({"run": "stage1", "step": revision.step, "average": None, f"quant/{SPEC}/kl_divergence": 4 * error})
    assert Paired(tmp_path).verdicts([(rows[0], rows[1])], SPEC, "kl_divergence") == ["higher"]
