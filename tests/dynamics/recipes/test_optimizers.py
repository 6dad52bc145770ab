"""The comparison of optimizers: what its runs share, and what each optimizer is compared at."""

import pytest

from study.design import control_among
from study.machine.hardware import planned
from study.machine.needs import Needs
from study.machine.prices import Prices
from study.recipes.resolve import resolve
from study.steps import steps_of
from tests.present import present

# Of arXiv 2509.02046 at 130M parameters, with a factor of two below and above. Muon's 0.016 there
# moves an entry of a matrix of 512 columns by 0.016 / sqrt(512), here a rate times 0.2.
PEAKS = {
    "adamw": [4e-3, 8e-3, 1.6e-2],
    "muon": [2e-3, 4e-3, 8e-3],
    "soap": [4e-3, 8e-3, 1.6e-2],
    "lion": [5e-4, 1e-3, 2e-3],
}


def test_each_optimizer_has_three_peaks_at_equal_tokens_with_controls():
    study = resolve("olmo2-30m-optimizers", "full")
    annealed = [run for run in study.trained if run.schedule.anneal]
    peaks: dict[str, list[float]] = {}
    for run in annealed:
        peaks.setdefault(run.optimizer.matrices, []).append(run.optimizer.peak_lr)
        assert control_among(study.trained, run) is not None
    assert peaks == PEAKS
    assert PEAKS["muon"][1] == pytest.approx(0.016 / 512**0.5 / 0.2, rel=0.15)
    assert {run.total_tokens for run in study.trained} == {1_344 * 64 * 2048}
    # An anneal over the last quarter, after a warm-up over a tenth.
    assert {present(run.schedule.anneal).start_step for run in annealed} == {1_008}
    assert {run.warmup_steps for run in annealed} == {134}
    # Nothing else is an axis, so that every label says both.
    assert [axis.key for axis in study.axes] == ["matrices", "peak_lr"]


def test_it_is_below_two_hours_of_one_gpu():
    study = resolve("olmo2-30m-optimizers", "full")
    needs = Needs(study, planned(1, "h100", 1))
    prices = Prices(needs, steps_of(study), "h100").by_kind()
    most = sum(price.hours.most for price in prices if price.hours)
    assert 0.5 < most < 2
