"""The peak learning rate at equal loss, where the best one is planted."""

import json
import math

import numpy as np
import pytest

from base.errors import UserError
from dynamics.choices import text
from dynamics.choices.learning_rate import (
    QUANTIZED_LOSS,
    answers,
    at_equal_loss,
    at_equal_tokens,
    crossing,
    interpolated,
    sweeps,
)
from dynamics.claims.verdict import Evidence, Measure, NotTested
from study.results.paired import Paired
from study.results.table import Row
from tests.present import present
from tests.study.claimed import SPEC, rows_of, run_of, study_of
from tests.study.synthetic import TOKENS

BEST, PEAKS, SEEDS = 3e-3, (1e-3, 3e-3, 1e-2, 3e-2), (1, 2, 3)
LOSS = f"quant/{SPEC}/cross_entropy"


def loss_of(run, model) -> float:
    """Lowest for the largest peak, so that errors at the end rank otherwise than at equal loss."""
    place = math.log10(run.optimizer.peak_lr)
    return 4 - 0.3 * place - 0.8 * math.log10(model.step) + 0.01 * run.seed


def at_loss(peak: float, loss: float) -> float:
    """The planted error: log-linear in the loss, lowest for BEST."""
    return 0.02 * math.exp(0.5 * math.log10(peak / BEST) ** 2 - 1.5 * (loss - 3))


def error_of(run, model) -> float:
    return at_loss(run.optimizer.peak_lr, loss_of(run, model))


def evidence_of(directory, error=error_of, seeds=SEEDS, noise=0.02) -> Evidence:
    runs = [run_of(f"lr{peak:g}-seed{s}", peak, seed=s) for peak in PEAKS for s in seeds]
    study = study_of(*runs)
    rows = rows_of(directory / study.name, study, error, loss=loss_of, noise=noise)
    rows = [Row.of(row | {"study": study.name}) for row in rows]
    return Evidence(study, rows, Paired(directory / study.name))


@pytest.fixture(scope="module")
def evidence(tmp_path_factory) -> Evidence:
    return evidence_of(tmp_path_factory.mktemp("sweep"))


def peak_of(label: str) -> float:
    return float(label.split()[0])


def test_the_planted_peak_is_first_at_equal_loss_with_its_closed_form(evidence):
    of = Measure(evidence, SPEC, "relative_error")
    (sweep,) = sweeps(evidence.ends)
    assert list(sweep) == list(PEAKS)
    answer = at_equal_loss(of, sweep)
    at = max(present(end.last)[LOSS] for end in sweep[PEAKS[0]])  # the last to arrive
    assert f"{at:.4f}" in answer.where
    expected = {peak: at_loss(peak, at) for peak in PEAKS}
    assert [peak_of(entry.label) for entry in answer.ranking] == sorted(
        expected, key=expected.__getitem__
    )
    for entry in answer.ranking:
        assert entry.estimate.value == pytest.approx(expected[peak_of(entry.label)], rel=1e-6)
        low, high = entry.estimate.interval(0.95)
        assert low < expected[peak_of(entry.label)] < high
    best, *others = answer.ranking
    assert peak_of(best.label) == BEST
    assert all(present(entry.p_adjusted) < 0.05 for entry in others)
    for entry in others:
        difference = entry.estimate.value - best.estimate.value
        assert present(entry.excess).value == pytest.approx(difference, rel=1e-6)


def test_the_end_ranks_them_otherwise(evidence):
    """At equal tokens the lowest quantized loss is the largest peak's, as planted."""
    (sweep,) = sweeps(evidence.ends)
    answer = at_equal_tokens(Measure(evidence, SPEC, QUANTIZED_LOSS), sweep)
    ends = {
        peak: np.mean([present(end.last)[f"quant/{SPEC}/{QUANTIZED_LOSS}"] for end in own])
        for peak, own in sweep.items()
    }
    assert [peak_of(entry.label) for entry in answer.ranking] == sorted(ends, key=ends.__getitem__)
    assert peak_of(answer.ranking[0].label) != BEST


def test_a_loss_that_not_all_runs_pass_is_refused(evidence):
    (sweep,) = sweeps(evidence.ends)
    of = Measure(evidence, SPEC, "relative_error")
    with pytest.raises(UserError, match="--loss 2 is outside"):
        at_equal_loss(of, sweep, 2.0)
    highest = min(row[LOSS] for row in evidence.rows if row["step"] == 40)
    assert at_equal_loss(of, sweep, highest - 1e-6).ranking
    with pytest.raises(UserError, match="is outside"):
        at_equal_loss(of, sweep, highest + 1e-3)


def test_an_error_without_logarithm_is_not_ranked_and_the_rest_is(tmp_path):
    evidence = evidence_of(
        tmp_path,
        lambda run, model: -0.001 if run.optimizer.peak_lr == BEST else error_of(run, model),
        seeds=(1,),
    )
    results = answers(evidence)
    assert [bool(answer.ranking) for answer in results] == [False, False, True]
    words = text.answers_text(results)
    assert "is not positive" in words
    assert words.startswith("quantized loss")


def test_a_study_without_a_sweep_is_refused(tmp_path):
    study = study_of(run_of("one"), run_of("two", seed=2))
    with pytest.raises(UserError, match="no two runs of"):
        answers(Evidence(study, [], Paired(tmp_path)))


def rows(*points: tuple[float, float]) -> list[Row]:
    return [
        Row.of({"study": "s", "run": "r", "phase": "stable", "step": step, LOSS: loss, "e": error})
        for step, (loss, error) in enumerate(points)
    ]


def test_the_last_of_several_crossings_counts():
    at = crossing(rows((4, 1), (3, 2), (3.5, 4), (2.5, 8)), LOSS, 3.25)
    assert (at.first["step"], at.second["step"], at.share) == (2, 3, 0.25)
    weights = interpolated(at, "e")
    assert sum(row["e"] * weight for row, weight in weights) == pytest.approx(4 * 2**0.25)
    with pytest.raises(NotTested):
        crossing(rows((4, 1), (3, 2)), LOSS, 2.0)


def test_the_standard_error_is_that_of_leaving_documents_out(tmp_path):
    """Against the jackknife of the interpolated error itself, not of its linear form."""
    evidence = evidence_of(tmp_path, seeds=(1,), noise=0.2)
    of = Measure(evidence, SPEC, "relative_error")
    (sweep,) = sweeps(evidence.ends)
    at = max(present(own[0].last)[LOSS] for own in sweep.values())
    ranking = at_equal_loss(of, sweep, at + 0.05).ranking
    path = [row for row in evidence.rows if row["run"] == f"lr{BEST:g}-seed1"]
    place, directory = crossing(path, LOSS, at + 0.05), tmp_path / evidence.study.name
    left_out = []
    for document in range(len(TOKENS)):
        logs = []
        for row in (place.first, place.second):
            result = directory / row["run"] / f"hf/step{row['step']:08d}/quant/{SPEC}/result.json"
            sums = json.loads(result.read_text())["measured"]["per_document"]
            nll, quantized = (
                np.delete(sums[name], document).sum() for name in ("nll", "nll_quantized")
            )
            logs.append(math.log(quantized / nll - 1))
        left_out.append(math.exp((1 - place.share) * logs[0] + place.share * logs[1]))
    count = len(left_out)
    expected = math.sqrt((count - 1) / count * (np.std(left_out) ** 2 * count))
    own = next(entry for entry in ranking if peak_of(entry.label) == BEST)
    assert own.estimate.standard_error == pytest.approx(expected, rel=0.1)
