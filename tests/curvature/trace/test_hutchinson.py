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
from curvature.trace.hutchinson import TraceEstimate, estimate_trace
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


def test_error_of_a_fixed_hessian_is_that_of_signs(population: Population):
    """Var v'Hv = 2 (|H|_F^2 - sum h_ii^2) (Avron and Toledo 2011); s is known to about 3%."""
    hessian_PP, count = population.hessians_DPP[1], 4000
    result = estimate(population.quadratics(population.dots(1, count, seed=0)))
    variance = 2 * (hessian_PP.square().sum() - hessian_PP.diagonal().square().sum())
    assert result.total.standard_error == pytest.approx(float((variance / count).sqrt()), rel=0.1)
    assert abs(result.total.mean - float(hessian_PP.trace())) < 3 * result.total.standard_error


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


def coverages(population: Population, results: list[TraceEstimate]) -> dict[str, float]:
    """The share of the intervals that hold the exact trace, for the total and every block."""
    shares = {}
    for name, value in exact(population).items():
        intervals = [
            (each.total if name == "total" else each.blocks[name]).interval for each in results
        ]
        shares[name] = float(np.mean([low <= value <= high for low, high in intervals]))
    return shares


# A share of R repetitions has standard error sqrt(0.95 x 0.05 / R): 0.7% with 1000, so 93 to 97%
# are three of them.
def check_bias_and_coverage(population: Population, repetitions: int, microbatches: int) -> None:
    dots_RMT = population.draw(repetitions, microbatches, 1, seed=microbatches + 1).squeeze(2)
    results = [estimate(population.quadratics(dots_MT)) for dots_MT in dots_RMT]
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
