"""Optimizers at their best peaks, where losses and errors are planted."""

import math
import re

import pytest

from dynamics.choices.optimizers import at_best_peak, optimizers_line
from study.claims.verdict import Evidence, Measure
from study.measurements.quantization import RELATIVE_ERROR
from study.results.paired import Paired
from study.results.table import Row
from tests.study.claimed import SPEC, rows_of, run_of, study_of
from train.optimizers.adamw import AdamW
from train.optimizers.lion import Lion

BEST = {"adamw": 4e-3, "lion": 1e-3}  # by the loss; lion's is the largest that was tried
ERRORS = {"adamw": 0.04, "lion": 0.02}  # at 1e-3, in proportion to the square root of the peak


def loss_of(run, model) -> float:
    distance = math.log2(run.optimizer.peak_lr / BEST[run.optimizer.matrices])
    return 3 + 0.01 * distance**2 + 0.5 * (model.step < 400)


def error_of(run, model) -> float:
    return ERRORS[run.optimizer.matrices] * math.sqrt(run.optimizer.peak_lr / 1e-3)


def evidence_of(directory, optimizers) -> Evidence:
    runs = [run_of(f"{each.matrices}-{each.peak_lr:g}", optimizer=each) for each in optimizers]
    return evidence_of_runs(directory, runs)


def evidence_of_runs(directory, runs) -> Evidence:
    study = study_of(*runs)
    rows = rows_of(directory / study.name, study, error_of, loss=loss_of)
    rows = [Row.of(row | {"study": study.name}) for row in rows]
    return Evidence(study, rows, Paired(directory / study.name))


def test_each_optimizer_is_compared_at_the_peak_of_its_lowest_loss(tmp_path):
    peaks = [(AdamW, (2e-3, 4e-3, 8e-3)), (Lion, (2.5e-4, 5e-4, 1e-3))]
    optimizers = [kind(peak_lr=peak) for kind, tried in peaks for peak in tried]
    evidence = evidence_of(tmp_path, optimizers)
    best = at_best_peak(Measure(evidence, SPEC, RELATIVE_ERROR))
    assert {name: each.peak for name, each in best.items()} == BEST
    assert [each.loss for each in best.values()] == pytest.approx([3.0, 3.0], abs=1e-6)

    line = optimizers_line(evidence)
    # Lion's error is 2%, AdamW's 4% times two; the divergence is planted in proportion.
    found = re.search(
        r"KL divergence \(.*\) in 10\^-3 nats/token, each optimizer .* lion at 0\.001 \(3\.0000 nats\)"
        r" has the lowest, (\S+) \[.*\]; adamw at 0\.004 \(3\.0000 nats\) (\S+) \[.*\] more, Holm p",
        line,
    )
    assert found
    lowest, excess = map(float, found.groups())
    assert excess / lowest == pytest.approx(3, rel=0.02)
    assert line.endswith("No peak beyond the best of lion was tried: a better one may exist.")


def test_optimizers_of_other_runs_are_not_compared(tmp_path):
    peaks = [(AdamW, (2e-3, 4e-3), {}), (Lion, (2.5e-4, 5e-4), {"batch_size": 32})]
    runs = [
        run_of(f"{kind.__name__}-{peak:g}", optimizer=kind(peak_lr=peak), **settings)
        for kind, tried, settings in peaks
        for peak in tried
    ]
    assert not optimizers_line(evidence_of_runs(tmp_path, runs))


def test_a_sweep_of_one_optimizer_has_no_such_line(tmp_path):
    assert not optimizers_line(evidence_of(tmp_path, [AdamW(peak_lr=2e-3), AdamW(peak_lr=4e-3)]))
