"""Dual operations against first and second derivatives that torch takes of transformers' own
activations and norms.

Shapes: N values, I features.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN, XIELUActivation

from curvature.products.dual import Dual, clipped, gelu, layer_norm, silu, xielu

# Ordinary values, the ends where a careless formula overflows, and xIELU's strip between its
# epsilon and 0.
X_N = torch.cat(
    [torch.linspace(-6, 6, 121), torch.tensor([-200, -40, -1e-3, -5e-7, 0, 1e-9, 40, 200])]
).double()


def derivatives(function, *at):
    """Sum of a function, its derivative along fixed directions u, and that derivative's gradient
    by every leaf.
    """
    leaves = [leaf.clone().requires_grad_() for leaf in at]
    directions = [
        torch.randn(leaf.shape, generator=generator(i)).double() for i, leaf in enumerate(leaves)
    ]
    value = function(*leaves)
    weights = torch.randn(value.shape, generator=generator(9)).double()
    gradients = torch.autograd.grad((weights * value).sum(), leaves, create_graph=True)
    slope = torch.stack([(u * g).sum() for u, g in zip(directions, gradients, strict=True)]).sum()
    return (
        value,
        slope,
        torch.autograd.grad(slope, leaves, allow_unused=True, materialize_grads=True),
    )


def dual_derivatives(function, *at):
    leaves = [leaf.clone().requires_grad_() for leaf in at]
    directions = [
        torch.randn(leaf.shape, generator=generator(i)).double() for i, leaf in enumerate(leaves)
    ]
    value, tangent = function(*map(Dual, leaves, directions))
    slope = (torch.randn(value.shape, generator=generator(9)).double() * tangent).sum()
    return (
        value,
        slope,
        torch.autograd.grad(slope, leaves, allow_unused=True, materialize_grads=True),
    )


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


@pytest.mark.parametrize(("name", "function"), [("silu", silu), ("gelu", gelu)])
def test_activations(name, function):
    check(function, ACT2FN[name], X_N)


def test_xielu_with_its_learned_scalars():
    """At 0, where the second derivative jumps, and in the strip below it: the derivatives of
    transformers' branch.
    """
    theirs: Any = XIELUActivation(dtype=torch.float64)
    alpha_p, alpha_n = torch.tensor([0.3]).double(), torch.tensor([-0.7]).double()

    def of_transformers(x, alpha_p, alpha_n):
        return torch.func.functional_call(theirs, {"alpha_p": alpha_p, "alpha_n": alpha_n}, (x,))

    def ours(x, alpha_p, alpha_n):
        return xielu(x, alpha_p, alpha_n, theirs.beta, theirs.eps)

    check(ours, of_transformers, X_N, alpha_p, alpha_n)


def test_clipped_entries_have_no_derivative_and_those_on_the_limit_have():
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
