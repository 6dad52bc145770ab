"""Weights in FP8, MX, NVFP4, ternary and binary: tables by enumeration of their bits, rounding
against compressed-tensors' own modules, GPTQ against a slow search for the nearest level.

Shapes: O outputs, I inputs.
"""

import math

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import generate_gparam
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

from quant_eval.numbers import E4M3
from quant_eval.quantizer import ColumnSpec
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import largest_of, local_scales, nearest_points, round_to_nearest
from tests.quant_eval.casts.wrapped import wrapped_linear
from tests.quant_eval.gptq_reference import (
    eliminate_columns,
    problem,
    same_weights,
)
from tests.quant_eval.rounding.number_search import LAYOUTS, nearest, number
from tests.quant_eval.specs import gptq_spec, grid_spec

FORMATS = ["fp8", "fp8-astatic", "fp8e5m2", "mxfp8", "mxfp4", "nvfp4", "ternary-g32", "binary-g32"]
PRESETS = {"fp8-astatic": "FP8", "fp8": "FP8_DYNAMIC"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_number_of_every_code(name):
    numbers, *layout = LAYOUTS[name]
    expected = torch.tensor([number(code, *layout) for code in range(2 ** (1 + sum(layout)))])
    table = numbers.table()
    torch.testing.assert_close(table, expected, rtol=0, atol=0, equal_nan=True)
    finite = table.isfinite()
    assert torch.equal(numbers.codes(table[finite]), torch.arange(len(table))[finite].byte())


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_go_to_the_nearest_number_and_halves_to_the_even_mantissa(name):
    numbers = LAYOUTS[name][0]
    table = numbers.table()
    sizes = table[: len(table) // 2]
    sizes = sizes[sizes.isfinite()].double()
    halves = (sizes[1:] + sizes[:-1]) / 2
    beside = torch.cat([halves * (1 - 2**-20), halves * (1 + 2**-20)])
    above = torch.tensor([1.01, 1.5, 1e4]) * sizes.max()
    values = torch.cat([sizes, halves, beside, above]).float()  # all are fp32
    values = torch.cat([values, -values])
    expected = torch.from_numpy(nearest(values.double().numpy(), name)).float()
    rounded = numbers.nearest(values)
    assert torch.equal(rounded, expected)
    assert torch.equal(table[numbers.codes(rounded).int()], expected)
    if name == "e2m1":
        limited = values.clamp(-6, 6)
        assert torch.equal(rounded, cast_to_fp4(limited))


def exponent_of(largest: float) -> int:
    """E8M0's exponent + 127 for a group of MXFP4: max|w|, rounded up from 1.75 x 2^k, over 4."""
    mantissa, exponent = math.frexp(largest)
    return min(max(exponent - 1 + (2 * mantissa >= 1.75) - 2 + 127, 0), 255)


def test_every_scale_of_mxfp4():
    spec = grid_spec("mxfp4-a16")
    powers = torch.arange(-126, 127).double()
    largest = torch.cat([powers.exp2() * part for part in (1, 1.5, 1.749, 1.75, 1.999)]).float()
    weights = torch.zeros(len(largest), 32)
    weights[:, 3] = -largest
    rounded = round_to_nearest(weights, spec)
    exponents = torch.tensor([exponent_of(float(value)) for value in largest])
    assert torch.equal(rounded.scales_OG[:, 0].double(), (exponents - 127).double().exp2())


def test_every_scale_of_nvfp4_is_found_again_in_the_product():
    local = E4M3.table()[1:127]
    for largest in torch.logspace(-3, 3, 40):
        global_scale = generate_gparam(-largest, largest)
        assert torch.equal(local_scales(local / global_scale, global_scale), local)


def weight_of(num_outputs: int = 24, num_inputs: int = 128) -> torch.Tensor:
    weight_OI = problem(3, num_outputs, num_inputs)[0].float()
    weight_OI[1] = 0
    weight_OI[2, 64:] *= 1e-6  # below what NVFP4's scales reach
    weight_OI[3] *= 40
    return weight_OI


@pytest.mark.parametrize("name", ["fp8", "fp8-astatic", "mxfp8", "mxfp4", "nvfp4"])
def test_rounding_to_nearest_is_that_of_compressed_tensors_modules(name):
    weight_OI = weight_of()
    ours = round_to_nearest(weight_OI, grid_spec(name)).dense()
    preset = preset_name_to_scheme(PRESETS.get(name, name.upper()), ["Linear"])
    with torch.no_grad():
        theirs = wrapped_linear(weight_OI, preset.weights, None)(torch.eye(weight_OI.shape[1])).T
    assert torch.equal(ours, theirs)
    assert 0 < float((ours - weight_OI).norm() / weight_OI.norm()) < 0.12


def test_e5m2_is_the_nearest_number_of_its_table_with_the_largest_at_its_end():
    weight_OI = weight_of()
    rounded = round_to_nearest(weight_OI, grid_spec("fp8e5m2"))
    scale_O = weight_OI.abs().amax(1) / 57344
    live_O = scale_O > 0
    assert torch.equal(rounded.scales_OG[live_O, 0], scale_O[live_O])
    quotients = (weight_OI[live_O] / scale_O[live_O, None]).double().flatten().numpy()
    expected = torch.from_numpy(nearest(quotients, "e5m2")).float().view(-1, weight_OI.shape[1])
    assert torch.equal(rounded.dense()[live_O], expected * scale_O[live_O, None])


def test_ternary_and_binary_worked_by_hand():
    weights = torch.tensor([[4.0, -1.0, 0.5, -0.5], [0.0, 0.0, 0.0, 0.0]])
    ternary = round_to_nearest(weights, grid_spec("ternary-perchannel"))  # mean |w| is 1.5
    assert ternary.dense().tolist() == [[1.5, -1.5, 0.0, 0.0], [0.0] * 4]
    binary = round_to_nearest(weights, grid_spec("binary-perchannel"))
    assert binary.dense().tolist() == [[1.5, -1.5, 1.5, -1.5], [0.0] * 4]
    assert binary.codes_OI.tolist() == [[1, 0, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("groups", ["g32", "perchannel"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_those_of_compressed_tensors_with_our_scales(bits, groups):
    rounded = round_to_nearest(weight_of(), grid_spec(f"rtn-b{bits}-{groups}"))
    strategy = {"strategy": "channel"} if groups == "perchannel" else {"group_size": 32}
    args = QuantizationArgs(num_bits=bits, **strategy)
    scales_OG = rounded.scales_OG
    theirs = fake_quantize(weight_of(), scales_OG, torch.zeros_like(scales_OG), args)
    assert torch.equal(rounded.dense(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rtn-b3-g32", "rtn-b2-perchannel-asym", *FORMATS])
def test_rounding_without_codes_gives_the_same_bits(name, dtype):
    """The bits, so that the signs of zeros count too."""
    weight_OI, spec = weight_of().to(dtype), grid_spec(name)
    weight_OI[0] = 0.0  # a dead output
    weight_OI[1, ::2] = -0.0
    by_codes = round_to_nearest(weight_OI, spec).dense()
    assert torch.equal(
        nearest_points(weight_OI, spec).view(torch.int32), by_codes.view(torch.int32)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_gptq_on_uncorrelated_inputs_rounds_to_nearest(name):
    weight_OI, spec = weight_of(), gptq_spec(f"gptq-{name}")
    prepared = prepare(torch.eye(weight_OI.shape[1], dtype=torch.float64), spec, "layer")
    ours, rtn = gptq(weight_OI, prepared, spec), round_to_nearest(weight_OI, grid_spec(name))
    for key in ("codes_OI", "scales_OG", "zeros_OG", "groups_I"):
        assert torch.equal(getattr(ours, key), getattr(rtn, key)), key
    assert torch.equal(ours.dense(), rtn.dense())


def points_of(largest: float):
    """All points of a row's group, in float64 from the formats' definitions."""
    sizes = np.array([number(code, 2, 1) for code in range(8)])

    def points(weights: np.ndarray, spec) -> np.ndarray:
        group_largest, mean = np.abs(weights).max(), np.abs(weights).mean()
        if spec.format == "ternary":
            return mean * np.array([-1, 0, 1])
        if spec.format == "binary":
            return mean * np.array([-1, 1])
        if spec.format == "mxfp4":
            scale = 2.0 ** (exponent_of(float(np.float32(group_largest))) - 127)
        else:
            whole = 448 * 6 / largest
            scale = nearest(np.array([group_largest / 6 * whole]), "e4m3")[0] / whole
        return scale * np.concatenate([-sizes[::-1], sizes])

    return points


@pytest.mark.parametrize("order", ["natural", "actorder", "actorder-static"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "ternary-g32", "binary-g32"])
def test_gptq_is_the_slow_elimination_of_columns(name, order):
    weight_OI, hessian_II = problem(7, num_outputs=12, num_inputs=160, num_tokens=400)
    weight_OI = weight_OI.float()
    spec = gptq_spec(f"gptq-{name}-{order}".replace("-natural", ""))
    ours = gptq(weight_OI, prepare(hessian_II, spec, "layer"), spec)
    largest = float(weight_OI.abs().max())
    slow_OI = eliminate_columns(weight_OI, hessian_II, spec, points_of(largest))
    # a weight on the border of two points may go either way in fp32, and what follows with it
    assert same_weights(ours, slow_OI) >= 0.99


@pytest.mark.parametrize("name", FORMATS)
def test_rows_apart_are_the_rows_together(name):
    weight_OI, hessian_II = problem(2, num_outputs=70, num_inputs=96)
    largest = largest_of(weight_OI)
    for method in ("", "gptq-"):
        spec = grid_spec(method + name)

        def rounded(rows_OI, spec=spec):
            if not isinstance(spec, ColumnSpec):
                return round_to_nearest(rows_OI, spec, largest).dense()
            return gptq(rows_OI, prepare(hessian_II, spec, "layer"), spec, largest).dense()

        whole, parts = rounded(weight_OI), [rounded(rows) for rows in weight_OI.split([9, 41, 20])]
        assert torch.equal(torch.cat(parts), whole)
