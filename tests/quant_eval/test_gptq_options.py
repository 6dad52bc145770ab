"""Every combination of GPTQ's options against the slow float64 reference, and what the options
mean by themselves.

Shapes: O outputs, I inputs.
"""

from functools import cache

import numpy as np
import pytest
import torch

from quant_eval.group import Rounded
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
from tests.quant_eval.specs import gptq_spec, grid_spec

BITS, SYMMETRIES = (2, 3, 4, 5, 8), ("sym", "asym")
# 288 columns are two blocks and a quarter; groups of 96 cross the borders of blocks
LAYOUTS = [
    f"{groups}-{order}"
    for groups in ("perchannel", "g32", "g96")
    for order in ("natural", "natural-static", "actorder", "actorder-static", "groupaware")
    if (groups, order) != ("perchannel", "groupaware")
]
some_problem = cache(problem)


def spec_of(bits: int, symmetry: str, layout: str, more: str = ""):
    groups, order = layout.split("-", 1)
    return gptq_spec(f"gptq-b{bits}-{groups}-{symmetry}-{order}{more}")


def quantize(weight_OI: torch.Tensor, hessian_II: torch.Tensor, spec) -> Rounded:
    return gptq(weight_OI, prepare(hessian_II, spec, "layer"), spec)


def agrees(
    ours: Rounded, reference_OI: torch.Tensor, weight_OI: torch.Tensor, hessian_II: torch.Tensor
) -> None:
    """fp32 rounds otherwise than float64: a weight between two points may fall either way, and
    move the rest.
    """
    assert same_weights(ours, reference_OI) >= 0.99
    error, expected = (
        relative_output_error(weight_OI, dense, hessian_II)
        for dense in (ours.dense(), reference_OI)
    )
    assert error == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_combination_equals_explicit_elimination(layout, symmetry, bits):
    spec = spec_of(bits, symmetry, layout)
    weight_OI, hessian_II = some_problem()
    agrees(
        quantize(weight_OI, hessian_II, spec),
        eliminate_columns(weight_OI, hessian_II, spec),
        weight_OI,
        hessian_II,
    )


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dead_columns_are_eliminated_as_in_the_reference(layout, symmetry):
    spec = spec_of(3, symmetry, layout)
    weight_OI, hessian_II = (part.clone() for part in some_problem())
    hessian_II *= 1e-4  # a stand-in for the zero diagonal that is not a fraction of the live one would dominate the mean
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
    agrees(ours, eliminate_columns(weight_OI, hessian_II, spec), weight_OI, hessian_II)
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
    half, full = (
        quantize(part, hessian_II, spec)
        for part in (weight_OI.to(dtype), weight_OI.to(dtype).float())
    )
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


def test_group_aware_order_worked_by_hand():
    diagonal_I = torch.tensor([3, 11, 7, 0, 9, 1, 5, 12, 2, 10, 4, 8], dtype=torch.float64)
    preparation = prepare(torch.diag(diagonal_I), gptq_spec("gptq-b4-g4-groupaware"), "layer")
    assert preparation.order_I.tolist() == [7, 4, 6, 5, 1, 2, 0, 3, 9, 11, 10, 8]
    assert preparation.dead_I.nonzero().flatten().tolist() == [3]


def test_corrections_of_the_own_block_do_not_reach_a_groups_grid():
    """As in the authors' code: with more than one group in a block the first 128 columns have
    RTN's scales.
    """
    weight_OI, hessian_II = some_problem()
    ours = quantize(weight_OI, hessian_II, gptq_spec("gptq-b4-g32"))
    nearest = round_to_nearest(weight_OI, grid_spec("rtn-b4-g32"))
    assert torch.equal(ours.scales_OG[:, :4], nearest.scales_OG[:, :4])
    moved_OG = (ours.scales_OG / nearest.scales_OG - 1).abs()
    assert (moved_OG[:, 4:] > 1e-3).double().mean() > 0.9


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
            np.testing.assert_allclose(
                ours, closest(members, np.tile(points, (size, 1))), rtol=0, atol=1e-7
            )
            assert float(rounded.scales_OG[row, group]) == pytest.approx(
                points[1] - points[0], rel=1e-12
            )
    assert cut(1 / 3, "fp16") == float(torch.tensor(1 / 3).half())  # 1/3 rounds down in fp16
