"""GPTQ and rounding to nearest by themselves: grids by hand, what is refused, what does
not matter.

Shapes: O outputs, I inputs, N calibration tokens.
"""

from itertools import product

import pytest
import torch

from base.errors import UserError
from quant_eval.group import Rounded
from quant_eval.quantizer import ColumnSpec
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import round_to_nearest
from tests.quant_eval.gptq_reference import (
    eliminate_columns,
    problem,
    relative_output_error,
    same_weights,
)
from tests.quant_eval.specs import gptq_spec, grid_spec, mixed, mixed_spec


def quantize(weight_OI: torch.Tensor, hessian_II: torch.Tensor, name: str) -> Rounded:
    spec = grid_spec(name)
    if isinstance(spec, ColumnSpec):
        return gptq(weight_OI, prepare(hessian_II, spec, "layer"), spec)
    return round_to_nearest(weight_OI, spec)


INTEGERS = product((2, 3, 4, 8), ("g32", "perchannel"), ("sym", "asym"))
NUMBERS = [
    *(f"b{bits}-{groups}-{symmetry}" for bits, groups, symmetry in INTEGERS),
    *("mxfp4", "nvfp4", "ternary-g32", "binary-g32"),
]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (name, order)
        for name, order in product(NUMBERS, ["", "-actorder", "-actorder-static", "-groupaware"])
        if order != "-groupaware" or "perchannel" not in name
    ],
)
def test_gptq_beats_rounding_to_nearest(name, order):
    """On correlated inputs the gain is large, not a matter of rounding."""
    weight_OI, hessian_II = problem(seed=12, num_inputs=160, num_tokens=400)
    nearest = round_to_nearest(weight_OI, grid_spec(f"rtn-{name}" if name[1].isdigit() else name))
    ours = quantize(weight_OI, hessian_II, f"gptq-{name}{order}")
    error, of_nearest = (
        relative_output_error(weight_OI, rounded.dense(), hessian_II) for rounded in (ours, nearest)
    )
    assert error < 0.8 * of_nearest


def test_three_bit_grids_worked_by_hand():
    weights = torch.tensor([[-7.0, -2.9, 0.0, 0.9, 1.1, 7.0]])
    # step 2: codes 0..7 stand for -8..6
    symmetric = round_to_nearest(weights, grid_spec("rtn-b3-perchannel"))
    assert symmetric.dense().tolist() == [[-8.0, -2.0, 0.0, 0.0, 2.0, 6.0]]
    assert symmetric.codes_OI.tolist() == [[0, 3, 4, 4, 5, 7]]
    assert (symmetric.scales_OG.item(), symmetric.zeros_OG.item()) == (2.0, 4)
    # step 1: 0..7
    positive = round_to_nearest(weights.clamp(min=0), grid_spec("rtn-b3-perchannel-asym"))
    assert positive.dense().tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 7.0]]
    # step 1: -7..0
    negative = round_to_nearest(weights.clamp(max=0), grid_spec("rtn-b3-perchannel-asym"))
    assert negative.dense().tolist() == [[-7.0, -3.0, 0.0, 0.0, 0.0, 0.0]]
    assert (negative.codes_OI.tolist(), negative.zeros_OG.item()) == ([[0, 4, 7, 7, 7, 7]], 7)
    above_zero = round_to_nearest(
        torch.tensor([[3.2, 4.0, 7.0]]), grid_spec("rtn-b3-perchannel-asym")
    )
    assert above_zero.dense().tolist() == [[3.0, 4.0, 7.0]]  # 0 stays a point of the grid: step 1


@pytest.mark.parametrize(
    "name", ["rtn-b2-g32", "rtn-b2-g32-asym", "gptq-b2-g32", "gptq-b2-g32-asym-actorder-s16"]
)
def test_a_group_of_zeros_stays_zero(name):
    weight_OI, hessian_II = problem(num_outputs=4, num_inputs=160)
    weight_OI[1] = 0
    rounded = quantize(weight_OI, hessian_II, name)
    assert rounded.dense()[1].count_nonzero() == 0
    assert rounded.dense().isfinite().all()


