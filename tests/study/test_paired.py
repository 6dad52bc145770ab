"""Statements on differences: by document, against another library's paired test, and in words."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from base.errors import UserError
from quant_eval.estimate import Crossed, estimate_of
from study.definition import save_study
from study.measurements.quantization import DIVERGENCE, RELATIVE_ERROR
from study.paths import quantization_result, released_model
from study.released import ReleasedRevision, ReleasedRun
from study.results.paired import Paired
from study.results.table import Row, trained
from tests.sealing import edited, measured_in, reseal
from tests.study.synthetic import change_losses, per_document, result_of, table_of, write_result

SPEC, LAST = "gptq-b3-g32", 640


def last_rows(directory, study) -> dict[str, Row]:
    rows = trained(table_of(directory, study))
    return {row["run"]: row for row in rows if row["step"] == LAST}


def last_result(directory, run: str) -> Path:
    return directory / run / f"hf/step{LAST:08d}/quant" / SPEC / "result.json"


def sums_of(directory, run: str) -> dict[str, list[float]]:
    """The sums of every document of the last weights of a run."""
    return measured_in(last_result(directory, run))["per_document"]


WEIGHTS = {"lr1e-3": -1.5, "lr3e-3": -0.5, "lr1e-2": 0.5, "lr3e-2": 1.5}


def weighted(directory, study) -> list[tuple[Row, float]]:
    rows = last_rows(directory, study)
    return [(rows[run], weight) for run, weight in WEIGHTS.items()]


def test_a_contrast_is_a_mean_over_documents_where_they_are_alike(study_dir, study):
    """Documents of equal length: the weighted sum of divergences is a mean, and the one-sample
    t-test applies.
    """
    generator, kl_of_run = np.random.default_rng(0), {}
    for index, run in enumerate(study.runs):
        kl_of_run[run.name] = 2 + 0.02 * index + 0.1 * generator.normal(size=28)
        change_losses(
            study_dir, run.name, SPEC, tokens=[1000] * 28, kl=list(1000 * kl_of_run[run.name])
        )
    estimate = Paired(study_dir).estimate([weighted(study_dir, study)], SPEC, DIVERGENCE)
    test = ttest_1samp(sum(weight * kl_of_run[run] for run, weight in WEIGHTS.items()), 0)
    assert estimate.value == pytest.approx(test.statistic * test._standard_error)
    assert estimate.interval() == pytest.approx(test.confidence_interval(0.95))
    assert estimate.p_value() == pytest.approx(test.pvalue)


def test_a_contrast_of_ratios_has_the_error_that_leaving_documents_out_shows(study_dir, study):
    """Relative errors, each over its own losses, of documents of other lengths: against the
    delete-one jackknife.
    """
    generator = np.random.default_rng(0)
    sums = {}
    for index, run in enumerate(study.runs):
        nll = np.array(sums_of(study_dir, run.name)["nll"])
        quantized = nll * (1.02 + 0.01 * index + 0.01 * generator.normal(size=28))
        change_losses(study_dir, run.name, SPEC, nll_quantized=list(quantized))
        sums[run.name] = (nll, quantized)

    def contrast(kept) -> float:
        return sum(
            weight * (sums[run][1][kept].sum() / sums[run][0][kept].sum() - 1)
            for run, weight in WEIGHTS.items()
        )

    whole = np.arange(28)
    left_out = np.array([contrast(np.delete(whole, document)) for document in whole])
    error = math.sqrt(27 / 28 * ((left_out - left_out.mean()) ** 2).sum())
    estimate = Paired(study_dir).estimate([weighted(study_dir, study)], SPEC, RELATIVE_ERROR)
    assert estimate.value == pytest.approx(contrast(whole))
    assert estimate.standard_error == pytest.approx(error)


def write_draws(directory, run: str, values_DK, tokens) -> None:
    """Gives a result the divergence of every document by every calibration draw."""
    change_losses(directory, run, SPEC, kl=list(values_DK.mean(1) * tokens), tokens=list(tokens))
    with edited(last_result(directory, run)) as content:
        sums, draws = content["measured"]["per_document"], values_DK.shape[1]
        drawn = {name: [sums[name]] * draws for name in ("nll_quantized", "agreements")}
        drawn["kl"] = (values_DK.T * tokens).tolist()
        content["measured"]["calibration"] = {"seeds": draws, "per_document": drawn}


def test_an_estimate_is_over_the_runs_with_documents_and_draws(study_dir, study):
    """Four runs as two replicates of a difference: the mean over both and, of documents of equal
    length, the estimate of their own values.
    """
    generator = np.random.default_rng(0)
    tokens = np.full(28, 500.0)
    values = 1 + generator.normal(size=(4, 28, 3)) + generator.normal(size=(4, 1, 1))
    for run, values_DK in zip(study.runs, values, strict=True):
        write_draws(study_dir, run.name, values_DK, tokens)
    rows = [last_rows(study_dir, study)[run.name] for run in study.runs]
    replicates = [[(rows[1], 1.0), (rows[0], -1.0)], [(rows[3], 1.0), (rows[2], -1.0)]]
    estimate = Paired(study_dir).estimate(replicates, SPEC, DIVERGENCE)
    expected = estimate_of(Crossed(np.stack([values[1] - values[0], values[3] - values[2]])))
    assert estimate.value == pytest.approx(expected.value)
    assert estimate.interval() == pytest.approx(expected.interval())
    assert estimate.sources.keys() == {"seeds", "documents", "calibration draws"}
    assert estimate.holds_seeds
    alone = Paired(study_dir).estimate(replicates[:1], SPEC, DIVERGENCE)
    assert alone.value == pytest.approx((values[1] - values[0]).mean())
    assert not alone.holds_seeds

    write_draws(study_dir, study.runs[3].name, values[3, :, :2], tokens)
    rows[3] = last_rows(study_dir, study)[study.runs[3].name]
    replicates = [replicates[0], [(rows[3], 1.0), (rows[2], -1.0)]]
    with pytest.raises(UserError, match="differ in the number of calibration draws"):
        Paired(study_dir).estimate(replicates, SPEC, DIVERGENCE)


def evaluation(**values):
    return lambda content: content["spec"]["evaluation"].update(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda content: content["measured"]["per_document"].update(document=[*range(1, 29)]),
            "differ in the documents",
        ),
        (
            lambda content: content["measured"].update(kl_divergence=9.0),
            "another kl_divergence than the table; run 'python -m study collect'",
        ),
        (evaluation(sha256="1" * 64), "differ in the text"),
        (evaluation(sequence_length=64), "differ in sequence_length"),
        (evaluation(bos_token_ids=[1]), "differ in bos_token_ids"),
    ],
)
def test_results_of_other_texts_or_another_time_are_refused(study_dir, study, change, words):
    rows = weighted(study_dir, study)
    with edited(last_result(study_dir, "lr3e-3")) as content:
        change(content)
    with pytest.raises(UserError, match=words):
        Paired(study_dir).estimate([rows], SPEC, DIVERGENCE)
    last_result(study_dir, "lr3e-3").unlink()
    with pytest.raises(UserError, match="does not exist"):
        Paired(study_dir).estimate([rows], SPEC, DIVERGENCE)


def test_an_estimate_over_few_documents_is_refused(study_dir, study):
    few = {name: sums[:19] for name, sums in per_document(4.0, 0.1, 0.1).items()}
    for run in study.runs:
        path = last_result(study_dir, run.name)
        reseal(path, result_of(path.parents[2], SPEC, few))
    with pytest.raises(UserError, match="19 documents, which decide nothing; measure on more"):
        Paired(study_dir).estimate([weighted(study_dir, study)], SPEC, DIVERGENCE)


def test_released_checkpoints_lie_under_the_names_of_their_revisions(tmp_path, study):
    revisions = [ReleasedRevision(name=f"stage1-step{step}", step=step) for step in (1000, 2000)]
    run = ReleasedRun(
        name="stage1", model="model", source="someone/model", revisions=tuple(revisions)
    )
    save_study(
        tmp_path,
        study.model_copy(update={"runs": (run,), "labels": {}, "soups": (), "averaged_steps": ()}),
    )
    rows = []
    for revision, error in zip(revisions, (0.02, 0.03), strict=True):
        model = released_model(revision)
        result = result_of(tmp_path, SPEC, per_document(4.0, 4 * error, 4 * error))
        path = tmp_path / quantization_result("stage1", model, SPEC)
        assert f"hf/{revision.name}/quant" in str(path)
        write_result(path, result)
        row = {"run": "stage1", "step": revision.step, "average": None}
        rows.append(Row.of(row | {f"quant/{SPEC}/kl_divergence": 4 * error}))
    change = [[(rows[1], 1.0), (rows[0], -1.0)]]
    assert Paired(tmp_path).estimate(change, SPEC, DIVERGENCE).value == pytest.approx(0.04)
