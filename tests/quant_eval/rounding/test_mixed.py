"""Atom and QUIK against explicit elimination, against least squares, and at both ends of the share.

Shapes: O outputs, I inputs, K of them kept, R the rest.
"""

import math

import numpy as np
import pytest
import torch

from base.ranks import ALONE
from quant_eval.group import Rounded
from quant_eval.quantizers.mixed import MixedSpec
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.mixed import Mixed
from tests.quant_eval.gptq_reference import (
    closest,
    eliminations,
    grid_points,
    problem,
    relative_output_error,
)
from tests.quant_eval.specs import gptq_spec, mixed, mixed_spec, prepare_mixed

WIDTH = 288  # two blocks of columns and a quarter
METHODS, SYMMETRIES, GROUPS = ("atom", "quik"), ("sym", "asym"), ("perchannel", "g32", "g96")


def quantize(weight_OI: torch.Tensor, hessian_II: torch.Tensor, name: str) -> Mixed:
    return mixed(weight_OI, hessian_II, mixed_spec(name))


def loudest(hessian_II: torch.Tensor, count: int) -> list[int]:
    features = sorted(range(len(hessian_II)), key=lambda i: -float(hessian_II[i, i]))
    return sorted(features[:count])


def eliminated(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, spec: MixedSpec, kept: list[int]
) -> torch.Tensor:
    """The weight column after column: all later ones answer each error at once.

    As in GPTQ, grids of groups are fitted at the beginning of every 128 columns; those of the kept
    inputs when all others are rounded, and every 128 columns from there.
    """
    rest = [i for i in range(WIDTH) if i not in kept]
    order, weights = rest + kept, weight_OI.double().numpy().copy()
    inverse_rows = eliminations(hessian_II.numpy().tobytes(), tuple(order), spec.damping)
    parts = [(rest, spec)]
    if spec.method == "atom":
        parts.append((kept, spec.model_copy(update={"bits": 8})))
    for members, grids in parts:
        size = grids.group_size or len(members)
        for position, column in enumerate(members):
            if position % 128 == 0:
                at_block_start = weights.copy()
            if position % size == 0:
                group = members[position : position + size]
                points = np.stack([grid_points(row, grids) for row in at_block_start[:, group]])
            rounded_O = closest(weights[:, column], points)
            at = order.index(column)
            error_O = (weights[:, column] - rounded_O) / inverse_rows[at][column]
            free = order[at + 1 :]
            weights[:, free] -= error_O[:, None] * inverse_rows[at][free]
            weights[:, column] = rounded_O
    return torch.from_numpy(weights)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("share", [0.03, 0.4])
@pytest.mark.parametrize("groups", GROUPS)
def test_every_combination_equals_explicit_elimination(groups, share, method, symmetry):
    weight_OI, hessian_II = problem(num_outputs=16)
    spec = mixed_spec(f"{method}-b3-{groups}-{symmetry}-keep{share}")
    ours = quantize(weight_OI, hessian_II, spec.name)
    size = spec.group_size or 1
    kept = loudest(hessian_II, math.ceil(share * WIDTH / size) * size)
    assert ours.kept_I.tolist() == kept
    expected_OI = eliminated(weight_OI, hessian_II, spec, kept)
    # fp32 rounds otherwise than float64: a weight between two points may fall either way, and
    # move the rest of its row
    near = (ours.dense() - expected_OI).abs() <= 1e-6 * weight_OI.abs().amax(1, keepdim=True)
    assert near.double().mean() >= 0.98
    error, reference = (
        relative_output_error(weight_OI, dense_OI, hessian_II)
        for dense_OI in (ours.dense(), expected_OI)
    )
    assert error == pytest.approx(reference, rel=2e-3)


