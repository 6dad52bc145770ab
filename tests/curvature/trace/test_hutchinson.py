"""The trace estimator against exact traces, closed forms and the arithmetic of its own values; its coverage.

Shapes: P parameters, R repetitions, M microbatches, T tensors.
"""

import itertools
import math
import statistics

import numpy as np
import pytest
import scipy.stats
import torch

from base.errors import UserError
from base.ranks import ALONE
from curvature.products.exact import Quadratic
from curvature.products.parameters import block_of
from curvature.products.sharing import Sharing
from curvature.trace.estimates import estimate_mean
from curvature.trace.hutchinson import estimate_trace
from tests.curvature.trace.conftest import Population


def estimate(quadratics: list[Quadratic]):
    return estimate_trace(
        quadratics.__getitem__,
        list(quadratics[0].dots),
        pairs=len(quadratics),
        sharing=Sharing(ALONE, False),
    )


def plain(values: list[float]) -> list[Quadratic]:
    """Pairs of one tensor with these v'Hv."""
    return [Quadratic(1.0, 0.0, {"w": value}) for value in values]


def test_no_bias_over_all_sign_vectors():
    """All 2^P probes of a symmetric matrix: the means are its blocks' traces themselves."""
    size = 8
    half = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix_PP = half + half.T
    quadratics = []
    for signs in itertools.product((-1.0, 1.0), repeat=size):
        v_P = torch.tensor(signs, dtype=torch.float64)
        first, second = (v_P * (matrix_PP @ v_P)).split([3, 5])
        quadratics.append(
            Quadratic(0.0, 0.0, {"model.a": float(first.sum()), "model.b": float(second.sum())})
        )
    result = estimate(quadratics)
    diagonal_P = matrix_PP.diagonal()
    assert result.total.mean == pytest.approx(float(diagonal_P.sum()), rel=1e-12)
    assert result.tensors["model.a"].mean == pytest.approx(float(diagonal_P[:3].sum()), rel=1e-12)
    assert result.tensors["model.b"].mean == pytest.approx(float(diagonal_P[3:].sum()), rel=1e-12)


def test_tensors_add_up_to_blocks_and_blocks_to_the_total(population: Population):
    result = estimate(population.quadratics(population.draw(1, 20, 1, seed=5).flatten(0, 2)))
    assert list(result.tensors) == population.names
    assert set(result.blocks) == {"embedding", "layer0", "head"}
    for block, each in result.blocks.items():
        parts = [part.mean for name, part in result.tensors.items() if block_of(name) == block]
        assert each.mean == pytest.approx(math.fsum(parts), rel=1e-12)
        assert each.mean == pytest.approx(
            statistics.fmean(result.blocks_per_microbatch[block]), rel=1e-12
        )
    assert result.total.mean == pytest.approx(
        math.fsum(block.mean for block in result.blocks.values()), rel=1e-12
    )
    sums = [
        math.fsum(values) for values in zip(*result.blocks_per_microbatch.values(), strict=True)
    ]
    assert result.per_microbatch == pytest.approx(sums, rel=1e-12)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_students(level):
    values = torch.randn(
        7, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).tolist()
    result = estimate_mean(values, level=level)
    assert result.standard_error == pytest.approx(float(scipy.stats.sem(values)), rel=1e-12)
    expected = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(level)
    assert result.interval == pytest.approx((expected.low, expected.high), rel=1e-9)


@pytest.mark.parametrize(
    "broken",
    [
        Quadratic(math.nan, 0.0, {"w": 1.0}),
        Quadratic(2.5, 0.0, {"w": math.inf}),
        Quadratic(2.5, math.nan, {"w": 1.0}),
    ],
)
def test_refuses_what_is_not_finite_and_names_the_loss(broken):
    with pytest.raises(
        UserError, match=rf"pair 2: loss {broken.loss} .* not finite; give a checkpoint"
    ):
        estimate([*plain([1.0, 2.0]), broken, *plain([3.0])])


def exact(population: Population) -> dict[str, float]:
    """The exact trace of every block and of the whole Hessian."""
    blocks = dict.fromkeys(("embedding", "layer0", "head"), 0.0)
    for name, value in population.traces().items():
        blocks[block_of(name)] += value
    return blocks | {"total": math.fsum(blocks.values())}


@pytest.mark.parametrize("microbatches", [16, 32, 64])
@pytest.mark.parametrize("repetitions", [1000, pytest.param(4000, marks=pytest.mark.stress)])
def test_traces_are_unbiased_and_their_intervals_cover(population, repetitions, microbatches):
    """A share of R repetitions has standard error sqrt(0.95 x 0.05 / R): 0.7% with 1000, so 93 to
    97% are three of them.
    """
    dots_RMT = population.draw(repetitions, microbatches, 1, seed=microbatches + 1).squeeze(2)
    results = [estimate(population.quadratics(dots_MT)) for dots_MT in dots_RMT]
    for name, value in exact(population).items():
        estimates = [each.total if name == "total" else each.blocks[name] for each in results]
        means = np.array([each.mean for each in estimates])
        assert abs(means.mean() - value) < 3 * means.std(ddof=1) / math.sqrt(repetitions), name
        covered = np.mean([low <= value <= high for _, _, (low, high) in estimates])
        assert 0.93 <= covered <= 0.97, name
