"""Trace and top eigenvalue against the dense Hessian, and the guard against wrong products."""

import pytest
import torch

import curvature.olmo2
from curvature.finite_difference import FiniteDifference
from curvature.guard import check_product
from curvature.hutchinson import TraceEstimate, estimate_trace
from curvature.lanczos import top_eigenvalue
from curvature.olmo2 import DualOlmo2, HessianProduct
from curvature.parameters import Parameters, block_of
from tests.curvature.conftest import dense_hessian, random_tokens, tiny_model
from train.command import UserError

PROBES = 1000


def trace_of(product, parameters: Parameters, microbatches) -> TraceEstimate:
    return estimate_trace(product, parameters, microbatches, seed=0, on_pair=lambda value: None)


@pytest.fixture(scope="module")
def many_probes(case) -> TraceEstimate:
    """The estimator over the dense matrix itself, which makes many probes cheap."""
    product = lambda tokens, v_P: HessianProduct(case.dense.hessian_PP @ v_P, case.dense.loss)  # noqa: E731
    return trace_of(product, Parameters(case.model), [case.tokens_BS1] * PROBES)


def test_trace_is_within_three_standard_errors(case, many_probes):
    total = many_probes.total
    assert abs(total.mean - float(case.dense.hessian_PP.trace())) < 3 * total.standard_error


def test_standard_error_is_that_of_rademacher_probes(case, many_probes):
    """Var v'Hv = 2 (|H|_F^2 - sum h_ii^2) (Avron and Toledo 2011); at a kurtosis of 10, s of 1000 values is +-5%."""
    hessian_PP = case.dense.hessian_PP
    variance = 2 * (hessian_PP.square().sum() - hessian_PP.diagonal().square().sum())
    assert many_probes.total.standard_error == pytest.approx(float((variance / PROBES).sqrt()), rel=0.2)
    sample = torch.tensor(many_probes.per_pair, dtype=torch.float64)
    assert many_probes.total.standard_error == pytest.approx(float(sample.std() / PROBES**0.5))


def test_block_traces_are_those_of_the_diagonal_blocks_and_add_up(case, many_probes):
    weights = case.model.named_parameters()
    blocks = [block_of(name) for name, weight in weights for _ in range(weight.numel())]
    diagonal_P = case.dense.hessian_PP.diagonal()
    assert set(many_probes.blocks) == {"embedding", "layer0", "layer1", "head"} == set(blocks)
    for name, estimate in many_probes.blocks.items():
        exact = float(diagonal_P[[block == name for block in blocks]].sum())
        assert abs(estimate.mean - exact) < 4 * estimate.standard_error
    assert sum(estimate.mean for estimate in many_probes.blocks.values()) == pytest.approx(many_probes.total.mean)


def test_every_pair_of_the_dual_layers_is_the_dense_quadratic_form(case):
    operator = DualOlmo2(case.model)
    estimate = trace_of(operator, operator.parameters, [case.tokens_BS1] * 10)
    for index, value in enumerate(estimate.per_pair):
        v_P = operator.parameters.probe(0, index)
        assert value == pytest.approx(float(v_P @ case.dense.hessian_PP @ v_P), rel=1e-9)
    assert estimate.loss.mean == pytest.approx(case.dense.loss, rel=1e-12)


def test_no_bias_over_all_sign_vectors():
    """All 2^P probes of a small symmetric matrix, standing in for the drawn ones: the mean is the trace itself."""
    size = 8
    half = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix_PP = half + half.T

    class AllSigns(Parameters):
        def probe(self, seed: int, index: int):
            return torch.tensor([1.0 if index >> bit & 1 else -1.0 for bit in range(size)], dtype=torch.float64)

    everything = AllSigns(torch.nn.Linear(size, 1, bias=False, dtype=torch.float64))
    estimate = estimate_trace(
        lambda tokens, v_P: HessianProduct(matrix_PP @ v_P, 0.0),
        everything,
        [torch.zeros(1, 2)] * 2**size,
        seed=0,
        on_pair=lambda value: None,
    )
    assert estimate.total.mean == pytest.approx(float(matrix_PP.trace()), rel=1e-12)


def test_pairs_estimate_the_trace_of_the_mean_loss_of_all_microbatches():
    """Each pair sees one microbatch only, the dense Hessian all of them at once."""
    model = tiny_model(num_hidden_layers=1, hidden_size=4, intermediate_size=4)
    microbatches = [random_tokens(seed=seed, length=4) for seed in range(100)]
    dense = dense_hessian(model, torch.cat(microbatches))
    operator = DualOlmo2(model)
    estimate = trace_of(operator, operator.parameters, microbatches)
    assert abs(estimate.total.mean - float(dense.hessian_PP.trace())) < 3 * estimate.total.standard_error
    assert estimate.loss.mean == pytest.approx(dense.loss, rel=1e-12)
    assert len(estimate.per_pair) == 100


