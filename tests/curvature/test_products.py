"""What no architecture decides: the oracle itself, rounding, memory, finite differences. The rest: architectures/.

Shapes: P parameters.
"""

from typing import Any

import pytest
import torch

from curvature.finite_difference import DifferenceHessian
from curvature.model import CurvedModel
from curvature.parameters import Probe
from tests.curvature.conftest import (
    ALONE,
    TINY,
    dense_hessian,
    differentiable_gradient,
    dual_hessian,
    gaussian,
    random_tokens,
    relative,
    tiny_model,
)
from train.command import UserError


def differences(model) -> DifferenceHessian:
    return DifferenceHessian(CurvedModel(model, ranks=ALONE, dual=False))


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


def test_every_column_of_a_whole_hessian(case):
    """Of the seventh columns, at least one lies in every row of the matrices."""
    hessian, hessian_PP = dual_hessian(tiny_model(**case.config)), case.dense.hessian_PP
    for column in range(0, len(hessian_PP), 7):
        unit_P = torch.zeros(len(hessian_PP), dtype=torch.float64)
        unit_P[column] = 1
        actual_P = hessian.product(case.tokens_BS1, unit_P).hv_p
        assert (actual_P - hessian_PP[column]).abs().max() < 1e-12 * hessian_PP.abs().max()


def test_dual_product_in_fp32_is_as_good_as_fp32(case):
    """As near to the float64 Hessian as double backward through HF in fp32; random narrow norms amplify rounding."""
    model = tiny_model(torch.float32, **case.config)
    hessian = dual_hessian(tiny_model(torch.float32, **case.config))
    ours, theirs = [], []
    for seed in range(4):
        v_P = gaussian(len(case.dense.hessian_PP), seed, torch.float32)
        exact_P = case.dense.hessian_PP @ v_P.double()
        hv_P = hessian.product(case.tokens_BS1, v_P).hv_p
        assert hv_P.dtype == torch.float32
        ours.append(relative(hv_P, exact_P))
        _, gradient_P = differentiable_gradient(model, case.tokens_BS1)
        double_backward = torch.autograd.grad(gradient_P @ v_P, list(model.parameters()))
        theirs.append(relative(torch.cat([part.flatten() for part in double_backward]), exact_P))
    assert max(ours) < 2e-5
    assert sum(ours) < 1.5 * sum(theirs)


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
    plain = dual_hessian(tiny_model(**case.config)).product(case.tokens_BS1, v_P)
    thrifty = dual_hessian(tiny_model(**case.config), **options).product(case.tokens_BS1, v_P)
    assert relative(thrifty.hv_p, plain.hv_p) < 1e-13
    assert thrifty.loss == pytest.approx(plain.loss, rel=1e-14)


def test_checkpointing_keeps_less_for_the_backward_pass():
    """Bytes that autograd saves in the forward pass, counted by its own hook; tangents of zeros take as many."""

    def saved_bytes(**options) -> int:
        held: dict[int, int] = {}

        def pack(tensor):
            held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        curved = CurvedModel(tiny_model(num_hidden_layers=4), ranks=ALONE, **options)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            curved.dual_loss(random_tokens())
        return sum(held.values())

    assert saved_bytes(checkpointing=True) < 0.5 * saved_bytes()


def test_finite_differences_keep_their_documented_accuracy(case):
    """For a random vector and for the top eigenvector, whose curvature is orders of magnitude above."""
    hessian_PP, hessian = case.dense.hessian_PP, differences(tiny_model(torch.float32, **case.config))
    top_P = torch.linalg.eigh(hessian_PP).eigenvectors[:, -1]
    for v_P in (hessian.parameters.probe(Probe(0, 0)).double(), top_P):
        result = hessian.product(case.tokens_BS1, v_P.float())
        assert relative(result.hv_p, hessian_PP @ v_P) < 1e-3
        assert result.loss == pytest.approx(case.dense.loss, rel=1e-6)


def test_finite_differences_leave_the_model_as_it_was(case):
    model = tiny_model(torch.float32, **case.config)
    before = [weight.detach().clone() for weight in model.parameters()]
    hessian = differences(model)
    hessian.product(case.tokens_BS1, hessian.parameters.probe(Probe(0, 0)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_finite_differences_take_what_the_dual_layers_refuse():
    """Another activation, in a tied model: the Hessian sums both uses of the table."""
    config: dict[str, Any] = {"tie_word_embeddings": True, "hidden_act": "gelu"}
    with pytest.raises(UserError, match="--route finite-difference"):
        dual_hessian(tiny_model(**config))
    tokens = random_tokens()
    dense = dense_hessian(tiny_model(**config), tokens)
    hessian = differences(tiny_model(torch.float32, **config))
    v_P = hessian.parameters.probe(Probe(0, 0))
    assert relative(hessian.product(tokens, v_P).hv_p, dense.hessian_PP @ v_P.double()) < 1e-3


def test_layout_of_a_vector_is_the_models_own():
    model = tiny_model()
    weights = dict(model.named_parameters())
    parameters = dual_hessian(model).parameters
    v_P = gaussian(parameters.size)
    torch.nn.utils.vector_to_parameters(v_P, list(weights.values()))
    assert list(parameters.weights) == list(weights)
    assert all(torch.equal(parameters.split(v_P)[name], weight) for name, weight in weights.items())
    assert sum(parameters.block_sizes().values()) == parameters.size
    assert parameters.block_sizes()["embedding"] == TINY["vocab_size"] * TINY["hidden_size"]
