"""QTIP of a weight: its block update against a closed form in float64, its errors against GPTQ's."""

import pytest
import torch

from base.errors import UserError
from base.hessian import row_output_errors
from base.ranks import ALONE
from quant_eval.quantizers.qtip import QTIP
from quant_eval.rounding.gptq import factored, gptq, prepare
from quant_eval.rounding.trellis import dense_tiles, round_tiles
from quant_eval.rounding.trellis_code import Trellis
from quant_eval.sizes import TILE, check_tiles
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.steps import Transform
from tests.quant_eval.specs import by_qtip, gptq_spec, typed

CPU = torch.device("cpu")
SPEC = typed(QTIP, "qtip-b2-l8")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(width, seed=0):
    """A second moment of inputs that are strongly correlated."""
    mix = normal(width, width, seed=seed).double() * torch.linspace(1, 0.05, width).double()
    return mix @ mix.T / width


def relative_error(weight_OI, quantized_OI, hessian_II):
    error_O, whole_O = row_output_errors(weight_OI, quantized_OI, hessian_II)
    return float(error_O.sum() / whole_O.sum())


def factor_of(hessian_II):
    order_I = torch.arange(len(hessian_II))
    return factored(hessian_II, order_I, SPEC.damping, "w", torch.float64, ALONE).factor_II


