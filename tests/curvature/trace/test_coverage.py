"""Bias and coverage of traces over many repetitions, with the noise of the microbatches and of the probes.

A share of R repetitions has standard error sqrt(0.95 x 0.05 / R): 0.7% with 1000, so 93 to 97% are three of them.

Shapes: R repetitions, M microbatches, K probes of a microbatch, T tensors.
"""

import math
import statistics

import numpy as np
import pytest
import torch
from scipy.special import stdtrit
from torch import Tensor

from curvature.trace.hutchinson import Quadratic, TraceEstimate, estimate_trace
from tests.curvature.trace.conftest import Population

BLOCKS = {"model.embed_tokens": "embedding", "model.layers": "layer0", "model.norm": "head", "lm_head": "head"}


def block_of(name: str) -> str:
    return next(block for prefix, block in BLOCKS.items() if name.startswith(prefix))


def estimate(dots_MKT: Tensor, names: list[str], relative_error: float | None = None) -> TraceEstimate:
    microbatches, probes, _ = dots_MKT.shape
    rows = dots_MKT.flatten(0, 1).tolist()
    return estimate_trace(
        lambda pairs: [Quadratic(1.0, 0.0, dict(zip(names, rows[pair], strict=True))) for pair in pairs],
        pairs=microbatches * probes,
        probes_per_microbatch=probes,
        relative_error=relative_error,
        block_of=block_of,
    )


def exact(population: Population) -> dict[str, float]:
    """The exact trace of every block and of the whole Hessian."""
    blocks = dict.fromkeys(BLOCKS.values(), 0.0)
    for name, value in population.traces().items():
        blocks[block_of(name)] += value
    return blocks | {"total": math.fsum(blocks.values())}


def coverages(population: Population, results: list[TraceEstimate]) -> dict[str, float]:
    """The share of the intervals that hold the exact trace, for the total and every block."""
    shares = {}
    for name, value in exact(population).items():
        intervals = [(each.total if name == "total" else each.blocks[name]).interval for each in results]
        shares[name] = float(np.mean([low <= value <= high for low, high in intervals]))
    return shares


def check_bias_and_coverage(population: Population, repetitions: int, microbatches: int, probes: int) -> None:
    dots_RMKT = population.draw(repetitions, microbatches, probes, seed=microbatches + probes)
    results = [estimate(dots_MKT, population.names) for dots_MKT in dots_RMKT]
    for name, value in exact(population).items():
        means = np.array([(each.total if name == "total" else each.blocks[name]).mean for each in results])
        assert abs(means.mean() - value) < 3 * means.std(ddof=1) / math.sqrt(repetitions), name
    shares = coverages(population, results)
    assert all(0.93 <= share <= 0.97 for share in shares.values()), shares


@pytest.mark.parametrize("microbatches", [16, 32, 64])
def test_traces_are_unbiased_and_their_intervals_cover(population, microbatches):
    check_bias_and_coverage(population, 1000, microbatches, 1)


@pytest.mark.stress
@pytest.mark.parametrize("probes", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [16, 32, 64])
def test_traces_are_unbiased_and_their_intervals_cover_at_length(population, microbatches, probes):
    check_bias_and_coverage(population, 4000, microbatches, probes)


@pytest.mark.parametrize(("probes", "most"), [(2, 0.93), (4, 0.90)])
def test_errors_over_microbatches_hold_where_those_over_pairs_fail(population, probes, most):
    """Probes of one microbatch share its noise: taken as independent pairs their intervals are too narrow."""
    repetitions, microbatches = 1000, 32
    dots_RMKT = population.draw(repetitions, microbatches, probes, seed=7)
    shares = coverages(population, [estimate(dots_MKT, population.names) for dots_MKT in dots_RMKT])
    assert all(0.93 <= share <= 0.97 for share in shares.values()), shares
    pairs_Rn = dots_RMKT.sum(dim=-1).flatten(1).numpy()
    count = microbatches * probes
    half_R = stdtrit(count - 1, 0.975) * pairs_Rn.std(axis=1, ddof=1) / math.sqrt(count)
    naive = float(np.mean(abs(pairs_Rn.mean(axis=1) - exact(population)["total"]) <= half_R))
    assert naive < most, naive


@pytest.fixture(scope="module")
def pool(population) -> Tensor:
    """v'Hv of 2000 probes of every microbatch: mean 21, standard deviation 33, skewness -1, kurtosis 3 above normal."""
    return torch.stack([population.dots(d, 2000, seed=3).sum(dim=-1) for d in range(len(population.hessians_DPP))])


def check_stopped(pool: Tensor, repetitions: int, relative_error: float, *, least: float = 0.93) -> None:
    """The hardest case at hand: the variance depends on the kind of text, so mean and standard error are correlated.

    Values are drawn from the pool with replacement, so what is estimated is the mean of the pool.
    """
    generator, trace = torch.Generator().manual_seed(4), float(pool.mean())
    places_RM = torch.randint(pool.numel(), (repetitions, 512), generator=generator)
    results = [estimate(values_M[:, None, None], ["lm_head"], relative_error) for values_M in pool.flatten()[places_RM]]
    length = statistics.fmean(each.microbatches for each in results)
    assert 64 < length < 400, "the rule decides here, neither the minimum nor the end"
    share = statistics.fmean(each.total.interval[0] <= trace <= each.total.interval[1] for each in results)
    assert least <= share <= 0.97, (relative_error, share, length)


def test_intervals_cover_when_the_rule_stops(pool):
    check_stopped(pool, 1000, 0.15)


@pytest.mark.stress
@pytest.mark.parametrize("relative_error", [0.11, 0.14])
def test_intervals_cover_wherever_the_rule_stops(pool, relative_error):
    """At 0.11, the worst target, 93.3% of 80,000 simulated held; 10,000 tell 93% to 0.25%, which is granted."""
    check_stopped(pool, 10_000, relative_error, least=0.9275)
