"""Hutch++ and XTrace against their papers' definitions on dense matrices, sharded or not.

Shapes: P rows of the matrix, k vectors of a sketch, p the part of a vector that lies on one rank.
"""

import itertools
import math
import statistics
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from curvature.probes import rademacher
from curvature.trace.hutch_plus_plus import MatrixTrace, hutch_plus_plus, sketch
from curvature.trace.xtrace import xtrace
from tests.waiting import HANG_SECONDS
from train.command import UserError

SIZE = 200
ESTIMATORS = [hutch_plus_plus, xtrace]


def matrix_of(spectrum_P: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues in a random basis, float64."""
    random = torch.randn(len(spectrum_P), len(spectrum_P), generator=torch.Generator().manual_seed(0)).double()
    basis_PP = torch.linalg.qr(random).Q
    return basis_PP * spectrum_P.double() @ basis_PP.T


def probe(index: int, *, seed: int = 0, size: int = SIZE) -> Tensor:
    return rademacher("v", 0, size, seed=seed, probe=index).double()


def inner(rows_kp: Tensor, v_p: Tensor) -> Tensor:
    return rows_kp.double() @ v_p.double()


def run(estimator, matrix_PP: Tensor, matvecs: int, *, seed: int = 0) -> MatrixTrace:
    return estimator(
        lambda v: matrix_PP @ v, lambda index: probe(index, seed=seed, size=len(matrix_PP)), inner, matvecs=matvecs
    )


DECAYING = matrix_of(torch.arange(1, SIZE + 1).double() ** -1.5)
INDEFINITE = matrix_of(torch.cat([torch.tensor([20.0, 8.0, -5.0]), torch.linspace(-1, 2, SIZE - 3)]))
FLAT = matrix_of(torch.linspace(0.5, 1.5, SIZE))


@pytest.mark.parametrize("matrix_PP", [DECAYING, INDEFINITE])
def test_hutch_plus_plus_is_the_papers(matrix_PP):
    """Algorithm 1 with LAPACK's QR and dense projections."""
    size = 10
    s_Pk = torch.stack([probe(index) for index in range(size)], dim=1)
    g_Pk = torch.stack([probe(index) for index in range(size, 2 * size)], dim=1)
    q_Pk = torch.linalg.qr(matrix_PP @ s_Pk).Q
    rest_Pk = g_Pk - q_Pk @ (q_Pk.T @ g_Pk)
    samples_k = (rest_Pk * (matrix_PP @ rest_Pk)).sum(dim=0)
    result = run(hutch_plus_plus, matrix_PP, 3 * size)
    assert result.mean == pytest.approx(float((q_Pk.T @ matrix_PP @ q_Pk).trace() + samples_k.mean()), rel=1e-11)
    assert result.standard_error == pytest.approx(float(samples_k.std()) / math.sqrt(size), rel=1e-9)
    assert (result.matvecs, result.method) == (30, "hutch++")


@pytest.mark.parametrize("matrix_PP", [DECAYING, INDEFINITE])
def test_xtrace_is_the_papers(matrix_PP):
    """The definitions: a QR of its own for every probe, and for the error every pair of probes, left out."""
    size = 8
    probes_Pk = torch.stack([probe(index) for index in range(size)], dim=1)

    def estimate(test: int, *left_out: int) -> float:
        others_Pk = probes_Pk[:, [index for index in range(size) if index not in (test, *left_out)]]
        q_Pk = torch.linalg.qr(matrix_PP @ others_Pk).Q
        rest_P = probes_Pk[:, test] - q_Pk @ (q_Pk.T @ probes_Pk[:, test])
        return float((q_Pk.T @ matrix_PP @ q_Pk).trace() + rest_P @ matrix_PP @ rest_P)

    estimates = [estimate(test) for test in range(size)]
    covariance = statistics.fmean(
        (estimates[one] - estimate(one, other)) * (estimates[other] - estimate(other, one))
        for one, other in itertools.permutations(range(size), 2)
    )
    assert covariance > 0
    result = run(xtrace, matrix_PP, 2 * size)
    assert result.mean == pytest.approx(statistics.fmean(estimates), rel=1e-11)
    assert result.standard_error**2 == pytest.approx(statistics.variance(estimates) / size + covariance, rel=1e-9)
    assert (result.matvecs, result.method) == (16, "xtrace")


def low_rank() -> dict[str, Tensor]:
    unit = torch.zeros(SIZE, dtype=torch.float64)
    unit[:2] = 1.0  # its sketched vectors repeat one another: rank 2, some of them alone in their direction
    signs = torch.cat([torch.tensor([5.0, -4.0, 3.0, 2.0, -1.0]), torch.zeros(SIZE - 5)])
    return {"zero": torch.zeros(SIZE, SIZE).double(), "ones": torch.ones(SIZE, SIZE).double()} | {
        "unit": torch.diag(unit), "rank 5": matrix_of(signs)
    }  # fmt: skip


@pytest.mark.parametrize("name", low_rank())
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_low_rank_is_exact(estimator, name):
    matrix_PP = low_rank()[name]
    result = run(estimator, matrix_PP, 24)
    assert result.mean == pytest.approx(float(matrix_PP.trace()), rel=1e-11, abs=1e-11)
    assert result.standard_error == pytest.approx(0.0, abs=1e-10)
    size = 24 // (3 if estimator is hutch_plus_plus else 2)
    assert result.matvecs == 24 - size + int(torch.linalg.matrix_rank(matrix_PP)), "no product for dependent vectors"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_basis_is_orthonormal_and_factors_what_was_sketched(dtype):
    """Eigenvalues over 12 decades: one pass of Gram and Schmidt would lose all orthogonality."""
    matrix_PP = matrix_of(10.0 ** torch.linspace(0, -12, SIZE)).to(dtype)
    basis_rp, factor_rk = sketch(lambda v: matrix_PP @ v, lambda index: probe(index).to(dtype), inner, size=40)
    precision = torch.finfo(dtype).eps
    gram_rr = basis_rp.double() @ basis_rp.T.double()
    assert float((gram_rr - torch.eye(len(gram_rr))).abs().max()) < 30 * precision
    columns_pk = torch.stack([matrix_PP @ probe(index).to(dtype) for index in range(40)], dim=1).double()
    lost = (columns_pk - basis_rp.T.double() @ factor_rk).norm(dim=0) / columns_pk.norm(dim=0)
    assert float(lost.max()) < 100 * precision


def test_fp32_vectors_give_the_float64_trace():
    for estimator in ESTIMATORS:
        single = estimator(
            lambda v: DECAYING.float() @ v, lambda index: probe(index).float(), inner, matvecs=60
        )  # fmt: skip
        assert single.mean == pytest.approx(run(estimator, DECAYING, 60).mean, rel=1e-5)


def check_bias_and_error(estimator, matrix_PP: Tensor, matvecs: int, *, seeds: int) -> None:
    """The mean over the seeds is the trace, and the root mean square of the errors that of the stated ones within 15%.

    A root mean square over 200 seeds is known to 5%, a little less well where the errors have heavy tails.
    """
    results = [run(estimator, matrix_PP, matvecs, seed=seed) for seed in range(seeds)]
    errors = np.array([result.mean for result in results]) - float(matrix_PP.trace())
    assert abs(errors.mean()) < 3 * errors.std(ddof=1) / math.sqrt(seeds)
    stated = math.sqrt(np.mean([result.standard_error**2 for result in results]))
    assert 0.85 < math.sqrt(np.mean(errors**2)) / stated < 1.15


@pytest.mark.parametrize("matrix_PP", [DECAYING, FLAT], ids=["decaying", "flat"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unbiased_with_an_error_of_the_stated_size(estimator, matrix_PP):
    check_bias_and_error(estimator, matrix_PP, 30, seeds=200)


@pytest.mark.stress
@pytest.mark.parametrize("matvecs", [30, 60, 120])
@pytest.mark.parametrize("matrix_PP", [DECAYING, INDEFINITE, FLAT], ids=["decaying", "indefinite", "flat"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unbiased_with_an_error_of_the_stated_size_at_length(estimator, matrix_PP, matvecs):
    check_bias_and_error(estimator, matrix_PP, matvecs, seeds=400)


@pytest.mark.parametrize(("estimator", "least"), [(hutch_plus_plus, 4.0), (xtrace, 8.0)])
def test_error_at_120_products_is_far_below_hutchinsons(estimator, least):
    """On eigenvalues i^-1.5; Hutchinson's error is its closed form, sqrt(2 (|A|_F^2 - sum a_ii^2) / 120)."""
    variance = 2 * (DECAYING.square().sum() - DECAYING.diagonal().square().sum()) / 120
    errors = [run(estimator, DECAYING, 120, seed=seed).mean - float(DECAYING.trace()) for seed in range(30)]
    assert math.sqrt(float(variance)) / math.sqrt(np.mean(np.square(errors))) > least


class _Ranks:
    """Sums over threads that each hold a part of every vector, in place of a process group."""

    def __init__(self, count: int) -> None:
        self.count, self.parts = count, {}  # type: tuple[int, dict[int, Tensor]]
        self._barrier = threading.Barrier(count, timeout=HANG_SECONDS)

    def gather(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part
        self._barrier.wait()
        everything = [self.parts[other] for other in range(self.count)]
        self._barrier.wait()
        return everything


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sharded_vectors_give_the_same_on_every_rank(estimator):
    """Three ranks with 50, 0 and 150 entries of the vectors."""
    bounds, ranks, results = [(0, 50), (50, 50), (50, SIZE)], _Ranks(3), {}  # type: ignore[var-annotated]

    def one(rank: int) -> None:
        mine = slice(*bounds[rank])
        results[rank] = estimator(
            lambda v_p: (INDEFINITE @ torch.cat(ranks.gather(rank, v_p)))[mine],
            lambda index: probe(index)[mine],
            lambda rows_kp, v_p: torch.stack(ranks.gather(rank, inner(rows_kp, v_p))).sum(dim=0),
            matvecs=30,
        )

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == results[2]
    assert results[0].mean == pytest.approx(run(estimator, INDEFINITE, 30).mean, rel=1e-11)


@pytest.mark.parametrize(
    ("estimator", "matvecs", "message"),
    [
        (hutch_plus_plus, 100, "ask for 102"),
        (hutch_plus_plus, 0, "ask for 6"),
        (xtrace, 7, "ask for 8"),
        (xtrace, 2, "4"),
    ],
)
def test_refuses_other_numbers_of_products(estimator, matvecs, message):
    with pytest.raises(UserError, match=message):
        run(estimator, FLAT, matvecs)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_refuses_products_that_are_not_finite(estimator):
    with pytest.raises(UserError, match="not finite; give a checkpoint"):
        run(estimator, FLAT * math.nan, 12)
