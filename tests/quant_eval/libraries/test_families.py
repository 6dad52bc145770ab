"""gptqmodel and llmcompressor on every architecture, linear by linear against transformers.

Shapes: O output features, I input features, N sequences, L tokens of a sequence.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckpt_tools.formats.hf_weights import HFWeights
from quant_eval.libraries.awq_mappings import apply_fold, mappings_for
from quant_eval.libraries.job import WEIGHTS, Job, run_job
from quant_eval.libraries.run_gptqmodel import RIGHT
from quant_eval.model.streamed import StreamedModel
from quant_eval.specs import parse_spec
from tests.quant_eval.libraries import test_awq, test_gptqmodel
from tests.quant_eval.models import ARCHITECTURES, make_model

pytestmark = pytest.mark.stress
WIDTH = test_gptqmodel.GROUP  # gptqmodel's blocks of columns
CHANGES = {"qwen3": {"head_dim": 64}}  # 4 heads of 64 features in a model of width 128


def job_of(directory, tmp_path, spec):
    ids_NL = torch.randint(1, 320, (20, 64), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids_NL}, tmp_path / "ids.safetensors")
    return Job(
        hf_dir=directory,
        spec=parse_spec(spec),
        calibration=tmp_path / "ids.safetensors",
        dtype="fp32",
        device="cpu",
        batch_size=8,
        threads=1,
        out=tmp_path / "out",
    )


def groups_of(directory):
    """Names of the linears of one input, in the order in which they compute."""
    model = StreamedModel(directory, HFWeights(directory), torch.float32, torch.device("cpu"))
    for index in range(model.num_blocks):
        yield from (list(group) for group in model.block(index).linears())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gptqmodel_rounds_every_linear_on_the_inputs_it_gets(tmp_path, name):
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    directory = make_model(tmp_path / "model", name, **(sizes | CHANGES.get(name, {})))
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    if type(model).__name__ not in RIGHT:
        assert name == "olmo"
        return
    job = job_of(directory, tmp_path, f"gptqmodel-b3-g{WIDTH}-asym-damp0.02")
    run_job(job)
    weights, ids_NL = load_file(job.out / WEIGHTS), load_file(job.calibration)["input_ids"]
    for linears in groups_of(directory):
        inputs_TI = test_gptqmodel.inputs_of(model, linears[0], ids_NL)
        for linear in linears:
            parameter = model.get_parameter(f"{linear}.weight")
            expected_OI = test_gptqmodel.rounded_column_by_column(
                parameter.detach().double(), inputs_TI, inputs_TI, job.spec
            )
            held_OI = weights.pop(f"{linear}.weight")
            # fp32 puts a few weights that are midway between two points on the other one
            assert test_gptqmodel.share_equal(held_OI, expected_OI) > 0.99, linear
            parameter.data.copy_(held_OI)
    assert not weights


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_awq_rounds_every_linear_after_the_folds_it_reports(tmp_path, name, heads):
    directory = make_model(tmp_path / "model", name, num_key_value_heads=heads)
    job = job_of(directory, tmp_path, "awq-b3-g16")
    report = run_job(job)
    scales = load_file(job.out / "scales.safetensors")
    model = test_awq.load_original(directory)
    mappings = mappings_for(model)
    assert report.settings["folds"] == [str(fold) for fold in mappings.folds]
    blocks = list(model.get_submodule(mappings.blocks).children())
    for index, block in enumerate(blocks):
        for fold in mappings.folds:
            scales_I = scales.pop(f"{mappings.blocks}.{index}.{fold.smooth}")
            apply_fold(block, fold, scales_I.double())
    assert not scales
    weights = load_file(job.out / WEIGHTS)
    for linears in groups_of(directory):
        for linear in linears:
            weight_OI = model.get_parameter(f"{linear}.weight").detach()
            expected_OI = test_awq.rounded(weight_OI, 3, 16, symmetric=False)
            # fp32 puts a weight that is midway between two points on the other one
            close_OI = (weights[f"{linear}.weight"] - expected_OI).abs() <= (
                1e-5 * weight_OI.abs().max()
            )
            assert close_OI.double().mean() > 0.99, linear
