"""The power law in tokens against the decay, where the truth is known by construction."""

import math
from functools import partial
from itertools import count

import numpy as np
import pytest

from dynamics.claims.tokens import tokens
from dynamics.claims.verdict import Evidence
from study.design import with_controls
from study.results.paired import Paired
from tests.study.claimed import rows_of, run_of, study_of

PEAKS = {"a": 1e-3, "b": 2e-3, "c": 4e-3, "d": 8e-3, "e": 1.6e-2, "f": 3.2e-2}


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
    runs = [run_of(name, peak=peak) for name, peak in PEAKS.items()]
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
    assert verdict.statistic == "annealed runs with a measured control, but for seeds: 1"
