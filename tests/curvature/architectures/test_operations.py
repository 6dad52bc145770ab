"""Dual operations against first and second derivatives that torch takes of its own or
transformers' functions.

Shapes: N values, I features, B sequences, K key/value heads, G query heads of each, S positions, E
    features of a head, V vocabulary.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN, XIELUActivation

from curvature.dual.attention import causal_attention
from curvature.dual.cross_entropy import summed_cross_entropy
from curvature.dual.elementwise import layer_norm, rms_norm, rotated, swiglu
from curvature.dual.numbers import Dual, clipped, gelu, xielu

# Ordinary values, the ends where a careless formula overflows, and xIELU's strip between its
# epsilon and 0.
X_N = torch.cat(
    [torch.linspace(-6, 6, 121), torch.tensor([-200, -40, -1e-3, -5e-7, 0, 1e-9, 40, 200])]
).double()


def directions_of(leaves):
    return [
        torch.randn(leaf.shape, generator=generator(i)).double() for i, leaf in enumerate(leaves)
    ]


def joint(value, slope):
    """A later layer, which gives value and slope gradients."""
    also = torch.randn(value.shape, generator=generator(8)).double()
    return slope + (also * value.square()).sum()


def derivatives(function, *at):
    """Sum of a function, its derivative along fixed u, and by every leaf both gradients."""
    leaves = [leaf.clone().requires_grad_() for leaf in at]
    value = function(*leaves)
    weights = torch.randn(value.shape, generator=generator(9)).double()
    gradients = torch.autograd.grad((weights * value).sum(), leaves, create_graph=True)
    pairs = zip(directions_of(leaves), gradients, strict=True)
    slope = torch.stack([(u * g).sum() for u, g in pairs]).sum()
    second = torch.autograd.grad(joint(value, slope), leaves)
    return value, slope, second


def dual_derivatives(function, *at):
    leaves = [leaf.clone().requires_grad_() for leaf in at]
    value, tangent = function(*map(Dual, leaves, directions_of(leaves)))
    weights = torch.randn(value.shape, generator=generator(9)).double()
    slope = (weights * tangent).sum()
    return value, slope, torch.autograd.grad(joint(value, slope), leaves)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(dual_function, function, *leaves) -> None:
    """Values, slopes and second derivatives, to rounding of float64."""
    value, slope, second = dual_derivatives(dual_function, *leaves)
    expected_value, expected_slope, expected_second = derivatives(function, *leaves)
    torch.testing.assert_close(value, expected_value, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(second, expected_second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gelu():
    check(gelu, ACT2FN["gelu"], X_N)


def test_swiglu():
    """At the ends of the gate too."""
    up_N = torch.randn(X_N.shape, generator=generator(3)).double()
    check(swiglu, lambda gate, up: ACT2FN["silu"](gate) * up, X_N, up_N)


def test_xielu_with_its_learned_scalars():
    """At 0, where the second derivative jumps, and below: that of transformers' branch."""
    theirs: Any = XIELUActivation(dtype=torch.float64)
    alpha_p, alpha_n = torch.tensor([0.3]).double(), torch.tensor([-0.7]).double()

    def of_transformers(x, alpha_p, alpha_n):
        return torch.func.functional_call(theirs, {"alpha_p": alpha_p, "alpha_n": alpha_n}, (x,))

    def ours(x, alpha_p, alpha_n):
        return xielu(x, alpha_p, alpha_n, theirs.beta, theirs.eps)

    check(ours, of_transformers, X_N, alpha_p, alpha_n)


def test_clipped_entries_and_those_on_the_limit_have_no_derivative():
    check(
        lambda x: clipped(x * x, 4.0),
        lambda x: (x * x).clamp(-4, 4),
        torch.cat([X_N, torch.tensor([2.0, -2.0])]),
    )


def test_layer_norm():
    x_NI, weight_I, bias_I = (
        torch.randn(5, 7, generator=generator(3)).double(),
        *torch.rand(2, 7).double(),
    )
    check(
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        lambda x, weight, bias: F.layer_norm(x, (7,), weight, bias, 1e-5),
        x_NI,
        weight_I,
        bias_I,
    )


def test_rms_norm_on_a_residual():
    weight_I, residual_NI = torch.rand(7).double(), torch.rand(5, 7).double()
    check(
        lambda x, weight, residual: rms_norm(x, weight, 0.1, residual),
        lambda x, weight, residual: residual + F.rms_norm(x, (7,), weight, 0.1),
        torch.randn(5, 7, generator=generator(3)).double(),
        weight_I,
        residual_NI,
    )


def test_rotary_embedding_of_some_features():
    """As complex numbers, which a rotation multiplies."""
    angles_SE = torch.rand(5, 2, generator=generator(4)).double()
    turns_SE = torch.polar(torch.full_like(angles_SE, 1.5), angles_SE)

    def of_complex(x):
        first, second, others = x.split((2, 2, 3), -1)
        turned = torch.complex(first, second) * turns_SE
        return torch.cat((turned.real, turned.imag, others), -1)

    tables = (torch.cat((half_SE, half_SE), -1) for half_SE in (turns_SE.real, turns_SE.imag))
    cos_SE, sin_SE = tables
    check(
        lambda x: rotated(x, cos_SE, sin_SE, torch.float64),
        of_complex,
        torch.randn(3, 5, 7, generator=generator(3)).double(),
    )


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("rows", [100, 3])
def test_attention_of_grouped_queries(rows, window):
    """Whole and in chunks, of which the last is shorter."""
    batch, num_kv_heads, groups, positions, head_dim = 2, 2, 3, 7, 4
    shape = batch, num_kv_heads, groups, positions, head_dim
    query, key, value = (
        torch.randn(each, generator=generator(3)).double()
        for each in (shape, shape[:2] + shape[3:], shape[:2] + shape[3:])
    )

    def plain(query, key, value):
        hidden = torch.ones(positions, positions).triu(1).bool()
        if window is not None:
            hidden |= torch.ones(positions, positions).tril(-window).bool()
        scores = 0.3 * torch.einsum("bkgse,bkte->bkgst", query, key)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("bkgst,bkte->bskge", weights, value).flatten(2)

    check(
        lambda *qkv: causal_attention(*qkv, scale=0.3, queries_per_chunk=rows, window=window),
        plain,
        query,
        key,
        value,
    )


@pytest.mark.parametrize("rows", [100, 4])
def test_cross_entropy_has_the_gradient_of_its_slope(rows):
    """One label is all but certain; the loss itself carries no gradient."""
    labels_N = torch.randint(0, 9, (10,), generator=generator(1))
    hidden_NI, weight_VI = torch.randn(10, 4).double(), torch.randn(9, 4).double()
    hidden_NI[0] = 30 * weight_VI[labels_N[0]]
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden_NI, weight_VI)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, labels_N, reduction="sum")
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    pairs = zip(directions_of(leaves), gradients, strict=True)
    slope = torch.stack([(u * g).sum() for u, g in pairs]).sum()
    hidden, weight = map(Dual, leaves, directions_of(leaves))
    ours = summed_cross_entropy(hidden, weight, labels_N, tokens_per_chunk=rows)
    assert not ours.value.requires_grad
    torch.testing.assert_close(ours, Dual(loss.detach(), slope), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(3 * ours.tangent, leaves),
        torch.autograd.grad(3 * slope, leaves),
        rtol=1e-12,
        atol=1e-12,
    )
