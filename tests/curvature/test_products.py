"""Hessian-vector products against the dense float64 Hessian of HF's own code."""

from typing import Any

import pytest
import torch

from curvature.dual import Dual
from curvature.finite_difference import FiniteDifference
from curvature.olmo2 import DualOlmo2
from tests.curvature.conftest import TINY, dense_hessian, differentiable_gradient, random_tokens, relative, tiny_model
from train.command import UserError


def gaussian(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_oracle_is_a_hessian(case):
    """Symmetric, and the derivative of its own gradient along a line."""
    hessian_PP = case.dense.hessian_PP
    assert relative(hessian_PP, hessian_PP.T) < 1e-12
    v_P, step = gaussian(len(hessian_PP)), 1e-5
    moved = []
    for sign in (1, -1):
        model, position = tiny_model(**case.config), 0
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(v_P[position : position + weight.numel()].view_as(weight), alpha=sign * step)
                position += weight.numel()
        moved.append(dense_hessian(model, case.tokens_BS1).gradient_P)
    assert relative((moved[0] - moved[1]) / (2 * step), hessian_PP @ v_P) < 1e-6  # truncation of order step^2


def test_dual_product_is_exact_in_float64(case):
    v_P = gaussian(len(case.dense.hessian_PP))
    result = DualOlmo2(case.model)(case.tokens_BS1, v_P)
    assert relative(result.hv_P, case.dense.hessian_PP @ v_P) < 1e-10
    assert result.loss == pytest.approx(case.dense.loss, rel=1e-12)


def test_every_column_of_the_dual_hessian(case):
    """Unit vectors reach every entry, so no small tensor hides behind the norm of a large one."""
    operator, hessian_PP = DualOlmo2(case.model), case.dense.hessian_PP
    columns = range(0, len(hessian_PP), 7)
    for column in columns:
        unit_P = torch.zeros(len(hessian_PP), dtype=torch.float64)
        unit_P[column] = 1
        actual_P = operator(case.tokens_BS1, unit_P).hv_P
        assert (actual_P - hessian_PP[column]).abs().max() < 1e-12 * hessian_PP.abs().max()


def test_dual_product_in_fp32_is_as_good_as_fp32(case):
    """As near to the float64 Hessian as double backward through HF in fp32; random narrow norms amplify rounding."""
    model = tiny_model(torch.float32, **case.config)
    ours, theirs = [], []
    for seed in range(4):
        v_P = gaussian(len(case.dense.hessian_PP), seed, torch.float32)
        exact_P = case.dense.hessian_PP @ v_P.double()
        result = DualOlmo2(model)(case.tokens_BS1, v_P)
        assert result.hv_P.dtype == torch.float32
        ours.append(relative(result.hv_P, exact_P))
        _, gradient_P = differentiable_gradient(model, case.tokens_BS1)
        double_backward = torch.autograd.grad(gradient_P @ v_P, list(model.parameters()))
        theirs.append(relative(torch.cat([part.flatten() for part in double_backward]), exact_P))
    assert max(ours) < 2e-5
    assert sum(ours) < 1.5 * sum(theirs)


def test_dual_product_of_a_wider_model_in_fp32():
    """At initial weights and width 64 fp32 rounds as it does in use: 1e-6, and three times that to be safe."""
    config: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model, exact = (DualOlmo2(tiny_model(dtype, std=0.02, **config)) for dtype in (torch.float32, torch.float64))
    v_P = exact.parameters.probe(0, 0)
    exact_P = exact(random_tokens(), v_P).hv_P
    assert relative(model(random_tokens(), v_P.float()).hv_P, exact_P) < 3e-6


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": True},
        {"queries_per_chunk": 3},
        {"tokens_per_chunk": 4},
        {"checkpointing": True, "queries_per_chunk": 2, "tokens_per_chunk": 5},
    ],
    ids=str,
)
def test_saving_memory_changes_no_number(case, options):
    """Only the order of sums differs: rounding of float64."""
    v_P = gaussian(len(case.dense.hessian_PP))
    plain = DualOlmo2(case.model)(case.tokens_BS1, v_P)
    thrifty = DualOlmo2(case.model, **options)(case.tokens_BS1, v_P)
    assert relative(thrifty.hv_P, plain.hv_P) < 1e-13
    assert thrifty.loss == pytest.approx(plain.loss, rel=1e-14)


def test_checkpointing_keeps_less_for_the_backward_pass():
    """Bytes that autograd saves in the forward pass, counted by its own hook."""
    model, tokens = tiny_model(num_hidden_layers=4), random_tokens()
    size = sum(weight.numel() for weight in model.parameters())

    def saved_bytes(**options) -> int:
        held: dict[int, int] = {}

        def pack(tensor):
            held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        operator = DualOlmo2(model, **options)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            operator._loss(tokens, _duals(operator, gaussian(size)))
        return sum(held.values())

    assert saved_bytes(checkpointing=True) < 0.5 * saved_bytes()


def _duals(operator, v_P):
    tangents = operator.parameters.split(v_P)
    return {name: Dual(weight, tangents[name]) for name, weight in operator.parameters.weights.items()}


def test_finite_differences_keep_their_documented_accuracy(case):
    """For a random vector and for the top eigenvector, whose curvature is orders of magnitude above."""
    hessian_PP = case.dense.hessian_PP
    operator = FiniteDifference(tiny_model(torch.float32, **case.config))
    top_P = torch.linalg.eigh(hessian_PP).eigenvectors[:, -1]
    for v_P in (operator.parameters.probe(0, 0).double(), top_P):
        result = operator(case.tokens_BS1, v_P.float())
        assert relative(result.hv_P, hessian_PP @ v_P) < 1e-3
        assert result.loss == pytest.approx(case.dense.loss, rel=1e-6)


def test_finite_differences_leave_the_model_as_it_was(case):
    model = tiny_model(torch.float32, **case.config)
    before = [weight.detach().clone() for weight in model.parameters()]
    operator = FiniteDifference(model)
    operator(case.tokens_BS1, operator.parameters.probe(0, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("config", [{"attention_bias": True}, {"tie_word_embeddings": True}, {"hidden_act": "gelu"}])
def test_dual_layers_refuse_what_they_do_not_know_and_name_the_way_out(config):
    with pytest.raises(UserError, match="--route finite-difference"):
        DualOlmo2(tiny_model(**config))


def test_finite_differences_take_what_the_dual_layers_refuse():
    """A tied model has fewer parameters; its dense Hessian sums both uses of the table."""
    config: dict[str, Any] = {"tie_word_embeddings": True, "hidden_act": "gelu"}
    tokens = random_tokens()
    dense = dense_hessian(tiny_model(**config), tokens)
    operator = FiniteDifference(tiny_model(torch.float32, **config))
    v_P = operator.parameters.probe(0, 0)
    assert relative(operator(tokens, v_P).hv_P, dense.hessian_PP @ v_P.double()) < 1e-3


def test_layout_of_a_vector_is_the_models_own():
    model = tiny_model()
    parameters = DualOlmo2(model).parameters
    v_P = gaussian(parameters.size)
    torch.nn.utils.vector_to_parameters(v_P, list(model.parameters()))
    assert all(torch.equal(parameters.split(v_P)[name], weight) for name, weight in model.named_parameters())
    assert sum(parameters.block_sizes().values()) == parameters.size
    assert parameters.block_sizes()["embedding"] == TINY["vocab_size"] * TINY["hidden_size"]
