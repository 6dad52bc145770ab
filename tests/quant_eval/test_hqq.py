"""HQQ against the exact minimum over all zero points, rounding to nearest, and itself."""

import pytest
import torch

from base.errors import UserError
from base.ranks import ALONE
from quant_eval.group import LinearGroup
from quant_eval.quantizers.hqq import HQQ
from quant_eval.specs import parse_spec

GROUP, NORM = 16, 0.7


def rounded(name: str, weight_OI: torch.Tensor) -> torch.Tensor:
    group = LinearGroup("w", [len(weight_OI)], weight_OI, None, torch.float64, ALONE)
    return parse_spec(name).round(group).dense_OI


def weights(num_outputs: int = 24, num_inputs: int = 96) -> torch.Tensor:
    """Normal weights, some of them outliers, and a group of zeros."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=generator)
    weight_OI[:, ::13] *= 4
    weight_OI[1, :GROUP] = 0
    return weight_OI


def objectives(weight_OI: torch.Tensor, dense_OI: torch.Tensor) -> torch.Tensor:
    """sum |w - wq|^p of every group."""
    return (weight_OI.double() - dense_OI.double()).abs().pow(NORM).view(-1, GROUP).sum(1)


def exact_minimum(group_K: torch.Tensor, bits: int) -> float:
    """The least objective of a group at its scale, over all real zero points.

    Along z every |error|^p is concave between the points where the error is 0, at the border of two
    codes too: so the minimum has an error of 0, and as many weights times codes are to be tried.
    """
    low, high = float(group_K.min().clamp(max=0)), float(group_K.max().clamp(min=0))
    scale = (high - low) / (2**bits - 1)
    steps_K, codes_P = group_K.double() / scale, torch.arange(2**bits).double()
    zeros_Z = (codes_P[:, None] - steps_K).flatten()
    shifted_ZK = steps_K + zeros_Z[:, None]
    errors_ZK = shifted_ZK - shifted_ZK.round().clamp(0, 2**bits - 1)
    return float((scale * errors_ZK).abs().pow(NORM).sum(1).min())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_it_is_between_rounding_to_nearest_and_the_exact_minimum(bits):
    weight_OI = weights()
    nearest_G, ours_G = (
        objectives(weight_OI, rounded(name, weight_OI))
        for name in (f"rtn-b{bits}-g{GROUP}-asym", f"hqq-b{bits}-g{GROUP}")
    )
    groups_GK = weight_OI.view(-1, GROUP)
    exact_G = torch.tensor(
        [exact_minimum(each, bits) if each.any() else 0.0 for each in groups_GK]
    ).double()
    # grids are fp32, whose last digit moves an error of 0 by 1e-7, and its 0.7th power by 1e-5
    slack_G = 1e-3 * nearest_G + 1e-9
    assert (ours_G <= nearest_G + 1e-6 * nearest_G).all()
    assert (exact_G <= ours_G + slack_G).all()
    # it is a descent to the next minimum, and takes about half of what there is to gain
    assert (nearest_G - ours_G).sum() > 0.4 * (nearest_G - exact_G).sum()


def test_rows_apart_are_the_rows_together_in_any_unit():
    weight_OI = weights(70, 64)
    whole_OI = rounded("hqq-b3-g32", weight_OI)
    parts = [rounded("hqq-b3-g32", rows_OI) for rows_OI in weight_OI.split([9, 41, 20])]
    assert torch.equal(torch.cat(parts), whole_OI)
    assert torch.equal(rounded("hqq-b3-g32", weight_OI / 64), whole_OI / 64)
    assert 2 < len(rounded("hqq-b2-perchannel", weight_OI)[3].unique()) <= 4


def test_its_names_need_no_calibration():
    spec = parse_spec("hqq-b4-g64")
    assert (type(spec), spec.name, spec.needs_calibration) == (HQQ, "hqq-b4-g64", False)
    assert spec.describe() == "HQQ, 4 bits, groups of 64"
    with pytest.raises(UserError, match="hqq does not take damping"):
        parse_spec("hqq-b4-g64-damp0.1")
