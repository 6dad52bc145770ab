"""Properties that no architecture decides: the oracle itself, rounding, memory, finite differences. The
rest: architectures/.

Shapes: P parameters.
"""

import statistics

import pytest
import torch

from base.ranks import ALONE
from curvature.products.model import CurvedModel
from tests.curvature.conftest import (
    dense_hessian,
    differentiable_gradient,
    dual_hessian,
    gaussian,
    random_tokens,
    relative,
    tiny_model,
)


def test_every_column_of_a_whole_hessian(case):
    """Every seventh column: at least one is in every row of the matrices."""
    hessian, hessian_PP = dual_hessian(tiny_model(**case.config)), case.dense.hessian_PP
    for column in range(0, len(hessian_PP), 7):
        unit_P = torch.zeros(len(hessian_PP), dtype=torch.float64)
        unit_P[column] = 1
        actual_P = hessian.product(case.tokens_BS1, unit_P).hv_p
        assert (actual_P - hessian_PP[column]).abs().max() < 1e-12 * hessian_PP.abs().max()


def test_dual_product_in_fp32_is_as_good_as_fp32(case):
    """As near to the float64 Hessian as double backward through HF in fp32.

    A random narrow norm may amplify one rounding error of a batch a hundredfold, whoever makes it,
    so the errors of several batches are compared.
    """
    model = tiny_model(torch.float32, **case.config)
    hessian = dual_hessian(tiny_model(torch.float32, **case.config))
    ours, theirs = [], []
    for seed in range(8):
        tokens_BS1 = random_tokens(seed=seed)
        dense = dense_hessian(case.model, tokens_BS1)
        v_P = gaussian(len(dense.hessian_PP), seed, torch.float32)
        exact_P = dense.hessian_PP @ v_P.double()
        hv_P = hessian.product(tokens_BS1, v_P).hv_p
        assert hv_P.dtype == torch.float32
        ours.append(relative(hv_P, exact_P))
        _, gradient_P = differentiable_gradient(model, tokens_BS1)
        double_backward = torch.autograd.grad(gradient_P @ v_P, list(model.parameters()))
        theirs.append(relative(torch.cat([part.flatten() for part in double_backward]), exact_P))
    assert statistics.median(ours) < 2e-5
    assert statistics.geometric_mean(ours) < 1.5 * statistics.geometric_mean(theirs)


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


def test_a_product_of_several_batches_is_that_of_all_their_sequences(case):
    """Batches of 2 and 1 sequences weigh by their sizes; only the order of sums differs."""
    tokens, v_P = random_tokens(3), gaussian(len(case.dense.hessian_PP))
    model = tiny_model(**case.config)
    hessian = dual_hessian(model)
    together = hessian.product(tokens, v_P)
    parts = hessian.mean_product(tokens.split(2), v_P)
    assert relative(parts.hv_p, together.hv_p) < 1e-13
    assert parts[:2] == pytest.approx(together[:2], rel=1e-13)


def test_gradients_of_several_batches_do_not_stay_beside_the_weights(case, monkeypatch):
    """Nor is one batch's still there when the next is computed."""
    model = tiny_model(**case.config)
    hessian = dual_hessian(model)
    gradients: list[torch.Tensor | None] = []
    dual_loss = CurvedModel.dual_loss

    def seen(self, tokens_BS1):
        gradients.extend(weight.grad for weight in model.parameters())
        return dual_loss(self, tokens_BS1)

    monkeypatch.setattr(CurvedModel, "dual_loss", seen)
    hessian.mean_product(random_tokens(3).split(1), gaussian(len(case.dense.hessian_PP)))
    gradients.extend(weight.grad for weight in model.parameters())
    assert gradients
    assert all(gradient is None for gradient in gradients)


def test_checkpointing_keeps_less_for_the_backward_pass():
    """Bytes that autograd saves in the forward pass, by its own hook; zeros take as many."""

    def saved_bytes(**options) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        curved = CurvedModel(tiny_model(num_hidden_layers=4), ranks=ALONE, **options)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            curved.dual_loss(random_tokens())
        return sum(sizes.values())

    assert saved_bytes(checkpointing=True) < 0.5 * saved_bytes()
