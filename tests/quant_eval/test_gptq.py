"""GPTQ and rounding to nearest: every combination of options against the slow float64 reference,
grids by hand, what is refused, what does not matter.

Shapes: O outputs, I inputs.
"""

from functools import cache
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from base.errors import UserError
from quant_eval.group import Rounded
from quant_eval.probing import round_by_names
from quant_eval.quantizer import ColumnSpec, GridSpec
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import round_to_nearest
from tests.quant_eval.gptq_reference import (
    closest,
    cut,
    eliminate_columns,
    grid_points,
    problem,
    relative_output_error,
    same_weights,
)
from tests.quant_eval.specs import gptq_spec, grid_spec, mixed, mixed_spec

BITS, SYMMETRIES = (2, 3, 4, 5, 8), ("sym", "asym")
# 288 columns are two blocks and a quarter; groups of 96 cross the borders of blocks
LAYOUTS = [
    f"{groups}-{order}"
    for groups in ("perchannel", "g32", "g96")
    for order in ("natural", "natural-static", "actorder", "actorder-static", "groupaware")
    if (groups, order) != ("perchannel", "groupaware")
]
UNDAMPED = [f"g32-{order}-damp0" for order in ("natural", "actorder", "groupaware")]
some_problem = cache(problem)


def quantize(weight_OI: torch.Tensor, hessian_II: torch.Tensor, spec: GridSpec) -> Rounded:
    if isinstance(spec, ColumnSpec):
        return gptq(weight_OI, prepare(hessian_II, spec, "layer"), spec)
    return round_to_nearest(weight_OI, spec)


def spec_of(bits: int, symmetry: str, layout: str, more: str = ""):
    groups, order = layout.split("-", 1)
    return gptq_spec(f"gptq-b{bits}-{groups}-{symmetry}-{order}{more}")


def assert_eliminated(ours: Rounded, weight_OI, hessian_II, spec) -> None:
    """fp32 rounds otherwise than float64: a weight between two points may fall either way, and
    move the rest.
    """
    reference_OI = eliminate_columns(weight_OI, hessian_II, spec)
    assert same_weights(ours, reference_OI) >= 0.99
    error, expected = (
        relative_output_error(weight_OI, dense, hessian_II)
        for dense in (ours.dense(), reference_OI)
    )
    assert error == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("layout", [*LAYOUTS, *UNDAMPED])
def test_every_combination_equals_explicit_elimination(layout, symmetry, bits):
    spec = spec_of(bits, symmetry, layout)
    weight_OI, hessian_II = some_problem()
    assert_eliminated(quantize(weight_OI, hessian_II, spec), weight_OI, hessian_II, spec)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dead_columns_are_eliminated_as_in_the_reference(layout, symmetry):
    spec = spec_of(3, symmetry, layout)
    weight_OI, hessian_II = (part.clone() for part in some_problem())
    # a stand-in for the zero diagonal that is not a fraction of the live one would dominate the mean
    hessian_II *= 1e-4
    dead = [*range(3, 120, 4), *range(192, 224), 287]  # a whole group of 32 is dead
    hessian_II[dead] = 0
    hessian_II[:, dead] = 0
    ours = quantize(weight_OI, hessian_II, spec)
    assert ours.dense()[:, dead].count_nonzero() == 0
    reference_OI = eliminate_columns(weight_OI, hessian_II, spec)
    assert same_weights(ours, reference_OI) >= 0.99
    # What dead weights were does not matter, but for the one grid of a row, which is fitted to all
    # that it holds.
    weight_OI[:, dead] = 100.0
    elsewhere = quantize(weight_OI, hessian_II, spec)
    assert torch.equal(elsewhere.codes_OI, ours.codes_OI) == (spec.group_size is not None)


@pytest.mark.parametrize(
    "layout", ["perchannel-actorder", "g32-natural", "g96-actorder", "g32-groupaware"]
)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("bits", BITS)
def test_fp16_scales_are_what_a_saved_checkpoint_holds(bits, symmetry, layout):
    spec = spec_of(bits, symmetry, layout, "-s16")
    weight_OI, hessian_II = some_problem()
    ours = quantize(weight_OI, hessian_II, spec)
    loaded = Rounded(ours.codes_OI, ours.scales_OG.half().float(), ours.zeros_OG, ours.groups_I)
    assert torch.equal(loaded.dense(), ours.dense())
    assert_eliminated(ours, weight_OI, hessian_II, spec)
    full = quantize(weight_OI, hessian_II, spec_of(bits, symmetry, layout))
    assert not torch.equal(full.scales_OG, ours.scales_OG)