@pytest.mark.parametrize("groups", GROUPS)
def test_what_quik_keeps_is_the_least_squares_answer_to_the_errors_of_the_rest(groups):
    """The smallest tr(D H D^T) for given D of the rest: D_K = -D_R H_RK H_KK^-1, H damped."""
    weight_OI, hessian_II = problem(seed=3)
    spec = mixed_spec(f"quik-b3-{groups}-keep0.2")
    ours = quantize(weight_OI, hessian_II, spec.name)
    difference_OI = ours.dense().double() - weight_OI
    added = spec.damping * hessian_II.diagonal().mean()
    rows_KI = (hessian_II + added * torch.eye(WIDTH))[ours.kept_I]
    answer_KR = torch.linalg.solve(rows_KI[:, ours.kept_I], rows_KI[:, ours.rest_I])
    moved_OK = -difference_OI[:, ours.rest_I] @ answer_KR.T
    # the weights are fp32, and what moves them is summed in it
    limit = 1e-6 * weight_OI.abs().max()
    torch.testing.assert_close(difference_OI[:, ours.kept_I], moved_OK, rtol=0, atol=float(limit))
    assert moved_OK.abs().max() > 1e4 * limit


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.float().view(torch.int32), second.float().view(torch.int32))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize(
    ("method", "share", "bits"), [("atom", 0, 3), ("quik", 0, 3), ("atom", 1, 8)]
)
def test_one_part_alone_is_gptq_bit_for_bit(method, share, bits, symmetry, groups):
    weight_OI, hessian_II = problem()
    ours = quantize(weight_OI, hessian_II, f"{method}-b3-{groups}-{symmetry}-keep{share}")
    spec = gptq_spec(f"gptq-b{bits}-{groups}-{symmetry}")
    plain = gptq(weight_OI, prepare(hessian_II, spec, "layer"), spec)
    part, other = (ours.kept, ours.rest) if share else (ours.rest, ours.kept)
    assert other is None
    assert isinstance(part, Rounded)
    for name in ("codes_OI", "scales_OG", "zeros_OG", "groups_I"):
        assert torch.equal(getattr(part, name), getattr(plain, name)), name
    assert same_bits(ours.dense(), plain.dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", GROUPS)
def test_all_inputs_kept_by_quik_is_the_identity_bit_for_bit(groups, dtype):
    weight_OI, hessian_II = problem()
    weight_OI, dead = weight_OI.to(dtype), [5, 40]
    weight_OI[0, :2] = torch.tensor([-0.0, 1e-40])
    hessian_II[dead] = 0
    hessian_II[:, dead] = 0
    ours = quantize(weight_OI, hessian_II, f"quik-b3-{groups}-keep1")
    assert ours.rest is None
    assert same_bits(ours.dense(), weight_OI)


@pytest.mark.parametrize(
    ("part", "width", "count"),
    [("perchannel", 100, 7), ("g10", 100, 10), ("g50", 100, 50), ("g4", 8, 4), ("g7", 700, 49)],
)
def test_the_share_is_rounded_up_to_whole_groups(part, width, count):
    """0.07 x 100 is 7.000000000000001 in floating point; a share is what is written."""
    weight_OI = torch.ones(2, width)
    hessian_II = torch.diag(torch.arange(1, width + 1, dtype=torch.float64))
    ours = quantize(weight_OI, hessian_II, f"quik-b4-{part}-keep0.07")
    assert ours.kept_I.tolist() == list(range(width - count, width))
    assert ours.rest_I.tolist() == list(range(width - count))


def test_groups_are_whole_and_follow_the_rest_worked_by_hand():
    """With a diagonal Hessian nothing moves: every group is rounded by itself."""
    diagonal_I = torch.tensor([3, 11, 7, 0, 9, 1, 5, 12], dtype=torch.float64)
    weight_OI = torch.tensor([[7.0, 50.0, 3.4, 9.9, 0.9, 2.0, 1.1, 30.0]])
    ours = quantize(weight_OI, torch.diag(diagonal_I), "quik-b3-g2-asym-keep0.25")
    assert ours.kept_I.tolist() == [1, 7]
    # groups (0, 2), (3, 4), (5, 6) from 0 to 7, 0.9 and 2 in seven steps; input 3 is always zero
    expected = torch.tensor([[7.0, 50.0, 3.0, 0.0, 0.9, 2.0, 8 / 7, 30.0]])
    torch.testing.assert_close(ours.dense(), expected)
    eight = quantize(weight_OI, torch.diag(diagonal_I), "atom-b3-g2-asym-keep0.25").dense()
    assert torch.equal(eight[:, ours.rest_I], ours.dense()[:, ours.rest_I])
    torch.testing.assert_close(eight[0, 1], torch.tensor(50.0))
    torch.testing.assert_close(eight[0, 7], torch.tensor(153 * 50 / 255))


@pytest.mark.parametrize("rows", [[7], list(range(5, 24)), [23, 3, 11]])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_are_rounded_bit_for_bit_as_if_alone(method, groups, rows):
    weight_OI, hessian_II = problem(num_outputs=130)
    spec = mixed_spec(f"{method}-b4-{groups}-asym-keep0.3")
    prepared = prepare_mixed(hessian_II, spec)
    together, alone = (
        mixed(part_OI, hessian_II, spec, prepared) for part_OI in (weight_OI, weight_OI[rows])
    )
    assert same_bits(together.dense()[rows], alone.dense())
    assert same_bits(together.gathered(ALONE, 130).dense(), together.dense())