@pytest.mark.parametrize("scales", ["", "-s16"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_largest_negative_weight_takes_the_outer_point_whatever_its_last_digits(bits, scales):
    """It is midway between two points; noise of one part in 1e8 must not move it by a whole
    step.
    """
    generator = torch.Generator().manual_seed(bits)
    weights = torch.rand(2000, 8, generator=generator)
    weights[:, 3] = -1 - torch.rand(2000, generator=generator)
    rounded = round_to_nearest(weights, grid_spec(f"rtn-b{bits}-perchannel{scales}"))
    assert (rounded.codes_OI[:, 3] == 0).all()
    # half a step outside
    assert (rounded.dense()[:, 3] < weights[:, 3]).double().mean() > 0.99 - bool(scales)


def test_the_scale_of_the_hessian_does_not_matter():
    weight_OI, hessian_II = problem()
    first, second = (
        quantize(weight_OI, factor * hessian_II, "gptq-b3-g32") for factor in (1.0, 2.0**-20)
    )
    # a power of two: nothing rounds differently
    assert torch.equal(first.codes_OI, second.codes_OI)


@pytest.mark.parametrize("order", ["natural", "actorder", "groupaware"])
@pytest.mark.parametrize("num_tokens", [1, 40, 159])
def test_a_singular_hessian_is_refused_by_name_and_damping_cures_it(num_tokens, order):
    weight_OI, hessian_II = problem(num_inputs=160, num_tokens=num_tokens)
    with pytest.raises(UserError, match=r"model\.layers\.7.*not positive definite.*larger damp"):
        prepare(hessian_II, gptq_spec(f"gptq-b3-g32-{order}-damp0"), "model.layers.7")
    assert quantize(weight_OI, hessian_II, f"gptq-b3-g32-{order}-damp0.01").dense().isfinite().all()


@pytest.mark.parametrize("order", ["natural", "actorder", "groupaware"])
def test_a_regular_hessian_needs_no_damping(order):
    weight_OI, hessian_II = problem()
    spec = gptq_spec(f"gptq-b3-g32-{order}-damp0")
    ours = quantize(weight_OI, hessian_II, spec.name)
    assert same_weights(ours, eliminate_columns(weight_OI, hessian_II, spec)) >= 0.99


@pytest.mark.parametrize("order", ["natural", "actorder"])
def test_loud_inputs_decide_neither_that_a_hessian_is_singular_nor_that_it_is_regular(order):
    """Inputs in other units are the same problem: D H D is as singular as H."""
    spec = gptq_spec(f"gptq-b3-g32-{order}-damp0")
    for seed in range(3):
        loud_I = torch.logspace(0, 4, 160, dtype=torch.float64).roll(seed * 50)
        regular_II, singular_II = (
            problem(seed, num_inputs=160, num_tokens=count)[1] for count in (161, 159)
        )
        assert (
            prepare(loud_I[:, None] * regular_II * loud_I, spec, "layer").factor_II.isfinite().all()
        )
        with pytest.raises(UserError, match="not positive definite"):
            prepare(loud_I[:, None] * singular_II * loud_I, spec, "layer")


def test_an_ill_conditioned_hessian_without_damping_is_factored_in_float64():
    """Condition 1e9: fp32 could not tell its smallest eigenvalues from zero. U^T U is its
    inverse up to float64's.
    """
    generator = torch.Generator().manual_seed(0)
    basis_II = torch.linalg.qr(torch.randn(96, 96, generator=generator, dtype=torch.float64))[0]
    hessian_II = (basis_II * torch.logspace(0, -9, 96, dtype=torch.float64)) @ basis_II.T
    factor_II = prepare(hessian_II, gptq_spec("gptq-b3-g32-damp0"), "layer").factor_II.double()
    inverse_II = torch.linalg.inv(hessian_II)
    pivots_I = torch.linalg.cholesky(inverse_II, upper=True).diagonal().square()
    rebuilt_II = factor_II.T @ (pivots_I[:, None] * factor_II)
    # the factor is stored in fp32
    assert float((rebuilt_II - inverse_II).norm() / inverse_II.norm()) < 1e-6


def test_an_indefinite_or_infinite_hessian_is_refused():
    hessian_II = problem(num_inputs=32)[1]
    spec = gptq_spec("gptq-b3-g32")
    for value in (-1e9, torch.nan, torch.inf):
        broken_II = hessian_II.clone()
        broken_II[5, 5] = value
        with pytest.raises(UserError, match="layer: the calibration Hessian"):
            prepare(broken_II, spec, "layer")


@pytest.mark.parametrize(
    "rest",
    ["b3-g32", "b4-g32-asym", "b3-perchannel-asym", "b4-g32-s16", "nvfp4"],
)
@pytest.mark.parametrize("order", ["", "-actorder", "-actorder-static"])
def test_a_dead_linear_is_rounded_to_nearest(rest, order):
    """Inputs that are all zero: codes and grids are those of the method without calibration."""
    weight_OI, _ = problem(num_inputs=320)
    order = "" if rest == "nvfp4" else order
    name = rest.replace("-s16", "") + order + "-s16" * rest.endswith("-s16")
    dead_II = torch.zeros(320, 320, dtype=torch.float64)
    rounded = quantize(weight_OI, dead_II, f"gptq-{name}")
    nearest = round_to_nearest(weight_OI, grid_spec("nvfp4" if rest == "nvfp4" else f"rtn-{rest}"))
    for field in ("codes_OI", "scales_OG", "zeros_OG", "groups_I"):
        assert torch.equal(getattr(rounded, field), getattr(nearest, field)), field
    assert torch.equal(rounded.dense(), nearest.dense())


@pytest.mark.parametrize("name", ["atom-b4-g16-keep0.1", "quik-b4-perchannel-keep0.1"])
def test_mixed_precision_of_a_dead_linear_is_that_of_inputs_that_are_all_alike(name):
    """White inputs: no column moves another, and none is louder than the rest."""
    weight_OI, _ = problem(num_inputs=64)
    white_II = torch.eye(64, dtype=torch.float64)
    dead, white = (
        mixed(weight_OI, hessian_II, mixed_spec(name)).dense()
        for hessian_II in (0 * white_II, white_II)
    )
    assert torch.equal(dead, white)


# Below 2^-14 fp16 has steps of 2^-24: 6e-6 is cut by 0.7%, which is 1.7 of the 255 steps of 8 bits.
@pytest.mark.parametrize(("bits", "largest"), [(8, 6e-6 * 127.5), (4, 1e-8), (4, 1e6), (2, 5e-8)])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_scales_beyond_fp16_are_refused(method, bits, largest):
    weight_OI, hessian_II = problem(num_inputs=64)
    weight_OI[2] *= largest / weight_OI[2].abs().max()
    for symmetry in ("sym", "asym"):
        name = f"{method}-b{bits}-perchannel-{symmetry}"
        assert quantize(weight_OI, hessian_II, name).dense()[2].abs().max() == pytest.approx(
            largest, rel=0.5
        )
        with pytest.raises(
            UserError, match="fp16 cannot hold the scale of every group; use a spec without -s16"
        ):
            quantize(weight_OI, hessian_II, f"{name}-s16")


def test_a_small_scale_that_fp16_holds_to_less_than_half_a_step_is_taken():
    weights = torch.tensor([[-6.0e-6 * 7.5, 1e-5, 4e-5]])
    for symmetry in ("sym", "asym"):
        rounded = round_to_nearest(weights, grid_spec(f"rtn-b4-perchannel-{symmetry}-s16"))
        assert torch.equal(rounded.scales_OG.half().float(), rounded.scales_OG)
        assert ((rounded.dense() - weights).abs() <= rounded.scales_OG * 0.75).all()


def test_the_objective_is_the_output_error_on_the_inputs():
    generator = torch.Generator().manual_seed(0)
    weight_OI, inputs_NI = (
        torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (4, 50)
    )
    rounded_OI = round_to_nearest(weight_OI, grid_spec("rtn-b3-perchannel")).dense().double()
    outputs, outputs_rounded = inputs_NI @ weight_OI.T, inputs_NI @ rounded_OI.T
    expected = float((outputs - outputs_rounded).norm() ** 2 / outputs.norm() ** 2)
    assert relative_output_error(weight_OI, rounded_OI, inputs_NI.T @ inputs_NI) == pytest.approx(
        expected, rel=1e-9
    )
