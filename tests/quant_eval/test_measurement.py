"""Results of `measure`: methods of other projects in the same walk as our own; blocks quantized
alone, all but one, and several calibration draws, each done again another way.
"""

from functools import partial

import numpy as np
import pytest
import torch

from base.errors import UserError
from base.ranks import ALONE
from ckpt_tools.hf.directory import write_result
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.model import load_hf_model
from ckpt_tools.hf.results import read_result
from quant_eval.libraries.job import Report, run_job
from quant_eval.measuring.losses import evaluation_set
from quant_eval.measuring.measurement import measure
from quant_eval.shown import lines
from quant_eval.specs import parse_spec
from quant_eval.tasks.measurement import quantized_model
from tests.published import change_weights
from tests.quant_eval.models import make_model, mean_loss, run_settings
from train.data.corpus import open_corpus

SPEC = parse_spec("gptq-b2-g16")
SPECS = tuple(
    parse_spec(name) for name in ("gptq-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "rtn-b3-g32")
)


@pytest.fixture(scope="module")
def settings(train_prefix, held_out_prefix):
    return partial(run_settings, train_prefix, held_out_prefix)


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory, settings):
    """By spec; what the libraries leave behind is gone."""
    root = tmp_path_factory.mktemp("measured")
    outs = tuple(root / spec.name for spec in SPECS)
    entries = measure(tiny("olmo2"), SPECS, outs, settings(), ALONE)
    assert not [path for out in outs if out.exists() for path in out.iterdir()]
    return {result["spec"]["name"]: result for result in entries}


def test_gptqmodel_and_our_gptq_cost_the_same_where_their_settings_agree(results):
    """Two programs, one algorithm: rounding flips are all that may differ."""
    ours, theirs = (results[name]["measured"] for name in ("gptq-b3-g32", "gptqmodel-b3-g32"))
    assert theirs["cross_entropy"] == ours["cross_entropy"]
    assert theirs["kl_divergence"] == pytest.approx(ours["kl_divergence"], rel=0.02)
    assert ours["kl_divergence"] < 0.8 * results["rtn-b3-g32"]["measured"]["kl_divergence"]
    for index, (layer, other) in enumerate(zip(ours["layers"], theirs["layers"], strict=True)):
        assert layer["name"] == other["name"]
        # q, k and v of the first block read the same; further on a flip in 32 inputs moves what the
        # others read
        expected = pytest.approx(layer["relative_output_error"], rel=2e-3 if index < 3 else 0.1)
        assert other["relative_output_error"] == expected


def test_a_result_says_what_the_library_was_told(results):
    spec = results["gptqmodel-b3-g32"]["spec"]
    assert (spec["library"], spec["library_version"]) == ("gptqmodel", "7.6.0")
    config = spec["library_settings"]["quantize_config"]
    told = ("bits", "group_size", "fallback", "damp_auto_increment")
    assert [config[key] for key in told] == [3, 32, None, 0.0]
    assert "library_settings" not in results["gptq-b3-g32"]["spec"]


def test_errors_of_folded_linears_are_null(results):
    layers = results["awq-b3-g32"]["measured"]["layers"]
    assert len(layers) == 3 * 7
    assert all(layer["folded"] and layer["relative_output_error"] is None for layer in layers)


def test_a_dead_linear_is_measured_and_named(tmp_path, settings):
    """Values that are zero leave nothing to the output projection: in that block no draw of the
    text decides how it is rounded.
    """
    model = make_model(tmp_path / "model", "olmo2")
    name = "model.layers.1.self_attn.v_proj.weight"
    change_weights(model, **{name: torch.zeros(32, 32)})
    (result,) = measure(model, [SPEC], [tmp_path / "out"], settings(calibration_seeds=2), ALONE)
    layers = result["measured"]["layers"]
    dead = ["model.layers.1.self_attn.o_proj"]
    assert [layer["name"] for layer in layers if layer["dead"]] == dead
    assert [layer["relative_output_error"] for layer in layers if layer["dead"]] == [0.0]
    (zeros,) = (layer for layer in layers if f"{layer['name']}.weight" == name)
    assert zeros["relative_output_error"] == zeros["relative_weight_error"] == 0  # kept as it is

    write_result(tmp_path / "out", result)
    printed = " ".join(lines([read_result(tmp_path / "out", Quantization)], kept=0))
    assert f"are rounded: {dead[0]}" in " ".join(printed.split())


def test_a_library_that_fails_leaves_nothing(tiny, tmp_path, settings, monkeypatch):
    def fails(job) -> Report:
        run_job(job.model_copy(update={"calibration": tmp_path / "absent"}))
        raise AssertionError

    monkeypatch.setattr("quant_eval.libraries.job.run_job", fails)
    with pytest.raises(UserError, match="spec gptqmodel-b3-g32: "):
        measure(tiny("olmo2"), SPECS[1:2], (tmp_path / "out",), settings(), ALONE)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def measured_of(hf_dir, tmp_path, settings, spec=SPEC, **changes):
    (result,) = measure(hf_dir, [spec], [tmp_path / spec.name], settings(**changes), ALONE)
    return result["measured"]


def loss_of(model, held_out_prefix):
    """Mean loss of transformers' own model on the same blocks."""
    data = evaluation_set(open_corpus(held_out_prefix), 64, 5000, "separate", 0)
    return mean_loss(model, data.blocks)


def test_blocks_alone_and_all_but_one_are_what_putting_them_in_gives(
    hf_dir, tmp_path, settings, held_out_prefix
):
    """Here by exchanging layers between two whole models of transformers."""
    measured = measured_of(hf_dir, tmp_path, settings, per_block=True)
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
        others = measured["blocks"][1 - index]["all_but_it"]
        assert others["absolute_error"] == pytest.approx(expected, abs=2e-6)
        low, high = block["alone"]["intervals"]["absolute_error"]
        assert low < block["alone"]["absolute_error"] < high


def test_several_draws_are_the_mean_of_single_ones(hf_dir, tmp_path, settings):
    together = measured_of(hf_dir, tmp_path, settings, calibration_seeds=3)
    single = [measured_of(hf_dir, tmp_path, settings, seed=seed) for seed in range(3)]
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
    """LLM.int8() against a whole model of transformers with those linears."""
    spec = parse_spec("int8-t6")
    int8 = measured_of(hf_dir, tmp_path, settings, spec)
    whole = quantized_model(hf_dir, spec, settings(), ())[0]
    expected = loss_of(whole, held_out_prefix)
    assert int8["cross_entropy_quantized"] == pytest.approx(expected, rel=1e-5)
    assert abs(int8["relative_error"]) < 0.02
    assert len(int8["layers"]) == 14
    assert all(0 < layer["relative_weight_error"] < 1e-3 for layer in int8["layers"])
