"""Blocks quantized alone, all but one, and several calibration draws, each done again another
way.
"""

from functools import partial

import numpy as np
import pytest
import torch

from base.errors import UserError
from base.ranks import ALONE
from ckpt_tools.hf.model import load_hf_model
from quant_eval.measuring.losses import evaluation_set
from quant_eval.measuring.measurement import measure
from quant_eval.specs import parse_spec
from quant_eval.tasks.measurement import quantized_model
from tests.quant_eval.models import mean_loss, open_model, run_settings
from train.data.corpus import open_corpus

SPEC = parse_spec("gptq-b2-g16")


@pytest.fixture(scope="module")
def settings(train_prefix, held_out_prefix):
    return partial(run_settings, train_prefix, held_out_prefix)


def measured_of(hf_dir, tmp_path, settings, specs=(SPEC,), **changes):
    outs = tuple(tmp_path / spec.name for spec in specs)
    results = measure(hf_dir, specs, outs, settings(**changes), ALONE)
    return [result["measured"] for result in results]


def loss_of(model, held_out_prefix):
    """Mean loss of transformers' own model on the same blocks."""
    data = evaluation_set(open_corpus(held_out_prefix), 64, 5000, "separate", 0)
    return mean_loss(model, data.blocks)


def test_blocks_alone_and_all_but_one_are_what_putting_them_in_gives(
    hf_dir, tmp_path, settings, held_out_prefix
):
    """Here by exchanging layers between two whole models of transformers."""
    (measured,) = measured_of(hf_dir, tmp_path, settings, per_block=True)
    quantized = quantized_model(hf_dir, SPEC, settings(), ())[0]
    full_loss = loss_of(load_hf_model(hf_dir, torch.float32), held_out_prefix)
    assert measured["cross_entropy"] == pytest.approx(full_loss, rel=1e-6)
    assert [block["block"] for block in measured["blocks"]] == [0, 1]
    for index, block in enumerate(measured["blocks"]):
        mixed = load_hf_model(hf_dir, torch.float32)
        mixed.model.layers[index] = quantized.model.layers[index]
        expected = loss_of(mixed, held_out_prefix) - full_loss
        assert block["alone"]["absolute_error"] == pytest.approx(expected, abs=2e-6)
        # of two blocks, all but one is the other alone
        assert measured["blocks"][1 - index]["all_but_it"]["absolute_error"] == pytest.approx(
            expected, abs=2e-6
        )
        low, high = block["alone"]["intervals"]["absolute_error"]
        assert low < block["alone"]["absolute_error"] < high


def test_several_draws_are_the_mean_of_single_ones(hf_dir, tmp_path, settings):
    (together,) = measured_of(hf_dir, tmp_path, settings, calibration_seeds=3)
    single = [measured_of(hf_dir, tmp_path, settings, seed=seed)[0] for seed in range(3)]
    values = [result["relative_error"] for result in single]
    assert together["calibration"]["seeds"] == 3
    figures = together["calibration"]["figures"]["relative_error"]
    assert figures["values"] == pytest.approx(values, rel=1e-9)
    assert figures["standard_deviation"] == pytest.approx(np.std(values, ddof=1), rel=1e-9)
    assert together["relative_error"] == pytest.approx(np.mean(values), rel=1e-9)


def test_methods_without_calibration_are_quantized_once_and_read_no_text(
    hf_dir, tmp_path, settings
):
    """Beside one that is calibrated twice, and alone without a text."""
    specs = [parse_spec(name) for name in ("rtn-b3-g16", "gptq-b3-g16", "nf4-g32")]
    outs = [tmp_path / spec.name for spec in specs]
    together = measure(hf_dir, specs, outs, settings(calibration_seeds=2), ALONE)
    without = settings().model_copy(update={"calibration": None})
    alone = measure(hf_dir, [specs[0], specs[2]], [outs[0], outs[2]], without, ALONE)
    rtn, gptq, nf4 = together
    assert gptq["measured"]["calibration"]["seeds"] == gptq["spec"]["calibration"]["seeds"] == 2
    for result, same in zip((rtn, nf4), alone, strict=True):
        assert result["measured"] == same["measured"]
        del result["spec"]["streams"], same["spec"]["streams"]  # of all that walk together
        assert result["spec"] == same["spec"]
        assert result["measured"]["calibration"] is result["spec"]["calibration"] is None
        for layer in result["measured"]["layers"]:
            assert layer["relative_output_error"] is None
            assert layer["relative_weight_error"] > 0
    with pytest.raises(UserError, match="gptq-b3-g16 is calibrated on text; give it with --cal"):
        measure(hf_dir, specs, outs, without, ALONE)


def test_bitsandbytes_is_measured_in_the_same_walk(hf_dir, tmp_path, settings, held_out_prefix):
    """LLM.int8() and NF4 against whole models of transformers with those linears."""
    specs = [parse_spec(name) for name in ("int8-t6", "nf4-g64")]
    model = open_model(hf_dir)
    assert len(model.empty_linears()) == 14
    (int8,) = measured_of(hf_dir, tmp_path, settings, specs[:1])
    whole = quantized_model(hf_dir, specs[0], settings(), ())[0]
    assert int8["cross_entropy_quantized"] == pytest.approx(
        loss_of(whole, held_out_prefix), rel=1e-5
    )
    assert abs(int8["relative_error"]) < 0.02
    assert all(0 < layer["relative_weight_error"] < 1e-3 for layer in int8["layers"])