@pytest.mark.parametrize("rows", [[7], [0, 1, 2], list(range(5, 24)), [23, 3, 11]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_rounded_bit_for_bit_as_if_alone(layout, rows):
    weight_OI, hessian_II = some_problem(num_outputs=130)
    spec = spec_of(4, "asym", layout)
    preparation = prepare(hessian_II, spec, "layer")
    together, alone = gptq(weight_OI, preparation, spec), gptq(weight_OI[rows], preparation, spec)
    assert torch.equal(together.codes_OI[rows], alone.codes_OI)
    assert torch.equal(together.scales_OG[rows], alone.scales_OG)
    assert torch.equal(together.zeros_OG[rows], alone.zeros_OG)
    assert torch.equal(together.groups_I, alone.groups_I)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_rows_do_not_depend_on_the_number_of_threads_or_ranks(threads):
    weight_OI, hessian_II = some_problem(num_outputs=700)
    spec = gptq_spec("gptq-b3-g32")
    preparation = prepare(hessian_II, spec, "layer")
    alone = torch.cat(
        [gptq(part, preparation, spec).codes_OI for part in weight_OI.tensor_split(3)]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = gptq(weight_OI, preparation, spec)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together.codes_OI, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_taken_as_they_are(dtype):
    weight_OI, hessian_II = some_problem()
    spec = gptq_spec("gptq-b4-g32-actorder")
    half_OI = weight_OI.to(dtype)
    half, full = (quantize(part, hessian_II, spec) for part in (half_OI, half_OI.float()))
    assert torch.equal(half.codes_OI, full.codes_OI)
    assert half.scales_OG.dtype == torch.float32


def test_groups_follow_the_order_or_the_features():
    """With a diagonal Hessian nothing is compensated, so every group is the RTN of its members,
    which show.
    """
    diagonal_I = torch.tensor([3, 11, 7, 0, 9, 1, 5, 12, 2, 10, 4, 8], dtype=torch.float64)
    weight_OI = some_problem()[0][:5, :12]
    live_OI = weight_OI * (diagonal_I > 0)
    by_hand = {
        "natural": (range(12), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        "actorder": ([7, 1, 9, 4, 11, 2, 6, 10, 0, 8, 5, 3], [2, 0, 1, 2, 0, 2, 1, 0, 2, 0, 1, 1]),
        "actorder-static": (range(12), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        "groupaware": (range(12), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
    }
    for order, (features, groups) in by_hand.items():
        ours = quantize(weight_OI, torch.diag(diagonal_I), gptq_spec(f"gptq-b4-g4-{order}"))
        assert ours.groups_I.tolist() == groups
        expected = round_to_nearest(live_OI[:, list(features)], grid_spec("rtn-b4-g4"))
        assert torch.equal(ours.dense()[:, list(features)], expected.dense())
        assert torch.equal(ours.scales_OG, expected.scales_OG)


@pytest.mark.parametrize("scales", ["", "-s16"])
@pytest.mark.parametrize("groups", ["g32", "perchannel"])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("bits", BITS)
def test_rounding_to_nearest_finds_the_nearest_point(bits, symmetry, groups, scales):
    spec = grid_spec(f"rtn-b{bits}-{groups}-{symmetry}{scales}")
    weight_OI = some_problem()[0][:6].float()
    rounded = round_to_nearest(weight_OI, spec)
    size = spec.group_size or weight_OI.shape[1]
    for row, weights in enumerate(weight_OI.double().numpy()):
        for group, members in enumerate(weights.reshape(-1, size)):
            points = grid_points(members, spec)
            ours = rounded.dense()[row, group * size : (group + 1) * size].numpy()
            expected = closest(members, np.tile(points, (size, 1)))
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-7)
            scale = pytest.approx(points[1] - points[0], rel=1e-12)
            assert float(rounded.scales_OG[row, group]) == scale
    assert cut(1 / 3, "fp16") == float(torch.tensor(1 / 3).half())  # 1/3 rounds down in fp16


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
    rounded = quantize(weight_OI, hessian_II, grid_spec(name))
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


@pytest.mark.parametrize("order", ["natural", "actorder", "groupaware"])
@pytest.mark.parametrize("num_tokens", [1, 40, 159])
def test_a_singular_hessian_is_refused_by_name_and_damping_cures_it(num_tokens, order):
    weight_OI, hessian_II = problem(num_inputs=160, num_tokens=num_tokens)
    with pytest.raises(UserError, match=r"model\.layers\.7.*not positive definite.*larger damp"):
        prepare(hessian_II, gptq_spec(f"gptq-b3-g32-{order}-damp0"), "model.layers.7")
    damped = gptq_spec(f"gptq-b3-g32-{order}-damp0.01")
    assert quantize(weight_OI, hessian_II, damped).dense().isfinite().all()


@pytest.mark.parametrize("order", ["natural", "actorder"])
def test_loud_inputs_decide_neither_that_a_hessian_is_singular_nor_that_it_is_regular(order):
    """Inputs in other units are the same problem: D H D is as singular as H."""
    spec = gptq_spec(f"gptq-b3-g32-{order}-damp0")
    for seed in range(3):
        loud_I = torch.logspace(0, 4, 160, dtype=torch.float64).roll(seed * 50)
        regular_II, singular_II = (
            problem(seed, num_inputs=160, num_tokens=count)[1] for count in (161, 159)
        )
        prepared = prepare(loud_I[:, None] * regular_II * loud_I, spec, "layer")
        assert prepared.factor_II.isfinite().all()
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
    ("grid", "scales"),
    [
        *(("rtn-b3-g32", ""), ("rtn-b4-g32-asym", ""), ("rtn-b3-perchannel-asym", "")),
        *(("rtn-b4-g32", "-s16"), ("nvfp4", "")),
    ],
)
@pytest.mark.parametrize("order", ["", "-actorder", "-actorder-static"])
def test_a_dead_linear_is_rounded_to_nearest(grid, scales, order):
    """Inputs that are all zero: codes and grids are those of the method without calibration."""
    weight_OI, _ = problem(num_inputs=320)
    dead_II = torch.zeros(320, 320, dtype=torch.float64)
    spec = gptq_spec(f"gptq-{grid.removeprefix('rtn-')}{order}{scales}")
    rounded = quantize(weight_OI, dead_II, spec)
    nearest = round_to_nearest(weight_OI, grid_spec(grid + scales))
    for field in ("codes_OI", "scales_OG", "zeros_OG", "groups_I"):
        assert torch.equal(getattr(rounded, field), getattr(nearest, field)), field
    assert torch.equal(rounded.dense(), nearest.dense())


@pytest.mark.parametrize(
    ("order", "expected"),
    [("natural", 1), ("actorder", 1), ("actorder-static", 1), ("groupaware", 2)],
)
def test_specs_whose_columns_have_one_order_share_a_factor(monkeypatch, order, expected):
    """Bits and groups have no part in it, but for the order of whole groups."""
    names = [
        f"gptq-b{bits}-{groups}-{order}" for bits, groups in ((3, "g32"), (4, "g32"), (3, "g96"))
    ]
    weight_OI, hessian_II = problem(num_inputs=96)
    alone = [round_by_names([name], weight_OI, hessian_II, "layer")[0] for name in names]
    factor = Mock(wraps=torch.linalg.cholesky_ex)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", factor)
    together = round_by_names(names, weight_OI, hessian_II, "layer")
    assert all(map(torch.equal, together, alone))
    assert factor.call_count == expected


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
        whole_OI = quantize(weight_OI, hessian_II, grid_spec(name)).dense()
        assert whole_OI[2].abs().max() == pytest.approx(largest, rel=0.5)
        with pytest.raises(UserError, match=r"fp16 cannot hold.*use a spec without -s16"):
            quantize(weight_OI, hessian_II, grid_spec(f"{name}-s16"))


def test_a_small_scale_that_fp16_holds_to_less_than_half_a_step_is_taken():
    weights = torch.tensor([[-6.0e-6 * 7.5, 1e-5, 4e-5]])
    for symmetry in ("sym", "asym"):
        rounded = round_to_nearest(weights, grid_spec(f"rtn-b4-perchannel-{symmetry}-s16"))
        assert torch.equal(rounded.scales_OG.half().float(), rounded.scales_OG)
        assert ((rounded.dense() - weights).abs() <= rounded.scales_OG * 0.75).all()
