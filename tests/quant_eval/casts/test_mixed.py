"""Casts of two widths against compressed-tensors' own modules, each part of the inputs by itself.

Shapes: B sequences, L tokens, I features, R the rest of those that are kept.
"""

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from base.errors import UserError
from quant_eval.casts.activations import MixedCast, activation_cast
from tests.quant_eval.casts.wrapped import wrapped_cast
from tests.quant_eval.gptq_reference import problem
from tests.quant_eval.specs import mixed, mixed_spec

WIDTH, GROUP = 96, 16
KEPT = [3, 4, 11, 17, 30, 31, 40, 55, 60, 64, 70, 71, 80, 81, 90, 95]
REST = [i for i in range(WIDTH) if i not in KEPT]
PER_TOKEN: dict[str, Any] = {"strategy": "token", "dynamic": True}
IN_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": GROUP, "dynamic": True}


def inputs(seed: int = 0) -> torch.Tensor:
    """Tokens of very different sizes whose kept features are loud."""
    generator = torch.Generator().manual_seed(seed)
    x_BLI = torch.randn(3, 5, WIDTH, generator=generator)
    x_BLI *= torch.randn(3, 5, 1, generator=generator).exp()
    x_BLI[..., KEPT] *= 30
    return x_BLI


def cast_of(name: str, kept: list[int]) -> MixedCast:
    return mixed_spec(name).input_cast(torch.tensor(kept, dtype=torch.int64), WIDTH)


def module_cast(x: torch.Tensor, observed: torch.Tensor | None = None, **args) -> torch.Tensor:
    return wrapped_cast(x, QuantizationArgs(**args), observed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "of_rest", "of_kept"),
    [
        ("atom-b4-g16-keep0.1-a4", IN_GROUPS, IN_GROUPS),
        ("atom-b4-g16-keep0.1-a3", IN_GROUPS, IN_GROUPS),
        ("atom-b4-perchannel-keep0.1-a4", PER_TOKEN, PER_TOKEN),
        ("quik-b4-g16-keep0.1-a4", PER_TOKEN, None),
        ("quik-b4-perchannel-keep0.1-a8", PER_TOKEN, None),
    ],
)
def test_each_part_is_that_of_compressed_tensors_modules(name, of_rest, of_kept, dtype):
    x_BLI, bits = inputs().to(dtype), int(name[-1])
    ours_BLI = cast_of(name, KEPT)(x_BLI)
    assert ours_BLI.dtype == dtype
    assert torch.equal(ours_BLI[..., REST], module_cast(x_BLI[..., REST], num_bits=bits, **of_rest))
    kept_BLK = x_BLI[..., KEPT]
    if of_kept:
        kept_BLK = module_cast(kept_BLK, num_bits=8, **of_kept)
    assert torch.equal(ours_BLI[..., KEPT], kept_BLK)
    assert not torch.equal(ours_BLI[..., REST], x_BLI[..., REST])


@pytest.mark.parametrize("method", ["atom", "quik"])
def test_a_static_cast_has_a_scale_for_either_part(method):
    observed, x_BLI = [inputs(seed) for seed in (1, 2, 3)], inputs()
    cast = cast_of(f"{method}-b4-g16-keep0.1-a8-astatic", KEPT)
    assert cast.needs_range
    for batch in observed[:2]:
        cast.observe(batch)
    other = cast_of(f"{method}-b4-g16-keep0.1-a8-astatic", KEPT)  # of another rank
    other.observe(observed[2])
    for own, others in zip(cast.ranges(), other.ranges(), strict=True):
        own.copy_(torch.maximum(own, others))
    cast.fix("layer")
    every, ours_BLI = torch.cat(observed), cast(x_BLI)
    per_tensor: dict[str, Any] = {"num_bits": 8, "strategy": "tensor"}
    rest = module_cast(x_BLI[..., REST], every[..., REST], **per_tensor)
    assert torch.equal(ours_BLI[..., REST], rest)
    kept = x_BLI[..., KEPT]
    if method == "atom":
        kept = module_cast(kept, every[..., KEPT], **per_tensor)
    assert torch.equal(ours_BLI[..., KEPT], kept)


def test_nvfp4_takes_the_range_of_the_rest_alone():
    spec, x_BLI = mixed_spec("atom-b4-g16-keep0.1-anvfp4"), inputs()
    cast, of_rest = cast_of(spec.name, KEPT), activation_cast(spec, len(REST))
    assert of_rest is not None
    for quantizer, observed in ((cast, x_BLI), (of_rest, x_BLI[..., REST])):
        quantizer.observe(observed)
        quantizer.fix("layer")
    ours_BLI = cast(x_BLI)
    assert torch.equal(ours_BLI[..., REST], of_rest(x_BLI[..., REST]))
    assert len(cast.ranges()) == 1  # int8 needs none


@pytest.mark.parametrize("method", ["atom", "quik"])
def test_none_kept_is_one_cast_and_all_kept_is_int8_or_the_identity(method):
    x_BLI, everything = inputs(), list(range(WIDTH))
    plain = cast_of(f"{method}-b4-perchannel-keep0-a4", [])(x_BLI)
    assert torch.equal(plain, module_cast(x_BLI, num_bits=4, **PER_TOKEN))
    whole = cast_of(f"{method}-b4-perchannel-keep1-a4", everything)(x_BLI)
    expected = module_cast(x_BLI, num_bits=8, **PER_TOKEN) if method == "atom" else x_BLI
    assert torch.equal(whole, expected)


def test_weights_and_inputs_keep_the_same_features():
    weight_OI, hessian_II = problem(num_inputs=WIDTH)
    spec = mixed_spec("quik-b8-perchannel-keep0.25-a8")
    rounded = mixed(weight_OI, hessian_II, spec)
    cast = spec.input_cast(rounded.kept_I, WIDTH)
    x_BLI = inputs()
    is_same_I = (cast(x_BLI) == x_BLI).all(0).all(0)
    assert is_same_I.nonzero().flatten().tolist() == rounded.kept_I.tolist()
    whole_BLO = x_BLI @ weight_OI.float().T
    assert (cast(x_BLI) @ rounded.dense().T - whole_BLO).norm() < 0.02 * whole_BLO.norm()


def test_groups_of_a_format_that_do_not_divide_the_rest_are_refused():
    with pytest.raises(UserError, match=r"mxfp4 casts groups of 32.*the 80 inputs"):
        cast_of("quik-b4-perchannel-keep0.1-amxfp4", KEPT)
