"""The walk against full forward passes of a model into which the quantized weights are put one
by one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from base.ranks import ALONE
from quant_eval.measuring.walk import Variant, walk
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.settings import ComputeSettings
from tests.quant_eval.models import ARCHITECTURES, open_model
from tests.quant_eval.specs import gptq_spec, grid_spec
from train.data.batches import batch
from train.data.corpus import open_corpus


@pytest.fixture(scope="module")
def calibration(train_prefix):
    """20 sequences of 48 tokens, int64 [N, L]."""
    drawn = batch(open_corpus(train_prefix), step=1, batch_size=20, sequence_length=48, seed=3)
    return torch.from_numpy(drawn[:, :-1].copy())


def quantize(directory: Path, name: str, calibration):
    """Weights of the quantized linears, the walk's records and the groups; batches of 6 do not
    divide the 20 sequences.
    """
    weights: dict[str, torch.Tensor] = {}
    groups: list[list[str]] = []

    def collect(_index, block):
        for group in block.linears():
            groups.append(list(group))
            weights.update({key: linear.weight.clone() for key, linear in group.items()})

    variant = Variant(grid_spec(name), calibration, finished=collect)
    compute = ComputeSettings(batch_size=6)
    (quantized,) = walk(open_model(directory), [variant], None, compute, ALONE)
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
            weight_OI = witness.get_submodule(linear_name).weight.detach().clone()
            ours_OI = quantized[linear_name]
            expected_OI = gptq(weight_OI, prepare(hessian_II, spec, linear_name), spec).dense()
            # fp32 activations of two attention kernels differ by 1e-6: a few weights fall the other
            # way.
            assert ((ours_OI - expected_OI).abs() < 1e-5).double().mean() >= 0.99, linear_name
            record, error_OI = records[linear_name], (weight_OI - ours_OI).double()
            moved, output = inputs_NI @ error_OI.T, inputs_NI @ weight_OI.double().T
            expected = float(moved.norm() ** 2 / output.norm() ** 2)
            assert record.relative_output_error == pytest.approx(expected, rel=1e-3)
            expected = float(error_OI.norm() ** 2 / weight_OI.norm() ** 2)
            assert record.relative_weight_error == pytest.approx(expected, rel=1e-4)
        with torch.no_grad():
            for linear_name in names:
                witness.get_submodule(linear_name).weight.copy_(quantized[linear_name])
    parts = witness.named_modules()
    linears = {key for key, part in parts if isinstance(part, torch.nn.Linear) and ".0." in key}
    assert {name for name in records if ".0." in name} == linears


def test_rounding_to_nearest_is_each_weight_alone(hf_dir, calibration):
    quantized, _, _ = quantize(hf_dir, "rtn-b2-g16", calibration)
    full: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    for name, weight_OI in quantized.items():
        before_OI = full.get_submodule(name).weight.detach()
        assert torch.equal(weight_OI, round_to_nearest(before_OI, grid_spec("rtn-b2-g16")).dense())
