"""LLM.int8() and NF4 against the papers' formulas in float64, and against transformers' own way
to bitsandbytes.
"""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from base.errors import UserError
from quant_eval.rounding.bitsandbytes import dense_weight, int8_linear, nf4_dense
from quant_eval.sizes import check_linears
from quant_eval.specs import parse_spec


def absmax_codes(values):
    """Rows rounded to -127..127 steps of their largest magnitude, and the size of a step."""
    steps = values.abs().amax(1, keepdim=True) / 127
    return torch.where(steps > 0, values / steps, 0.0).round(), steps


def llm_int8(x_TI, weight_OI, bias_O, threshold):
    """Vector-wise quantization with outlier features apart, float64: the paper's figure 2.

    Two things are bitsandbytes' and not the paper's: a token's largest magnitude is taken over all
    of its values below the threshold, also those in outlier features, and outlier features meet the
    decoded instead of the fp16 weights.
    """
    outlier_TI = x_TI.abs() >= threshold if threshold else torch.zeros_like(x_TI, dtype=torch.bool)
    outlier_I = outlier_TI.any(0)
    codes_TI, steps_T = absmax_codes(x_TI.half().double().masked_fill(outlier_TI, 0))
    codes_OI, steps_O = absmax_codes(weight_OI.half().double())
    regular_TO = (codes_TI * ~outlier_I) @ codes_OI.T * steps_T * steps_O.T
    return (
        regular_TO + x_TI[:, outlier_I] @ (codes_OI * steps_O)[:, outlier_I].T + bias_O,
        codes_OI * steps_O,
    )


@pytest.fixture
def activations():
    x_TI = torch.randn(18, 64, generator=torch.Generator().manual_seed(1))
    # two outlier features; below 6 the largest of its token
    x_TI[3, 5], x_TI[9, 7], x_TI[4, 5] = 11.0, -9.0, 5.5
    x_TI[12] = 0
    return x_TI


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(64, 48)


@pytest.mark.parametrize("threshold", [0.0, 2.5, 6.0])
def test_int8_follows_the_formula(linear, activations, threshold):
    weight_OI, bias_O = linear.weight.detach().double(), linear.bias.detach().double()
    expected_TO, decoded_OI = llm_int8(activations.double(), weight_OI, bias_O, threshold)
    replacement = int8_linear("a", linear, threshold)
    held_OI = dense_weight(replacement)
    with torch.no_grad():
        output_TO = replacement(activations.reshape(2, 9, 64)).reshape(18, 48)
    # bitsandbytes' constant on a CPU is 1.8e-5 off 1 / 127^2; quantization itself moves outputs by
    # 1e-2
    torch.testing.assert_close(
        output_TO.double(), expected_TO, rtol=0, atol=3e-5 * float(expected_TO.abs().max())
    )
    torch.testing.assert_close(held_OI.double(), decoded_OI, rtol=1e-6, atol=0)
    assert torch.equal(dense_weight(replacement), held_OI)  # a call moves the codes
    plain_TO = activations.double() @ weight_OI.T + bias_O
    assert (output_TO - plain_TO).abs().max() > 1e-3 * plain_TO.abs().max()


def test_a_weight_beyond_fp16_is_refused(linear):
    with torch.no_grad():
        linear.weight[1, 2] = 70_000.0
    with pytest.raises(UserError, match=r"^inner\.0: a weight overflows fp16"):
        int8_linear("inner.0", linear, 6.0)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_what_transformers_makes_of_it(hf_dir, threshold, dtype):
    tokens_BL = torch.arange(48).reshape(2, 24) * 5
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    theirs = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=dtype, quantization_config=config, device_map="cpu"
    )
    ours = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype)
    with torch.no_grad():
        full_BLV = ours(input_ids=tokens_BL).logits
        for layer in ours.model.layers:
            linears = [item for item in layer.named_modules() if isinstance(item[1], nn.Linear)]
            for name, linear in linears:
                layer.set_submodule(name, int8_linear(name, linear, threshold))
        ours_BLV, theirs_BLV = (model(input_ids=tokens_BL).logits for model in (ours, theirs))
    assert torch.equal(ours_BLV, theirs_BLV)
    assert not torch.equal(ours_BLV, full_BLV)


def nf4_values():
    """NF4's 16 values (Dettmers et al. 2023, section 3 and appendix E): normal quantiles, 7
    below zero, 8 above.

    The outermost quantile is the mean of 1 - 1/(2 x 15) and 1 - 1/(2 x 16).
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    above = norm.ppf(np.linspace(outermost, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(outermost, 0.5, 8)[:-1])
    return torch.from_numpy(np.sort(np.concatenate([below, [0.0], above])) / above.max())


@pytest.mark.parametrize("group_size", [32, 128, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_the_nearest_published_value(group_size, dtype):
    weight_OI = torch.randn(5, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight_OI[2, :group_size] = 0
    dense_OI = nf4_dense(weight_OI, group_size)
    groups_GK = weight_OI.double().reshape(-1, group_size)
    largest_G1 = groups_GK.abs().amax(1, keepdim=True)
    scaled_GK = torch.where(largest_G1 > 0, groups_GK / largest_G1, 0.0)
    nearest_GK = (scaled_GK[..., None] - nf4_values()).abs().argmin(-1)
    expected_OI = (nf4_values()[nearest_GK] * largest_G1).reshape(5, 4096)
    assert dense_OI.dtype == torch.float32
    # published values have 7 digits or so; a weight midway between two values may go either way
    close_OI = (dense_OI - expected_OI).abs() <= 1e-6 * largest_G1.max()
    assert close_OI.double().mean() >= 0.9995
    assert ((dense_OI - weight_OI).abs() <= (expected_OI - weight_OI).abs() + 1e-4).all()
    assert not dense_OI[2, :group_size].any()


def test_nf4_sizes_are_refused():
    with pytest.raises(UserError, match="nf4 does not take groups of 48; choose one of 32, 64"):
        check_linears(parse_spec("nf4-g48"), {"a": (2, 96)})
