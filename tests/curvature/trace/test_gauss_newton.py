"""Gauss-Newton and Fisher traces against dense Jacobians and per-token gradients of a tiny model.

Shapes: B sequences, S positions, N = B S tokens, V vocabulary, P parameters.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

import curvature.trace.gauss_newton as module
from base.random_words import words
from base.ranks import ALONE
from curvature.products.exact import Quadratic
from curvature.products.sharing import Sharing
from curvature.trace.gauss_newton import (
    fisher_loss,
    ggn_loss,
    sampled_labels,
    token_signs,
    token_uniforms,
)
from curvature.trace.hutchinson import estimate_trace
from tests.curvature.trace.conftest import VOCABULARY, sequences, trained_model


@pytest.fixture(scope="module")
def model():
    return trained_model(20)


def logits_of(model, tokens_BS1: Tensor) -> Tensor:
    return model(tokens_BS1[:, :-1], use_cache=False).logits


def tokens_of(batch: int, length: int) -> Tensor:
    return sequences(batch, 4, torch.Generator().manual_seed(3), length=length)


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights, retain_graph=True), strict=True))


def squares(model, loss: Tensor, tokens: int) -> dict[str, float]:
    """|gradient of t|^2 / N, what one backward pass gives."""
    return {
        name: float(part.square().sum()) / tokens for name, part in gradients(model, loss).items()
    }


def gauss_newton_traces(model, tokens_BS1: Tensor) -> dict[str, float]:
    """(1/N) sum_n tr J_n'(diag p_n - p_n p_n')J_n by tensor, from the logits' dense Jacobian."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def logits(values: dict[str, Tensor]) -> Tensor:
        call = torch.func.functional_call(
            model, values, (tokens_BS1[:, :-1],), {"use_cache": False}
        )
        return call.logits.flatten(0, 1)

    p_NV = logits(weights).softmax(dim=-1)
    middle_NVV = torch.diag_embed(p_NV) - p_NV[:, :, None] * p_NV[:, None, :]
    jacobians = torch.func.jacrev(logits)(weights)
    return {
        name: (
            float(torch.einsum("nvp,nvw,nwp->", j.flatten(2), middle_NVV, j.flatten(2))) / len(p_NV)
        )
        for name, j in jacobians.items()
    }


def fisher_traces(model, tokens_BS1: Tensor) -> dict[str, float]:
    """(1/N) sum_n |grad l_n|^2 by tensor, one backward pass per token."""
    log_p_NV = logits_of(model, tokens_BS1).log_softmax(dim=-1).flatten(0, 1)
    labels = tokens_BS1[:, 1:].flatten().tolist()
    each = [squares(model, -log_p_NV[n, label], len(labels)) for n, label in enumerate(labels)]
    return {name: math.fsum(part[name] for part in each) for name in each[0]}


def test_expectation_over_all_labels_is_the_gauss_newton_trace(model, monkeypatch):
    """Two tokens, so all 144 pairs of labels, each with its probability."""
    tokens_BS1 = tokens_of(1, 2)
    logits_BSV = logits_of(model, tokens_BS1)
    p_NV = logits_BSV.detach().softmax(dim=-1)[0]
    mean = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for labels in itertools.product(range(VOCABULARY), repeat=2):
        monkeypatch.setattr(
            module, "sampled_labels", lambda logits, uniforms, y=labels: torch.tensor(y)
        )
        sample = squares(model, ggn_loss(logits_BSV, tokens_BS1, range(1), seed=0, microbatch=0), 2)
        probability = float(p_NV[0, labels[0]] * p_NV[1, labels[1]])
        mean = {name: value + probability * sample[name] for name, value in mean.items()}
    # HF's norms compute in fp32
    assert mean == pytest.approx(gauss_newton_traces(model, tokens_BS1), rel=1e-5)


