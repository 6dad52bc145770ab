"""Both ends of known spectra: values, residuals, what is said of them, and no ghosts."""

import gc
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from base.errors import UserError
from curvature.spectrum.lanczos import Krylov, RitzPair, Spectrum, lanczos
from tests.curvature.spectrum.operators import Known, designed, inner, signs
from tests.curvature.spectrum.split_vectors import SIZE, measure, write_figures
from tests.runs import on_ranks


def ends(
    product, start: Tensor, *, largest=1, smallest=0, tolerance=1e-4, max_iterations=100
) -> Spectrum:
    counts = {"largest": largest, "smallest": smallest}
    return lanczos(
        product, start, inner, **counts, tolerance=tolerance, max_iterations=max_iterations
    )


def residual(pair: RitzPair) -> float:
    assert pair.residual is not None
    return pair.residual


def values(pairs: list[RitzPair]) -> list[float]:
    return [pair.value for pair in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_of_a_trained_model(trained, dtype):
    products = []

    def product(v_P):
        products.append(v_P)
        return trained.product(v_P)

    spectrum = ends(product, signs(len(trained.values_P), dtype=dtype), largest=5, smallest=3)
    ascending = trained.values_P.tolist()
    assert values(spectrum.largest) == pytest.approx(ascending[: -5 - 1 : -1], rel=1e-4)
    assert values(spectrum.smallest) == pytest.approx(ascending[:3], rel=1e-4)
    assert all(
        pair.converged and residual(pair) <= 1e-4 for pair in spectrum.largest + spectrum.smallest
    )
    assert len(products) == spectrum.iterations + 8
    x_P = products[-1].double()  # the judged one of the largest
    assert float(x_P.norm()) == pytest.approx(1, abs=1e-6)
    value = float(x_P @ trained.matrix_PP @ x_P)
    assert value == pytest.approx(spectrum.largest[0].value, rel=1e-6)


def test_residual_is_that_of_the_vector_and_bounds_the_error(trained):
    """After few steps nothing has converged: the error is large, and so is what is reported."""
    multiplied = []

    def product(v_P):
        multiplied.append(v_P)
        return trained.product(v_P)

    spectrum = ends(
        product, signs(len(trained.values_P)), smallest=1, tolerance=1e-12, max_iterations=4
    )
    assert spectrum.iterations == 4
    pair, x_P = spectrum.largest[0], multiplied[-1]
    distance = float((trained.matrix_PP @ x_P - pair.value * x_P).norm())
    assert pair.residual == pytest.approx(distance / pair.value, rel=1e-8)
    for end in (spectrum.largest[0], spectrum.smallest[0]):
        assert not end.converged
        assert residual(end) > 1e-12
        assert float((trained.values_P - end.value).abs().min()) <= residual(end) * abs(end.value)


def test_errors_that_decide_when_to_stop_are_those_of_the_vectors(trained):
    krylov = Krylov(trained.product, signs(len(trained.values_P)), inner)
    for _ in range(12):
        krylov.step()
    ritz = krylov.ritz()
    for index, (value, error) in enumerate(zip(ritz.values_k, ritz.errors_k, strict=True)):
        x_P = krylov.vector(ritz.vectors_kk[:, index])
        assert float((trained.matrix_PP @ x_P - value * x_P).norm()) == pytest.approx(
            float(error), rel=1e-6, abs=1e-12
        )


def test_a_loose_tolerance_still_gives_all_pairs():
    known = designed([3 + i / 10 for i in range(20)])
    spectrum = ends(known.product, signs(20), largest=3, smallest=2, tolerance=10)
    assert (len(spectrum.largest), len(spectrum.smallest), spectrum.iterations) == (3, 2, 5)


SPECTRA = {
    "clusters": (
        [5 + i * 1e-3 for i in range(6)]
        + [i / 60 for i in range(60)]
        + [-2 - i * 1e-3 for i in range(4)]
    ),
    "all negative": [*[-1 - i / 100 for i in range(100)], -0.5, -0.7],
    "largest magnitude negative": [-50.0, *[i / 100 for i in range(1, 100)], 3.0],
    "outliers and bulk": (
        [58.0, 5.7, 3.0, 2.5, 1.2, -0.2, -0.15] + [((i - 200) / 200) ** 5 / 10 for i in range(300)]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
def test_designed_spectra(name, dtype):
    known = designed(SPECTRA[name])
    spectrum = ends(known.product, signs(len(known.values_P), dtype=dtype), largest=5, smallest=3)
    ascending = sorted(SPECTRA[name])
    assert all(pair.converged for pair in spectrum.largest + spectrum.smallest)
    assert values(spectrum.largest) == pytest.approx(ascending[: -5 - 1 : -1], rel=1e-4)
    assert values(spectrum.smallest) == pytest.approx(ascending[:3], rel=1e-4)


def test_what_fp32_cannot_resolve_is_not_called_converged():
    """Beside 1e4 products have errors of 1e-7 * 1e4 = 1e-3: little for 100, much for 0.2."""
    known = designed([1e4, 100.0, 1.0, 0.5, *[i / 1000 for i in range(100)], -0.3, -0.2])
    single, double = (
        ends(known.product, signs(106, dtype=dtype), largest=2, smallest=2)
        for dtype in (torch.float32, torch.float64)
    )
    assert [pair.converged for pair in double.largest + double.smallest] == [True] * 4
    assert [pair.converged for pair in single.largest] == [True, True]
    assert not any(pair.converged for pair in single.smallest)
    assert values(single.largest) == pytest.approx([1e4, 100], rel=1e-4)
    assert values(double.smallest) == pytest.approx([-0.3, -0.2], rel=1e-4)


def ghosts_of_the_three_term_recurrence(eigenvalues: Tensor, steps: int) -> int:
    """Copies of the smallest eigenvalue without reorthogonalisation: the textbook in fp32."""
    q = torch.ones(len(eigenvalues)) / len(eigenvalues) ** 0.5
    last, beta = torch.zeros(len(eigenvalues)), 0.0
    tridiagonal = torch.zeros(steps, steps, dtype=torch.float64)
    for k in range(steps):
        w = eigenvalues.float() * q - beta * last
        alpha = float(w @ q)
        w = w - alpha * q
        beta, last = float(w.norm()), q
        q = w / beta
        tridiagonal[k, k] = alpha
        if k + 1 < steps:
            tridiagonal[k, k + 1] = tridiagonal[k + 1, k] = beta
    return int((torch.linalg.eigvalsh(tridiagonal) < -99).sum())


def test_no_ghosts_in_fp32():
    eigenvalues = torch.cat([torch.tensor([-100.0]), torch.linspace(0, 1, 400)]).double()
    assert ghosts_of_the_three_term_recurrence(eigenvalues, 80) > 1
    asked: dict[str, Any] = {"largest": 3, "smallest": 3, "tolerance": 1e-3, "max_iterations": 150}
    single, double = (
        ends(lambda v: eigenvalues.to(v) * v, torch.ones(401, dtype=dtype), **asked)
        for dtype in (torch.float32, torch.float64)
    )
    assert values(single.largest) == pytest.approx(values(double.largest), rel=1e-5)
    assert values(single.smallest) == pytest.approx(values(double.smallest), rel=1e-4, abs=1e-4)
    assert single.smallest[0].value == pytest.approx(-100, rel=1e-6)
    assert single.smallest[1].value > -1e-3
    assert single.iterations <= double.iterations + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_steps_than_dimensions_invent_nothing(dtype):
    known = designed([9.0, 4.0, 1.0, 0.5, 0.25, -1.0, -2.5])
    asked: dict[str, Any] = {"largest": 20, "smallest": 10, "max_iterations": 40}
    spectrum = ends(known.product, signs(7, dtype=dtype), **asked, tolerance=1e-3)
    assert spectrum.iterations == 7
    assert values(spectrum.largest) == pytest.approx(known.values_P.flip(0).tolist(), rel=1e-5)
    assert values(spectrum.smallest) == pytest.approx(known.values_P.tolist(), rel=1e-5)


def test_a_multiple_eigenvalue_is_found_once():
    diagonal_P = torch.tensor([2.0] * 20 + [-1.0] * 20, dtype=torch.float64)
    spectrum = ends(lambda v: diagonal_P * v, signs(40), largest=3, smallest=3)
    assert values(spectrum.largest) == pytest.approx([2, -1])
    assert values(spectrum.smallest) == pytest.approx([-1, 2])
    assert spectrum.iterations == 2
    alone = ends(lambda v: 3 * v, signs(40), largest=1, smallest=1)
    assert values(alone.largest) == values(alone.smallest) == pytest.approx([3])
    assert alone.iterations == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_multiple_eigenvalues_in_a_random_basis(dtype):
    """None is left out or comes too often: rounding in fp32 brings 7 a second time."""
    several = [7.0, 7.0, 7.0, 6.0, 5.0, 4.0, 4.0, 3.0, -1.0, -2.0, -2.0, -3.0, -3.0]
    whole = several + [i / 50 for i in range(50)]
    spectrum = ends(designed(whole).product, signs(len(whole), dtype=dtype), largest=5, smallest=2)
    for pairs, descending in ((spectrum.largest, True), (spectrum.smallest, False)):
        assert all(pair.converged for pair in pairs)
        listed = [round(value, 4) for value in values(pairs)]
        distinct = sorted(set(listed), reverse=descending)
        assert distinct == sorted(set(whole), reverse=descending)[: len(distinct)]
        assert all(listed.count(value) <= whole.count(value) for value in listed)


def test_what_the_start_does_not_hold_is_not_found():
    diagonal_P = torch.tensor([100.0, *[i / 10 for i in range(30)]], dtype=torch.float64)
    start_P = signs(31)
    start_P[0] = 0
    assert ends(lambda v: diagonal_P * v, start_P).largest[0].value == pytest.approx(2.9, rel=1e-6)


def test_an_eigenvalue_of_zero():
    nothing = ends(torch.zeros_like, signs(5), smallest=1)
    assert nothing.largest == nothing.smallest == [RitzPair(0.0, 0.0, converged=True)]
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    early = ends(
        lambda v: swap @ v, torch.tensor([1.0, 0.0], dtype=torch.float64), max_iterations=1
    )
    assert early.largest == [RitzPair(0.0, None, converged=False)]


def test_a_product_that_is_not_finite_is_refused():
    known: Known = designed([1.0, 2.0, 3.0])
    calls = iter([1.0, float("nan")])
    with pytest.raises(UserError, match="Hessian product 2 has norm nan; give a checkpoint"):
        ends(lambda v: next(calls) * known.product(v), signs(3))


def test_a_top_eigenvalue_takes_few_products_and_as_many_vectors(trained):
    """The value of a dense solver; vectors come as they are needed, whatever the most is."""
    size = len(trained.values_P)
    alive = []

    def product(v_P):
        gc.collect()
        vectors = {
            item.untyped_storage().data_ptr(): item
            for item in gc.get_objects()
            if issubclass(type(item), Tensor)
            and item.shape == (size,)
            and item.dtype == torch.float32
        }
        alive.append(len(vectors))
        return trained.product(v_P)

    start_P = signs(size, dtype=torch.float32)
    few, many = (ends(product, start_P, tolerance=1e-2, max_iterations=most) for most in (16, 50))
    assert few.largest == many.largest
    assert few.iterations == many.iterations < 16
    assert few.largest[0].value == pytest.approx(float(trained.values_P[-1]), rel=1e-4)
    # besides the start, a spare one, one that is judged, and the first call's result
    assert max(alive) <= few.iterations + 4


def test_figures_are_those_of_one_process(tmp_path):
    alone = measure(slice(0, SIZE), lambda part: part)
    assert alone["values"][0] == pytest.approx(40, rel=1e-10)
    on_ranks(3, write_figures, tmp_path)
    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    assert first["counts"] == alone["counts"]
    for name in ("values", "moments", "nodes"):
        assert first[name] == pytest.approx(alone[name], rel=1e-10), name
    # Below 1e-10 a residual is rounding itself.
    assert first["residuals"] == pytest.approx(alone["residuals"], abs=1e-10)
    assert others == [first, first]
