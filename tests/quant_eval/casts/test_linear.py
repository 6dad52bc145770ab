"""Linears of cast inputs: the formula with casts off, by hand, against bitsandbytes.

Shapes: O outputs, I inputs, N tokens.
"""

import copy

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from torch import nn

from quant_eval.casts.activations import ActivationCast, activation_cast
from quant_eval.casts.linear import CastLinear, share_inputs, shifted_bias
from quant_eval.rounding.bitsandbytes import dense_weight, int8_linear
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.transforms.steps import Blocks, Transform
from tests.quant_eval.casts.wrapped import wrapped_linear
from tests.quant_eval.specs import grid_spec


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(matrix_II: torch.Tensor, shift_I: torch.Tensor | None = None) -> Transform:
    return Transform(Blocks(matrix_II[None]), shift_I=shift_I)


def orthogonal(width: int, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(normal(width, width, seed=seed).double())[0]


@pytest.mark.parametrize("with_output", [False, True])
@pytest.mark.parametrize("with_shift", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_with_casts_off_it_is_the_linear(with_bias, with_shift, with_output):
    linear = nn.Linear(32, 24, bias=with_bias)
    with torch.no_grad():
        linear.weight.copy_(normal(24, 32))
    shift_I = 5 * normal(32, seed=1) if with_shift else None
    transform = matrix(torch.eye(32) + 0.1 * normal(32, 32, seed=2), shift_I)
    output = matrix(orthogonal(24)) if with_output else None
    x = normal(2, 3, 32, seed=3)
    with torch.no_grad():
        weight_OI = transform.weight(linear.weight)
        if output is not None:
            weight_OI = (orthogonal(24).T @ weight_OI.double()).float()
        bias_O = shifted_bias(linear.weight, linear.bias, transform)
        replacement = CastLinear(weight_OI, bias_O, transform, nn.Identity(), output)
        y, expected = replacement(x), linear(x)
    assert (replacement.in_features, replacement.out_features) == (32, 24)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_tokens_at_the_shift_meet_the_weight_that_is_not_rounded():
    weight_OI, bias_O, shift_I = normal(8, 16), normal(8, seed=1), 3 * normal(16, seed=2)
    transform = matrix(torch.eye(16), shift_I)
    rounded_OI = round_to_nearest(weight_OI, grid_spec("rtn-b2-perchannel")).dense()
    shifted_O = shifted_bias(weight_OI, bias_O, transform)
    linear = CastLinear(rounded_OI, shifted_O, transform, ActivationCast("int4", 16))
    torch.testing.assert_close(linear(shift_I), weight_OI @ shift_I + bias_O)


def test_eight_bits_per_token_are_those_of_bitsandbytes():
    """Both take integers times a step of the largest magnitude, of which there are 127 in it there
    and 127.5 here. On numbers that bitsandbytes decodes, codes are the same here, and so outputs
    are in that ratio. The largest are positive, as -127.5 would go to the even -128.
    """
    linear = nn.Linear(64, 48, bias=False)
    weight_OI, x_NI = normal(48, 64), normal(30, 64, seed=1) * normal(30, 1, seed=2).exp()
    for rows in (weight_OI, x_NI):
        rows[:, 3] = 1.5 * rows.abs().amax(1)
    linear.weight.data = weight_OI
    block = nn.Sequential(int8_linear("0", copy.deepcopy(linear), threshold=0))
    half_NI = x_NI.half().float()  # its cast, from which it takes steps
    step_N1 = half_NI[:, 3:4] / 127
    decoded_NI = (half_NI / step_N1).round() * step_N1
    with torch.no_grad():
        theirs_NO = block(x_NI)

    spec, cast = grid_spec("w8a8"), ActivationCast("int8", 64)
    decoded_OI = dense_weight(block[0])
    ours = CastLinear(round_to_nearest(decoded_OI, spec).dense(), None, Transform(), cast)
    ours_NO = ours(decoded_NI) * (127.5 / 127) ** 2
    # its constant on a CPU is off by 1.8e-5
    largest = float(theirs_NO.abs().max())
    torch.testing.assert_close(ours_NO, theirs_NO, rtol=0, atol=3e-5 * largest)

    whole_NO = x_NI @ weight_OI.T
    direct = CastLinear(round_to_nearest(weight_OI, spec).dense(), None, Transform(), cast)
    errors = [float((y_NO - whole_NO).norm()) for y_NO in (direct(x_NI), theirs_NO)]
    assert 1e-3 * float(whole_NO.norm()) < errors[1]  # far above the tolerance
    assert errors[1] < errors[0] < 2 * errors[1]  # here the largest loses half a step


@pytest.mark.parametrize(
    ("name", "preset"),
    [("fp8", "FP8_DYNAMIC"), ("fp8-astatic", "FP8")]
    + [(name, name.upper()) for name in ("mxfp8", "mxfp4", "nvfp4")],
)
def test_a_preset_is_compressed_tensors_own_linear(name, preset):
    """Its forward with scales from the same text: weights, inputs and product, bit for bit."""
    weight_OI, observed, x = normal(24, 64), normal(40, 64, seed=1), normal(2, 5, 64, seed=2)
    spec, scheme = grid_spec(name), preset_name_to_scheme(preset, ["Linear"])
    cast = activation_cast(spec, 64)
    assert cast is not None
    if cast.needs_range:
        cast.observe(observed)
        cast.fix("layer")
    ours = CastLinear(round_to_nearest(weight_OI, spec).dense(), None, Transform(), cast)
    theirs = wrapped_linear(weight_OI, scheme.weights, scheme.input_activations, observed)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


class Counted(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x.round()


def test_linears_of_one_input_cast_it_once_and_never_an_older_one():
    cast = Counted()
    linears = [CastLinear(normal(4, 8, seed=s), None, Transform(), cast) for s in range(3)]
    for linear in linears[1:]:
        linear.inputs.transform = linears[0].inputs.transform
    apart = copy.deepcopy(linears)
    share_inputs(linears)
    x = normal(5, 8, seed=9)
    for count in range(1, 4):
        outputs = [linear(x) for linear in linears]
        assert cast.calls == count
        assert all(torch.equal(y, linear(x)) for y, linear in zip(outputs, apart, strict=True))
        assert linears[0].inputs._last is None  # nothing is kept once all have read it
        x.add_(1)  # a buffer is written anew, in place
    linears[0](x)
    x.add_(1)  # before all have read it
    assert torch.equal(linears[1](x), apart[1](x))
    first = apart[0](x)
    other = 2 * x
    assert torch.equal(linears[1](other), apart[1](other))  # another tensor comes between
    assert torch.equal(linears[0](x), first)
    copied = copy.deepcopy(nn.ModuleList(linears))
    assert copied[0].inputs is copied[2].inputs is not linears[0].inputs