def test_expectation_over_all_signs_is_the_fisher_trace(model, monkeypatch):
    tokens_BS1 = tokens_of(2, 3)
    logits_BSV = logits_of(model, tokens_BS1)
    samples = []
    for signs in itertools.product((-1.0, 1.0), repeat=6):
        rows = torch.tensor(signs, dtype=torch.float64).view(2, 3)
        monkeypatch.setattr(
            module, "token_signs", lambda seed, microbatch, sequence, length, s=rows: s[sequence]
        )
        samples.append(
            squares(model, fisher_loss(logits_BSV, tokens_BS1, range(2), seed=0, microbatch=0), 6)
        )
    mean = {name: math.fsum(sample[name] for sample in samples) / 64 for name in samples[0]}
    assert mean == pytest.approx(fisher_traces(model, tokens_BS1), rel=1e-5)


@pytest.mark.parametrize(
    ("draw", "traces"), [(ggn_loss, gauss_newton_traces), (fisher_loss, fisher_traces)]
)
def test_drawn_samples_estimate_the_trace(model, draw, traces):
    """With the project's own draws, through the estimator of the Hessian's trace."""
    tokens_BS1 = tokens_of(4, 6)
    logits_BSV = logits_of(model, tokens_BS1)
    exact = traces(model, tokens_BS1)

    def drawn(index: int) -> Quadratic:
        loss = draw(logits_BSV, tokens_BS1, range(4), seed=1, microbatch=index)
        return Quadratic(0.0, 0.0, squares(model, loss, 24))

    result = estimate_trace(drawn, tuple(exact), pairs=300, sharing=Sharing(ALONE, False))
    assert abs(result.total.mean - math.fsum(exact.values())) < 3 * result.total.standard_error
    assert result.total.standard_error < 0.1 * result.total.mean
    for name, value in exact.items():
        assert abs(result.tensors[name].mean - value) < 4 * result.tensors[name].standard_error, (
            name
        )


@pytest.mark.parametrize("draw", [ggn_loss, fisher_loss])
def test_result_does_not_depend_on_who_holds_which_sequences(model, draw):
    tokens_BS1 = tokens_of(5, 6)
    logits_BSV = logits_of(model, tokens_BS1)
    whole = gradients(model, draw(logits_BSV, tokens_BS1, range(5), seed=2, microbatch=7))
    parts = [
        gradients(
            model, draw(logits_BSV[part], tokens_BS1[part], range(5)[part], seed=2, microbatch=7)
        )
        for part in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    for name, gradient in whole.items():
        torch.testing.assert_close(
            sum(part[name] for part in parts), gradient, rtol=1e-10, atol=1e-12
        )
    other = gradients(model, draw(logits_BSV, tokens_BS1, range(5), seed=2, microbatch=8))
    assert all(not torch.allclose(other[name], whole[name]) for name in whole), (
        "every microbatch has draws of its own"
    )


def test_labels_invert_the_distribution_function():
    """Evenly spaced u give each label its probability within one, in the labels' order."""
    probabilities = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.05, 0.25, 0.0], dtype=torch.float64)
    count = 1000
    uniforms_N = (torch.arange(count).double() + 0.5) / count
    labels_N = sampled_labels(probabilities.log().expand(count, -1) + 700.0, uniforms_N)
    assert torch.equal(labels_N, labels_N.sort().values)
    assert (torch.bincount(labels_N, minlength=7) - probabilities * count).abs().max() < 1
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sampled_labels(probabilities.log().expand(2, -1), edges).tolist() == [1, 5], (
        "none of probability 0"
    )


def test_labels_of_logits_that_are_not_finite_leave_the_loss_to_be_refused():
    logits_BSV = torch.full((1, 3, 4), math.nan)
    loss = ggn_loss(
        logits_BSV, torch.zeros(1, 4, dtype=torch.int64), range(1), seed=0, microbatch=0
    )
    assert math.isnan(float(loss))


def test_draws_are_words_of_their_own_streams():
    stream = [word % 2**64 for word in words("uniform/3/5/2", 0, 50).tolist()]
    assert token_uniforms(3, 5, 2, 50).tolist() == [(word >> 11) / 2**53 for word in stream]
    assert torch.equal(token_uniforms(3, 5, 2, 20), token_uniforms(3, 5, 2, 50)[:20])
    stream = [word % 2**64 for word in words("sign/3/5/2", 0, 50).tolist()]
    assert token_signs(3, 5, 2, 50).tolist() == [1.0 if word >> 63 else -1.0 for word in stream]