def test_lambda_max_of_a_model(case):
    operator = DualOlmo2(case.model)
    top = top_eigenvalue(
        lambda v_P: operator(case.tokens_BS1, v_P).hv_P,
        operator.parameters.probe(0, -1),
        tolerance=1e-3,
        max_iterations=50,
    )
    hessian_PP = case.dense.hessian_PP
    assert top.value == pytest.approx(float(torch.linalg.eigvalsh(hessian_PP)[-1]), rel=1e-4)
    assert top.converged
    residual = (hessian_PP @ top.vector_P - top.value * top.vector_P).norm() / top.value
    assert top.residual == pytest.approx(float(residual), rel=1e-6)


def spectrum_operator(eigenvalues: list[float]):
    size = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    matrix = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
    return lambda v: matrix @ v


@pytest.mark.parametrize(
    ("eigenvalues", "largest"),
    [
        ([-50.0, *[i / 100 for i in range(100)], 3.0], 3.0),  # the largest in magnitude is negative
        ([*[-1 - i / 100 for i in range(100)], -0.5], -0.5),  # none is positive
        ([2.0] * 20, 2.0),  # every vector is an eigenvector: the Krylov space ends after one step
        ([7.0, 7.0 - 1e-9, *[0.0] * 30], 7.0),
    ],
)
def test_lanczos_finds_the_algebraically_largest(eigenvalues, largest):
    start = torch.ones(len(eigenvalues), dtype=torch.float64)
    top = top_eigenvalue(spectrum_operator(eigenvalues), start, tolerance=1e-6, max_iterations=60)
    assert top.converged
    assert top.value == pytest.approx(largest, rel=1e-6)


def test_lanczos_in_fp32_needs_no_more_steps_than_in_float64():
    """Without reorthogonalisation copies of the isolated -100 come back in fp32 and use up the steps."""
    eigenvalues = torch.cat([torch.tensor([-100.0]), torch.linspace(0, 1, 400)]).double()
    single, double = (
        top_eigenvalue(
            lambda v: eigenvalues.to(v.dtype) * v, torch.ones(401, dtype=dtype), tolerance=1e-3, max_iterations=200
        )
        for dtype in (torch.float32, torch.float64)
    )
    assert single.converged
    assert double.converged
    assert single.iterations <= double.iterations + 2
    assert single.value == pytest.approx(1.0, rel=1e-3)


def test_lanczos_reports_that_it_did_not_converge():
    calls = []
    operator = spectrum_operator([i / 200 for i in range(200)])

    def counted(v):
        calls.append(v)
        return operator(v)

    top = top_eigenvalue(counted, torch.ones(200, dtype=torch.float64), tolerance=1e-8, max_iterations=5)
    assert not top.converged
    assert top.residual > 1e-8
    assert top.iterations == len(calls) == 5


def check(model, product) -> dict:
    reference = FiniteDifference(model)
    return check_product(product, reference, reference.parameters, random_tokens(), reference.parameters.probe(0, 0))


def test_guard_passes_a_right_product_with_room_to_spare():
    model = tiny_model(torch.float32)
    figures = check(model, DualOlmo2(model))
    assert figures["loss_relative_difference"] < 1e-6
    assert 0 < figures["product_relative_difference"] < 1e-3


def test_guard_refuses_a_model_whose_forward_is_another():
    model = tiny_model(torch.float32)
    operator = DualOlmo2(model)
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(UserError, match="refusing to measure: the product's loss"):
        check(model, operator)


def test_guard_refuses_a_wrong_product_of_the_right_loss(monkeypatch):
    """A derivative rule with one term missing: every value is right, every shape is right."""

    def wrong_swiglu(gate, up):
        right = curvature.dual.swiglu(gate, up)
        return right._replace(tangent=torch.sigmoid(gate.value) * gate.tangent * up.value)

    monkeypatch.setattr(curvature.olmo2, "swiglu", wrong_swiglu)
    model = tiny_model(torch.float32)
    with pytest.raises(UserError, match=r"refusing to measure: \|Hv\| is .* limit 0.01"):
        check(model, DualOlmo2(model))


@pytest.mark.parametrize(("factor", "passes"), [(1.009, True), (1.011, False)])
def test_guard_draws_the_line_at_one_percent(factor, passes):
    model = tiny_model(torch.float64)
    right = DualOlmo2(model)

    def scaled(tokens, v_P):
        result = right(tokens, v_P)
        return result._replace(hv_P=factor * result.hv_P)

    reference = right
    arguments = (scaled, reference, right.parameters, random_tokens(), right.parameters.probe(0, 0))
    if passes:
        assert check_product(*arguments)["product_relative_difference"] == pytest.approx(factor - 1)
    else:
        with pytest.raises(UserError, match="refusing"):
            check_product(*arguments)
