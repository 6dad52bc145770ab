"""The trace estimator against exact traces, closed forms and the arithmetic of its own values."""

import itertools
import math
import statistics

import pytest
import scipy.stats
import torch

from curvature.trace.hutchinson import Quadratic, estimate_mean, estimate_trace
from tests.curvature.trace.conftest import Population
from train.command import UserError


def block_of(name: str) -> str:
    return name.split(".")[1] if name.startswith("model") else "head"


def estimate(quadratics: list[Quadratic], *, probes: int = 1, relative_error: float | None = None):
    return estimate_trace(
        lambda indices: quadratics[indices.start : indices.stop],
        pairs=len(quadratics),
        probes_per_microbatch=probes,
        relative_error=relative_error,
        block_of=block_of,
    )


def plain(values: list[float]) -> list[Quadratic]:
    """Pairs of one tensor with these v'Hv."""
    return [Quadratic(1.0, 0.0, {"w": value}) for value in values]


def test_no_bias_over_all_sign_vectors():
    """All 2^P probes of a symmetric matrix instead of drawn ones: the means are its blocks' traces themselves."""
    size = 8
    half = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix_PP = half + half.T
    quadratics = []
    for signs in itertools.product((-1.0, 1.0), repeat=size):
        v_P = torch.tensor(signs, dtype=torch.float64)
        first, second = (v_P * (matrix_PP @ v_P)).split([3, 5])
        quadratics.append(Quadratic(0.0, 0.0, {"model.a": float(first.sum()), "model.b": float(second.sum())}))
    result = estimate(quadratics)
    diagonal_P = matrix_PP.diagonal()
    assert result.total.mean == pytest.approx(float(diagonal_P.sum()), rel=1e-12)
    assert result.tensors["model.a"].mean == pytest.approx(float(diagonal_P[:3].sum()), rel=1e-12)
    assert result.tensors["model.b"].mean == pytest.approx(float(diagonal_P[3:].sum()), rel=1e-12)


def test_error_of_a_fixed_hessian_is_that_of_signs(population: Population):
    """Var v'Hv = 2 (|H|_F^2 - sum h_ii^2) (Avron and Toledo 2011); s of 4000 values is known to about 3%."""
    hessian_PP, count = population.hessians_DPP[1], 4000
    result = estimate(population.quadratics(population.dots(1, count, seed=0)))
    variance = 2 * (hessian_PP.square().sum() - hessian_PP.diagonal().square().sum())
    assert result.total.standard_error == pytest.approx(float((variance / count).sqrt()), rel=0.1)
    assert abs(result.total.mean - float(hessian_PP.trace())) < 3 * result.total.standard_error


def test_tensors_add_up_to_blocks_and_blocks_to_the_total(population: Population):
    result = estimate(population.quadratics(population.draw(1, 20, 2, seed=5).flatten(0, 2)), probes=2)
    assert list(result.tensors) == population.names
    assert set(result.blocks) == {"embed_tokens", "layers", "norm", "head"}
    for block, each in result.blocks.items():
        parts = [part.mean for name, part in result.tensors.items() if block_of(name) == block]
        assert each.mean == pytest.approx(math.fsum(parts), rel=1e-12)
        assert each.mean == pytest.approx(statistics.fmean(result.blocks_per_microbatch[block]), rel=1e-12)
    assert result.total.mean == pytest.approx(math.fsum(block.mean for block in result.blocks.values()), rel=1e-12)
    sums = [math.fsum(values) for values in zip(*result.blocks_per_microbatch.values(), strict=True)]
    assert result.per_microbatch == pytest.approx(sums, rel=1e-12)


