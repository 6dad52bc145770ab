"""The walk against full forward passes of a model into which the quantized weights are put one by one."""

import copy
from typing import Any

import pytest
import torch

from ckpt_tools.hf_model import load_hf_model
from quant_eval.gptq import gptq
from quant_eval.grid import round_to_nearest
from quant_eval.sequential import check_groups, decoder_linears, quantize_model
from quant_eval.specs import parse_spec
from tests.conftest import make_hf_directory
from train.command import Progress, UserError
from train.corpus import open_corpus
from train.data import batch

STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@pytest.fixture(scope="module")
def calibration(train_prefix):
    """20 sequences of 48 tokens, int64 [N, L]."""
    drawn = batch(open_corpus(train_prefix), step=1, batch_size=20, sequence_length=48, seed=3)
    return torch.from_numpy(drawn[:, :-1].copy())


def walk(model, name, calibration, batch_size=6):
    """The quantized copy of a model, and the walk's records; 6 does not divide the 20 sequences."""
    quantized = copy.deepcopy(model)
    with Progress("quantize", total=2) as progress:
        errors = quantize_model(quantized, parse_spec(name), calibration, batch_size, progress)
    return quantized, errors


def weight_of(model: Any, name: str) -> torch.Tensor:
    """The weight of one of a model's linears, as it is now."""
    return model.get_submodule(name).weight.detach().clone()  # type: ignore[no-any-return]


@torch.no_grad()
def inputs_of(model: Any, name: str, calibration) -> torch.Tensor:
    """What a linear reads in an ordinary forward pass of the whole model, float64 [N x L, I]."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[0].flatten(0, 1).double())
    )
    model(input_ids=calibration)
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("config", [{}, {"num_key_value_heads": 2, "attention_bias": True}])
@pytest.mark.parametrize("name", ["gptq-b2-g16", "gptq-b3-perchannel-asym-actorder", "rtn-b2-g16"])
def test_every_linear_is_quantized_on_the_inputs_the_quantized_model_before_it_makes(
    tmp_path, calibration, name, config
):
    """The witness is transformers' own forward, eager, all sequences at once; the walk spells blocks out, with sdpa."""
    directory = make_hf_directory(tmp_path / "model", seed=1, **config)
    quantized, errors = walk(load_hf_model(directory, torch.float32, "sdpa"), name, calibration)
    witness = load_hf_model(directory, torch.float32, "eager")
    spec, records, expected_names = parse_spec(name), {error.name: error for error in errors}, []
    for layer in range(2):
        for stage in STAGES:
            names = [f"model.layers.{layer}.{part}" for part in stage]
            expected_names += names
            inputs_NI = inputs_of(witness, names[0], calibration)
            for linear_name in names:
                weight_OI, ours_OI = weight_of(witness, linear_name), weight_of(quantized, linear_name)
                expected_OI = (
                    round_to_nearest(weight_OI, spec)
                    if spec.method == "rtn"
                    else gptq(weight_OI, inputs_NI.T @ inputs_NI, spec, linear_name)
                )
                # fp32 activations of two attention kernels differ by 1e-6: a few weights fall the other way.
                assert ((ours_OI - expected_OI).abs() < 1e-5).double().mean() >= 0.99, linear_name
                output, moved = inputs_NI @ weight_OI.double().T, inputs_NI @ (weight_OI - ours_OI).double().T
                expected_error = float(moved.norm() ** 2 / output.norm() ** 2)
                assert records[linear_name].relative_output_error == pytest.approx(expected_error, rel=1e-3)
            with torch.no_grad():
                for linear_name in names:
                    witness.get_parameter(f"{linear_name}.weight").copy_(weight_of(quantized, linear_name))
    assert [error.name for error in errors] == expected_names


def test_the_second_layer_would_differ_on_inputs_of_the_full_precision_model(hf_dir, calibration):
    """What the test above tells apart: on unquantized earlier layers a tenth of the weights or more fall elsewhere."""
    full = load_hf_model(hf_dir, torch.float32, "sdpa")
    quantized, _ = walk(full, "gptq-b2-g16", calibration)
    name = "model.layers.1.mlp.down_proj"
    inputs_NI = inputs_of(full, name, calibration)
    parallel_OI = gptq(weight_of(full, name), inputs_NI.T @ inputs_NI, parse_spec("gptq-b2-g16"), name)
    assert ((weight_of(quantized, name) - parallel_OI).abs() > 1e-5).double().mean() > 0.1


def test_only_decoder_linears_change_and_the_given_model_does_not(hf_dir, calibration):
    full = load_hf_model(hf_dir, torch.float32, "sdpa")
    before = {name: value.clone() for name, value in full.state_dict().items()}
    quantized, errors = walk(full, "gptq-b4-g16", calibration)
    changed = {name for name, value in quantized.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"{error.name}.weight" for error in errors}
    assert len(changed) == 2 * 7
    assert all(torch.equal(value, before[name]) for name, value in full.state_dict().items())


@pytest.mark.parametrize(("name", "levels"), [("gptq-b2-g16", 4), ("gptq-b3-g16-asym", 8), ("rtn-b3-perchannel", 8)])
def test_weights_take_no_more_values_than_the_bits_allow(hf_dir, calibration, name, levels):
    quantized, _ = walk(load_hf_model(hf_dir, torch.float32, "sdpa"), name, calibration)
    for linear in decoder_linears(quantized).values():
        group_size = parse_spec(name).group_size or linear.in_features
        for group in linear.weight.reshape(-1, group_size):
            assert len(group.unique()) <= levels


def test_bf16_weights_stay_bf16(hf_dir, calibration):
    quantized, errors = walk(load_hf_model(hf_dir, torch.bfloat16, "sdpa"), "gptq-b8-g16", calibration)
    assert all(linear.weight.dtype == torch.bfloat16 for linear in decoder_linears(quantized).values())
    # 8 bits of a group's range and bf16's 8 significant bits are alike: steps of about 1e-2 of a typical weight.
    assert all(error.relative_output_error < 1e-3 for error in errors)


def test_a_group_size_that_does_not_divide_is_refused(hf_dir):
    model = load_hf_model(hf_dir, torch.float32, "sdpa")
    check_groups(model, parse_spec("rtn-b4-g32"))
    with pytest.raises(UserError, match=r"64 does not divide the 32 input features of model\.layers\.0\.self_attn"):
        check_groups(model, parse_spec("rtn-b4-g64"))
