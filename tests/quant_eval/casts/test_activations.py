"""Casts of activations against compressed-tensors' own modules, and token by token.

Shapes: B sequences, L tokens, N tokens of all sequences, I features.
"""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from base.errors import UserError
from quant_eval.casts.activations import ActivationCast, activation_cast
from quant_eval.specs import parse_spec
from tests.quant_eval.casts.wrapped import wrapped_cast
from tests.quant_eval.rounding.number_search import nearest

WIDTH = 64
DTYPES = [torch.float32, torch.bfloat16]
FORMATS = ["int8", "int4", "int2", "fp8", "fp8e5m2", "mxfp8", "mxfp4", "nvfp4"]
STATIC = ["int8", "fp8", "fp8e5m2"]


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    """Tokens with a loud feature, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, WIDTH, generator=generator)
    x *= torch.randn(*shape, 1, generator=generator).mul(3).exp()
    x[..., 7] *= 20
    return x


def fixed(cast: ActivationCast, x: torch.Tensor) -> ActivationCast:
    if cast.needs_range:
        cast.observe(x)
        cast.fix("layer")
    return cast


PRESETS = {"int8": "W8A8", "int4": "W4A4", "fp8": "FP8_DYNAMIC", "static": "FP8"}
PRESETS |= {name: name.upper() for name in ("mxfp8", "mxfp4", "nvfp4")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_that_of_compressed_tensors_modules(name, dtype):
    x_BLI, observed_BLI = (inputs(3, 5, seed=seed).to(dtype) for seed in (0, 1))
    cast = ActivationCast("fp8", WIDTH, True) if name == "static" else ActivationCast(name, WIDTH)
    args = preset_name_to_scheme(PRESETS[name], ["Linear"]).input_activations
    ours_BLI = fixed(cast, observed_BLI)(x_BLI)
    assert ours_BLI.dtype == dtype
    assert torch.equal(ours_BLI, wrapped_cast(x_BLI, args, observed_BLI))
    assert not torch.equal(ours_BLI, x_BLI)


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_of_every_width_are_those_of_compressed_tensors_modules(bits):
    x_BLI = inputs(3, 5)
    per_token = QuantizationArgs(num_bits=bits, strategy="token", dynamic=True)
    ours_BLI = ActivationCast(f"int{bits}", WIDTH)(x_BLI)
    assert torch.equal(ours_BLI, wrapped_cast(x_BLI, per_token, x_BLI))
    per_tensor = QuantizationArgs(num_bits=bits, strategy="tensor")
    static = fixed(ActivationCast(f"int{bits}", WIDTH, True), x_BLI)
    assert torch.equal(static(x_BLI), wrapped_cast(x_BLI, per_tensor, x_BLI))
    assert 1 < len(ours_BLI[1, 2].unique()) <= 2**bits


def test_e5m2_is_the_nearest_number_with_the_largest_at_its_end():
    x_NI = inputs(6)
    x_NI[3] = 0
    for scale, cast in (
        (x_NI.abs().amax(1, keepdim=True) / 57344, ActivationCast("fp8e5m2", WIDTH)),
        (x_NI.abs().max() / 57344, fixed(ActivationCast("fp8e5m2", WIDTH, True), x_NI)),
    ):
        safe = scale.masked_fill(scale == 0, 1)
        quotients = (x_NI / safe).double().flatten().numpy()
        expected_NI = torch.from_numpy(nearest(quotients, "e5m2")).float().view_as(x_NI) * safe
        assert torch.equal(cast(x_NI), expected_NI)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_token_is_cast_alone_whatever_is_beside_it(name, dtype):
    x_NI = inputs(12).to(dtype)
    cast = fixed(ActivationCast(name, WIDTH), x_NI)
    alone_NI = torch.cat([cast(token_1I) for token_1I in x_NI.split(1)])
    assert torch.equal(cast(x_NI), alone_NI)
    assert torch.equal(cast(x_NI[5]), alone_NI[5])
    for shape in ((3, 4), (2, 3, 2), (1, 12)):
        assert torch.equal(cast(x_NI.view(*shape, WIDTH)).view_as(x_NI), alone_NI)
    padded_NI = torch.cat([x_NI, 1e6 * x_NI[:3]])
    assert torch.equal(cast(padded_NI)[:12], alone_NI)
    transposed_BLI = x_NI.view(3, 4, WIDTH).transpose(0, 1)  # not contiguous
    assert torch.equal(cast(transposed_BLI).transpose(0, 1).reshape(12, WIDTH), alone_NI)
    assert cast(x_NI[:0]).shape == (0, WIDTH)


@pytest.mark.parametrize(("name", "is_static"), [("nvfp4", False), *((n, True) for n in STATIC)])
def test_what_is_static_is_fixed_by_all_that_was_observed(name, is_static):
    x_BLI, others_BLI = inputs(2, 3), inputs(2, 3, seed=1)
    cast = ActivationCast(name, WIDTH, is_static)
    with pytest.raises(AssertionError, match="before it is fixed"):
        cast(x_BLI)
    cast.observe(x_BLI)
    (largest,) = cast.ranges()
    largest.copy_(torch.maximum(largest, others_BLI.abs().max()))  # as over ranks
    cast.fix("layer")
    together = fixed(ActivationCast(name, WIDTH, is_static), torch.cat([x_BLI, others_BLI]))
    assert torch.equal(cast(x_BLI), together(x_BLI))
    # half the widest spacing, of E2M1 from 4 to 6, and a sixteenth for an E4M3 scale too small
    assert float((cast(x_BLI) - x_BLI).abs().max()) <= (1 / 6 + 1 / 16) * largest
    limited = cast(1e3 * x_BLI).abs().max()  # beyond what was observed: at the largest number
    assert limited <= 1.01 * largest or name == "nvfp4"


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_in_its_token(name):
    x_NI = inputs(6)
    cast = fixed(ActivationCast(name, WIDTH), x_NI)
    expected_NI = cast(x_NI)
    x_NI[2, 40] = torch.nan
    broken_NI = cast(x_NI)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert broken_NI[2, 40].isnan()
    assert torch.equal(broken_NI[others], expected_NI[others])


@pytest.mark.parametrize(
    ("value", "largest"), [(0.0, "0"), *((v, "inf") for v in (torch.nan, torch.inf, -torch.inf))]
)
@pytest.mark.parametrize(("name", "is_static"), [("nvfp4", False), *((n, True) for n in STATIC)])
def test_a_text_that_gives_no_scale_is_refused(name, is_static, value, largest):
    x_NI = torch.zeros(6, WIDTH)
    x_NI[2, 40] = value
    cast = ActivationCast(name, WIDTH, is_static)
    cast.observe(x_NI)
    cast.observe(torch.zeros(6, WIDTH))
    line = f"layer: its inputs are at most {largest} on .* or give {'' if is_static else 'mxfp4'}"
    with pytest.raises(UserError, match=line):
        cast.fix("layer")


def test_specs_name_casts_and_groups_have_to_fit():
    assert activation_cast(parse_spec("nvfp4-a16"), 16) is None
    for name, is_static in (("fp8-astatic", True), ("w8a8", False), ("nvfp4", True)):
        cast = activation_cast(parse_spec(name), 16)
        assert cast is not None
        assert cast.needs_range == is_static
    for name in ("mxfp4", "nvfp4"):
        with pytest.raises(UserError, match=r"do not divide the 40 inputs.*such as fp8"):
            activation_cast(parse_spec(name), 40)