def test_probes_of_a_microbatch_are_one_value():
    values = [3.0, 5.0, 10.0, 20.0, -1.0, 1.0]
    result = estimate(
        [
            Quadratic(loss, 0.0, {"w": value})
            for loss, value in zip([1.0, 1.0, 2.0, 2.0, 6.0, 6.0], values, strict=True)
        ],
        probes=2,
    )
    assert result.per_microbatch == result.blocks_per_microbatch["head"] == [4.0, 15.0, 0.0]
    assert (result.microbatches, result.probes, result.reached) == (3, 6, None)
    assert (result.loss.mean, result.loss.standard_error) == pytest.approx((3.0, math.sqrt(7 / 3)))


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_students(level):
    values = torch.randn(7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
    result = estimate_mean(values, level=level)
    assert result.standard_error == pytest.approx(float(scipy.stats.sem(values)), rel=1e-12)
    expected = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(level)
    assert result.interval == pytest.approx((expected.low, expected.high), rel=1e-9)


@pytest.mark.parametrize("relative_error", [None, 1e-9])
@pytest.mark.parametrize(("probes", "pairs"), [(1, 72), (3, 240), (4, 256)])
def test_rounds_are_whole_microbatches_and_cover_every_pair_once(probes, pairs, relative_error):
    asked: list[range] = []

    def evaluate(indices: range) -> list[Quadratic]:
        asked.append(indices)
        return plain([float(index) for index in indices])

    result = estimate_trace(
        evaluate,
        pairs=pairs,
        probes_per_microbatch=probes,
        relative_error=relative_error,
        block_of=block_of,
    )
    assert [index for indices in asked for index in indices] == list(range(pairs))
    assert all(indices.start % probes == indices.stop % probes == 0 for indices in asked)
    assert (len(asked) == 1) == (relative_error is None)
    assert result.total.mean == pytest.approx((pairs - 1) / 2)


def test_stops_when_the_error_is_reached_and_says_so():
    values = [10.0, 12.0] * 100  # s / mean is 9.1%: 1% takes 83 values, which is the end of round 6
    result = estimate(plain(values), relative_error=0.01)
    assert (result.reached, result.probes) == (True, 96)
    assert result.total.standard_error <= 0.01 * result.total.mean
    assert estimate(plain(values), relative_error=0.5).probes == 64, "no error is believed before 64 microbatches"
    missed = estimate(plain(values), relative_error=1e-4)
    assert (missed.reached, missed.probes) == (False, 200)


def test_target_of_a_negative_trace_is_relative_to_its_size():
    values = [-10.0, -12.0] * 100
    assert estimate(plain(values), relative_error=0.01).probes == 96


def test_probes_of_one_microbatch_do_not_count_as_64():
    values = [value for value in [10.0, 12.0] * 40 for _ in range(4)]
    result = estimate(plain(values), probes=4, relative_error=0.5)
    assert (result.microbatches, result.probes) == (64, 256)


@pytest.mark.parametrize(
    ("pairs", "probes", "relative_error", "message"),
    [
        (0, 1, None, "0 pairs .* ask for one or more"),
        (4, 0, None, "0 probes per microbatch; ask for one or more"),
        (10, 4, None, "ask for 12"),
        (4, 4, None, "2 microbatches or more, .* are 1; ask for 8 pairs"),
        (126, 2, 0.05, "64 microbatches or more, .* are 63; ask for 128 pairs"),
    ],
)
def test_refuses_pairs_that_tell_no_error(pairs, probes, relative_error, message):
    with pytest.raises(UserError, match=message):
        estimate_trace(
            lambda indices: plain([1.0] * len(indices)),
            pairs=pairs,
            probes_per_microbatch=probes,
            relative_error=relative_error,
            block_of=block_of,
        )


@pytest.mark.parametrize(
    "broken", [Quadratic(math.nan, 0.0, {"w": 1.0}), Quadratic(2.5, 0.0, {"w": math.inf}), Quadratic(2.5, math.nan, {})]
)
def test_refuses_what_is_not_finite_and_names_the_loss(broken):
    with pytest.raises(UserError, match=rf"pair 2: loss {broken.loss} .* not finite; give a checkpoint"):
        estimate([*plain([1.0, 2.0]), broken, *plain([3.0])])
