"""Bias and coverage of traces over many repetitions, with the noise of the microbatches and of
the probes.

A share of R repetitions has standard error sqrt(0.95 x 0.05 / R): 0.7% with 1000, so 93 to 97% are
three of them.

Shapes: R repetitions, M microbatches, T tensors.
"""

import math

import numpy as np
import pytest
from torch import Tensor

from base.ranks import ALONE
from curvature.products.exact import Quadratic
from curvature.products.parameters import block_of
from curvature.products.sharing import Sharing
from curvature.trace.hutchinson import TraceEstimate, estimate_trace
from tests.curvature.trace.conftest import Population


def estimate(dots_MT: Tensor, names: list[str]) -> TraceEstimate:
    samples = [Quadratic(1.0, 0.0, dict(zip(names, row, strict=True))) for row in dots_MT.tolist()]
    return estimate_trace(
        samples.__getitem__, names, pairs=len(dots_MT), sharing=Sharing(ALONE, False)
    )


def exact(population: Population) -> dict[str, float]:
    """The exact trace of every block and of the whole Hessian."""
    blocks = dict.fromkeys(("embedding", "layer0", "head"), 0.0)
    for name, value in population.traces().items():
        blocks[block_of(name)] += value
    return blocks | {"total": math.fsum(blocks.values())}


def coverages(population: Population, results: list[TraceEstimate]) -> dict[str, float]:
    """The share of the intervals that hold the exact trace, for the total and every block."""
    shares = {}
    for name, value in exact(population).items():
        intervals = [
            (each.total if name == "total" else each.blocks[name]).interval for each in results
        ]
        shares[name] = float(np.mean([low <= value <= high for low, high in intervals]))
    return shares


def check_bias_and_coverage(population: Population, repetitions: int, microbatches: int) -> None:
    dots_RMT = population.draw(repetitions, microbatches, 1, seed=microbatches + 1).squeeze(2)
    results = [estimate(dots_MT, population.names) for dots_MT in dots_RMT]
    for name, value in exact(population).items():
        means = np.array(
            [(each.total if name == "total" else each.blocks[name]).mean for each in results]
        )
        assert abs(means.mean() - value) < 3 * means.std(ddof=1) / math.sqrt(repetitions), name
    shares = coverages(population, results)
    assert all(0.93 <= share <= 0.97 for share in shares.values()), shares


@pytest.mark.parametrize("microbatches", [16, 32, 64])
def test_traces_are_unbiased_and_their_intervals_cover(population, microbatches):
    check_bias_and_coverage(population, 1000, microbatches)


@pytest.mark.stress
@pytest.mark.parametrize("microbatches", [16, 32, 64])
def test_traces_are_unbiased_and_their_intervals_cover_at_length(population, microbatches):
    check_bias_and_coverage(population, 4000, microbatches)