def tiles_of(weight_OI):
    """Rows of 256 weights of each tile of 16 x 16, by loops."""
    rows, columns = (size // TILE for size in weight_OI.shape)
    return [
        [
            weight_OI[TILE * r : TILE * (r + 1), TILE * c : TILE * (c + 1)].flatten()
            for c in range(columns)
        ]
        for r in range(rows)
    ]


def test_with_uncorrelated_inputs_every_tile_is_coded_by_itself():
    weight_OI, trellis = normal(32, 48), Trellis(2, 8, CPU)
    codes = round_tiles(weight_OI, torch.eye(48), trellis)

    assert codes.numel() * 8 == 2 * weight_OI.numel()
    expected = [trellis.encode(torch.stack(row)) for row in tiles_of(weight_OI)]
    assert torch.equal(codes, torch.stack(expected))
    decoded = torch.stack([trellis.decode(row) for row in expected])
    assert torch.equal(
        torch.stack([torch.stack(row) for row in tiles_of(dense_tiles(codes, trellis))]), decoded
    )


def test_blocks_move_the_later_columns_to_where_the_objective_is_smallest():
    """Given E_p of the columns so far, tr(E A E^T) is least at E_r = -E_p A_pr A_rr^-1."""
    weight_OI, hessian_II, trellis = normal(32, 64), correlated(64), Trellis(2, 8, CPU)
    codes = round_tiles(weight_OI, factor_of(hessian_II), trellis)

    damped_II = hessian_II + SPEC.damping * hessian_II.diagonal().mean() * torch.eye(64)
    whole_OI = weight_OI.double()
    quantized_OI = torch.zeros_like(whole_OI)
    for start in range(0, 64, TILE):
        error_OP = whole_OI[:, :start] - quantized_OI[:, :start]
        pull_PR = damped_II[:start, start:] @ torch.linalg.inv(damped_II[start:, start:])
        target_OR = whole_OI[:, start:] + error_OP @ pull_PR
        own = trellis.encode(target_OR[:, :TILE].reshape(2, -1).float())
        assert torch.equal(codes[:, start // TILE], own)
        quantized_OI[:, start : start + TILE] = trellis.decode(own).view(32, TILE)
    assert torch.equal(dense_tiles(codes, trellis), quantized_OI.float())

    # what it is for
    apart_OI = dense_tiles(round_tiles(weight_OI, torch.eye(64), trellis), trellis)
    ours, apart = (relative_error(weight_OI, q, hessian_II) for q in (quantized_OI, apart_OI))
    assert ours < 0.6 * apart


def test_tiles_of_rows_are_the_same_whichever_are_computed_together():
    weight_OI, trellis = normal(112, 64), Trellis(3, 8, CPU)
    factor_II = factor_of(correlated(64))
    codes = round_tiles(weight_OI, factor_II, trellis)
    for start, stop in ((0, 1), (1, 4), (4, 7)):  # tiles of 16 rows, as ranks share them
        own = round_tiles(weight_OI[start * TILE : stop * TILE], factor_II, trellis)
        assert torch.equal(own, codes[start:stop])


def test_errors_of_a_layer_with_outliers_are_less_than_those_of_gptq():
    """The layer of the other rotations: two inputs, and the weights of another, are outliers."""
    inputs_NI = normal(4096, 256) @ normal(256, 256, seed=1) / 16
    inputs_NI[:, 7] *= 30
    inputs_NI[:, 100] *= 20
    weight_OI = normal(128, 256, seed=2) * 0.02
    weight_OI[:, 5] *= 6
    hessian_II = inputs_NI.double().T @ inputs_NI.double() / 4096

    spec, transform = gptq_spec("gptq-b2-g128"), Transform(*hadamard_steps(256, seed=[1]))
    plain_OI = gptq(weight_OI, prepare(hessian_II, spec, "w"), spec).dense()
    rotated_II = transform.hessian(hessian_II)
    rounded = gptq(transform.weight(weight_OI), prepare(rotated_II, spec, "w"), spec)
    ours_OI = by_qtip(weight_OI, hessian_II, typed(QTIP, "qtip-b2"), [1])

    plain, rotated, ours = (
        relative_error(weight_OI, quantized_OI, hessian_II)
        for quantized_OI in (plain_OI, transform.restored(rounded.dense()), ours_OI)
    )
    # measured: 0.258, 0.041 and 0.014
    assert rotated < 0.25 * plain
    assert ours < 0.5 * rotated


def test_linears_that_read_the_same_inputs_have_signs_and_scales_of_their_own():
    small_OI, large_OI, hessian_II = normal(16, 32), 100 * normal(48, 32, seed=1), correlated(32)
    stacked_OI = torch.cat([small_OI, large_OI])
    both_OI = by_qtip(stacked_OI, hessian_II, SPEC, [3], sizes=[16, 48])
    assert torch.equal(both_OI[:16], by_qtip(small_OI, hessian_II, SPEC, [3]))
    assert torch.equal(both_OI, by_qtip(stacked_OI, hessian_II, SPEC, [3], sizes=[16, 48]))
    assert not torch.equal(both_OI[:16], by_qtip(small_OI, hessian_II, SPEC, [4]))
    twice_OI = by_qtip(torch.cat([small_OI, small_OI]), hessian_II, SPEC, [3], sizes=[16, 16])
    assert not torch.equal(twice_OI[:16], twice_OI[16:])
    for part in (slice(0, 16), slice(16, 64)):
        assert relative_error(stacked_OI[part], both_OI[part], hessian_II) < 0.15


def test_a_power_of_two_scales_the_result_and_zeros_stay_zeros():
    weight_OI, hessian_II = normal(16, 32), correlated(32)
    once_OI = by_qtip(weight_OI, hessian_II, SPEC, [0])
    assert torch.equal(by_qtip(8 * weight_OI, hessian_II, SPEC, [0]), 8 * once_OI)
    assert not by_qtip(0 * weight_OI, hessian_II, SPEC, [0]).any()


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (24, r"the 24 inputs of w are not a multiple of 16; give another .* gptq-b2-perchannel"),
        (1072, r"no Hadamard matrix of size 1072 is known, for the inputs of w; give another"),
    ],
)
def test_widths_without_tiles_or_hadamard_matrix_are_refused(width, message):
    with pytest.raises(UserError, match=message):
        check_tiles(width, "inputs of w", SPEC.bits)
    check_tiles(11008, "inputs of w", SPEC.bits)


def test_outputs_without_tiles_are_refused():
    with pytest.raises(UserError, match=r"the 24 outputs of w are not a multiple of 16"):
        by_qtip(normal(24, 32), correlated(32), SPEC, [0])
