"""The gradient of rounding against finite differences of what it is the derivative of."""

import pytest
import torch

from quant_eval.learned import StraightThroughCast, rounded_weight, straight_through
from quant_eval.specs import parse_spec


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def smooth(x, start, size):
    """Rounding with the error of rounding at `start` frozen in units of the scale: round(u) is u
    plus a constant, and the scale is that of x.
    """
    groups, starts = x.view(-1, size), start.view(-1, size)
    scale, scale0 = (each.abs().amax(1, keepdim=True) / 7.5 for each in (groups, starts))
    constant = (starts / scale0).round() - starts / scale0
    return (scale * (groups / scale + constant)).view(x.shape)


@pytest.mark.parametrize("size", [4, 12, 24])
def test_gradient_is_that_of_rounding_at_a_scale_that_follows(size):
    x, weights = normal(2, 12), normal(2, 12, seed=1)
    scale = x.view(-1, size).abs().amax(1, keepdim=True) / 7.5
    rounded = ((x.view(-1, size) / scale).round() * scale).view(x.shape)
    torch.testing.assert_close(smooth(x, x, size), rounded)  # the same point to begin with

    leaf = x.clone().requires_grad_()
    result = straight_through(leaf, rounded, size)
    assert torch.equal(result, rounded)
    (result * weights).sum().backward()

    expected, step = torch.empty_like(x), 1e-6
    for index in range(x.numel()):
        moved = torch.zeros(x.numel(), dtype=torch.float64)
        moved[index] = step
        change = smooth(x + moved.view(x.shape), x, size) - smooth(x - moved.view(x.shape), x, size)
        expected.view(-1)[index] = (change * weights).sum() / (2 * step)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-7, atol=1e-8)


def test_a_group_of_zeros_passes_the_gradient_on():
    leaf = torch.zeros(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(straight_through(leaf, torch.zeros(2, 4), 4).sum(), leaf)
    assert torch.equal(gradient, torch.ones(2, 4))


@pytest.mark.parametrize("name", ["w4a4-g16", "mxfp4", "nvfp4", "fp8", "w8a8-astatic", "fp8e5m2"])
def test_multiplied_inputs_make_multiplied_outputs(name):
    """By Euler: casts with scales in proportion have the outputs as derivative along the inputs."""
    spec, x = parse_spec(f"{name}-spinquant-blockwise"), normal(3, 32).float().requires_grad_()
    output = StraightThroughCast(spec, 32)(x)
    weights = normal(3, 32, seed=1).float()
    (gradient,) = torch.autograd.grad((output * weights).sum(), x)
    torch.testing.assert_close((gradient * x).sum(), (output * weights).sum())


def test_weights_as_they_are():
    spec, weight_OI = parse_spec("a4-spinquant-blockwise"), normal(3, 32).float()
    assert rounded_weight(weight_OI, spec) is weight_OI
    spec = parse_spec("rtn-b4-g16-spinquant-blockwise")
    assert StraightThroughCast(spec, 32)(weight_OI) is weight_OI
