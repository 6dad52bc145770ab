"""The walk against full forward passes of a model into which the quantized weights are put one
by one.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from base.ranks import ALONE
from ckpt_tools.formats.weights import DTYPES
from quant_eval.measuring.walk import Variant, walk
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.settings import ComputeSettings
from tests.conftest import make_hf_directory
from tests.published import change_weights
from tests.quant_eval.models import ARCHITECTURES, open_model
from tests.quant_eval.specs import gptq_spec, grid_spec
from train.data.batches import batch
from train.data.corpus import open_corpus


@pytest.fixture(scope="module")
def calibration(train_prefix):
    """20 sequences of 48 tokens, int64 [N, L]."""
    drawn = batch(open_corpus(train_prefix), step=1, batch_size=20, sequence_length=48, seed=3)
    return torch.from_numpy(drawn[:, :-1].copy())


def quantize(directory: Path, name: str, calibration, batch_size=6, dtype="fp32"):
    """Weights of the quantized linears, the walk's records and the groups; 6 does not divide the
    20 sequences.
    """
    weights: dict[str, torch.Tensor] = {}
    groups: list[list[str]] = []

    def collect(_index, block):
        for group in block.linears():
            groups.append(list(group))
            weights.update({key: linear.weight.clone() for key, linear in group.items()})

    compute = ComputeSettings(dtype=dtype, batch_size=batch_size, device="cpu")
    variant = Variant(grid_spec(name), calibration, finished=collect)
    model = open_model(directory, DTYPES[dtype])
    (quantized,) = walk(model, [variant], None, compute, ALONE)
    return weights, quantized.errors, groups


@torch.no_grad()
def inputs_of(model: Any, name: str, calibration) -> torch.Tensor:
    """Input of a linear in an ordinary forward pass of the whole model, float64 [N x L, I]."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[0].flatten(0, 1).double())
    )
    model(input_ids=calibration, use_cache=False)
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["gptq-b2-g16", "gptq-b3-perchannel-asym-actorder"])
def test_every_linear_is_quantized_on_the_inputs_the_quantized_model_before_it_makes(
    tiny, calibration, name, architecture
):
    """The witness is transformers' own forward, eager, all sequences at once; the walk takes
    blocks apart, by sdpa.
    """
    directory = tiny(architecture)
    quantized, errors, groups = quantize(directory, name, calibration)
    witness = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    spec, records = gptq_spec(name), {error.name: error for error in errors}
    for names in groups:
        inputs_NI = inputs_of(witness, names[0], calibration)
        hessian_II = inputs_NI.T @ inputs_NI / len(inputs_NI)
        for linear_name in names:
            weight_OI, ours_OI = (
                witness.get_submodule(linear_name).weight.detach().clone(),
                quantized[linear_name],
            )
            expected_OI = gptq(weight_OI, prepare(hessian_II, spec, linear_name), spec).dense()
            # fp32 activations of two attention kernels differ by 1e-6: a few weights fall the other
            # way.
            assert ((ours_OI - expected_OI).abs() < 1e-5).double().mean() >= 0.99, linear_name
            output, moved = (
                inputs_NI @ weight_OI.double().T,
                inputs_NI @ (weight_OI - ours_OI).double().T,
            )
            expected_error = float(moved.norm() ** 2 / output.norm() ** 2)
            assert records[linear_name].relative_output_error == pytest.approx(
                expected_error, rel=1e-3
            )
            expected_error = float((weight_OI - ours_OI).norm() ** 2 / weight_OI.norm() ** 2)
            assert records[linear_name].relative_weight_error == pytest.approx(
                expected_error, rel=1e-4
            )
        with torch.no_grad():
            for linear_name in names:
                witness.get_submodule(linear_name).weight.copy_(quantized[linear_name])
    linears = [
        key
        for key, part in witness.named_modules()
        if isinstance(part, torch.nn.Linear) and ".0." in key
    ]
    assert {error.name for error in errors if ".0." in error.name} == set(linears)


def test_the_second_layer_would_differ_on_inputs_of_the_full_precision_model(hf_dir, calibration):
    """The test above can fail: on unquantized earlier layers a tenth of the weights or
    more fall elsewhere.
    """
    quantized, _, _ = quantize(hf_dir, "gptq-b2-g16", calibration)
    full: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    name, spec = "model.layers.1.mlp.down_proj", gptq_spec("gptq-b2-g16")
    inputs_NI = inputs_of(full, name, calibration)
    prepared = prepare(inputs_NI.T @ inputs_NI / len(inputs_NI), spec, name)
    parallel_OI = gptq(full.get_submodule(name).weight.detach(), prepared, spec).dense()
    assert ((quantized[name] - parallel_OI).abs() > 1e-5).double().mean() > 0.1


def test_rounding_to_nearest_is_each_weight_alone(hf_dir, calibration):
    quantized, _, _ = quantize(hf_dir, "rtn-b2-g16", calibration)
    full: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    for name, weight_OI in quantized.items():
        rounded = round_to_nearest(
            full.get_submodule(name).weight.detach(), grid_spec("rtn-b2-g16")
        )
        assert torch.equal(weight_OI, rounded.dense())


@pytest.mark.parametrize(
    ("name", "levels"), [("gptq-b2-g16", 4), ("gptq-b3-g16-asym", 8), ("rtn-b3-perchannel", 8)]
)
def test_weights_take_no_more_values_than_the_bits_allow(hf_dir, calibration, name, levels):
    quantized, _, _ = quantize(hf_dir, name, calibration)
    for weight_OI in quantized.values():
        for group in weight_OI.reshape(-1, grid_spec(name).group_size or weight_OI.shape[1]):
            assert len(group.unique()) <= levels


def test_bf16_weights_stay_bf16(tmp_path, calibration):
    directory = make_hf_directory(tmp_path / "model", dtype=torch.bfloat16)
    quantized, errors, _ = quantize(directory, "gptq-b8-g16", calibration, dtype="bf16")
    assert all(weight_OI.dtype == torch.bfloat16 for weight_OI in quantized.values())
    # 8 bits of a group's range and bf16's 8 significant bits are alike: steps of about 1e-2 of a
    # typical weight.
    assert all(error.relative_output_error < 1e-3 for error in errors)


def test_a_linear_of_zeros_is_kept_as_it_is(tmp_path, hf_dir, calibration):
    """As some initialise what writes to the residual stream."""
    directory = Path(shutil.copytree(hf_dir, tmp_path / "model"))
    name = "model.layers.1.self_attn.o_proj"
    change_weights(directory, **{f"{name}.weight": torch.zeros(32, 32)})
    quantized, errors, _ = quantize(directory, "gptq-b3-g16", calibration)
    assert not quantized[name].any()
    (error,) = (error for error in errors if error.name == name)
    assert error.relative_output_error == error.relative_weight_error == 0
