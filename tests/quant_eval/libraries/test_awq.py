"""AWQ by llmcompressor, in the process that `run_job` starts, against float64 arithmetic on the
original model.

Shapes: O output features, I input features, T calibration tokens, G groups of a row, K weights of a
    group.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quant_eval.libraries.awq_mappings import apply_fold, mappings_for
from quant_eval.libraries.job import WEIGHTS, Report, run_job
from tests.quant_eval.libraries.jobs import inputs_of, linears_by_input, make_job, random_ids
from tests.quant_eval.models import ARCHITECTURES, make_model

IDS = random_ids(10, 32, seed=3)
BATCH = 4  # the last batch is not full
# who reads what is scaled, by what absorbs the scales: all in Llama, those of linears in OLMo2
FOLDS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.v_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}
LINEARS = {
    f"model.layers.{index}.{name}"
    for index in range(2)
    for names in FOLDS.values()
    for name in names
}


class Outcome(NamedTuple):
    """The results of a job, and the original in float64 with the reported scales folded in."""

    report: Report
    weights: dict[str, Tensor]
    scales: dict[str, Tensor]
    original: dict[str, Tensor]
    folded: Any


def load_original(hf_dir) -> Any:
    """The model in float64, its weights as the directory holds them."""
    return AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager").double().eval()


@torch.no_grad()
def outcome_of(hf_dir, out, spec: str, dtype: str) -> Outcome:
    job = make_job(hf_dir, spec, out, IDS, dtype=dtype, batch_size=BATCH)
    report, scales = run_job(job), load_file(job.out / "scales.safetensors")
    model = load_original(hf_dir)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    for absorbing, scales_I in scales.items():
        index, name = absorbing.removeprefix("model.layers.").split(".", 1)
        layer = model.model.layers[int(index)]
        for reader in FOLDS[name]:
            layer.get_submodule(reader).weight.mul_(scales_I)
        for parameter in layer.get_submodule(name).parameters():
            parameter.div_(scales_I if parameter.ndim == 1 else scales_I[:, None])
    return Outcome(report, load_file(job.out / WEIGHTS), scales, original, model)


@pytest.fixture(scope="module")
def olmo2(hf_dir, tmp_path_factory) -> Outcome:
    """3 bits, asymmetric groups of 16, fp32."""
    return outcome_of(hf_dir, tmp_path_factory.mktemp("awq") / "olmo2", "awq-b3-g16", "fp32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Outcome:
    """4 bits, symmetric rows, bf16: a Llama with biases, and as many value as query heads."""
    root = tmp_path_factory.mktemp("awq")
    made = make_model(root / "made", "llama", num_hidden_layers=2, num_key_value_heads=4)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    model.save_pretrained(root / "model")
    return outcome_of(root / "model", root / "llama", "awq-b4-perchannel-sym", "bf16")


def grid_steps(weight_OI, bits, group_size, symmetric):
    """Size of a step and lowest code of every group, min-max grids that hold 0; [O, G, 1]."""
    weight_OGK = weight_OI.reshape(len(weight_OI), -1, group_size)
    low = weight_OGK.amin(-1, keepdim=True).clamp(max=0)
    high = weight_OGK.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        steps = 2 * torch.maximum(high, -low) / (2**bits - 1)
        return steps, torch.full_like(steps, -(2 ** (bits - 1)))
    steps = (high - low) / (2**bits - 1)
    return steps, (low / steps).round()


def rounded(weight_OI, bits, group_size, symmetric):
    """Every weight at the nearest point of its group's grid."""
    steps, lowest = grid_steps(weight_OI, bits, group_size, symmetric)
    codes_OGK = (weight_OI.reshape(len(weight_OI), -1, group_size) / steps).round()
    return (codes_OGK.clamp(lowest, lowest + 2**bits - 1) * steps).reshape(weight_OI.shape)


def share_rounded(held_OI, weight_OI) -> float:
    """Share of weights at the nearest of 8 points, asymmetric groups of 16.

    fp32 against float64: a weight, or a zero point, next to a rounding boundary may go the other
    way.
    """
    expected_OI = rounded(weight_OI, 3, 16, symmetric=False)
    close_OI = (held_OI - expected_OI).abs() <= 1e-5 * weight_OI.abs().max()
    return float(close_OI.double().mean())


def test_weights_are_the_scaled_ones_on_their_grid(olmo2):
    assert olmo2.weights.keys() == {f"{name}.weight" for name in LINEARS}
    for name, held_OI in olmo2.weights.items():
        assert share_rounded(held_OI, olmo2.folded.get_parameter(name).detach()) >= 0.99, name


def test_bf16_weights_norms_and_biases_are_the_scaled_ones(llama):
    exact, linears = llama.folded.state_dict(), {f"{name}.weight" for name in LINEARS}
    scaled = {name for name in exact if not torch.equal(exact[name], llama.original[name])}
    assert llama.scales.keys() == {f"model.layers.{i}.{name}" for i in range(2) for name in FOLDS}
    assert llama.weights.keys() == linears | scaled
    # biases, and a norm
    changed = {name.rsplit(".", 2)[1] for name in scaled - linears}
    assert changed >= {"input_layernorm", "v_proj", "up_proj"}
    for name, weight in llama.weights.items():
        assert weight.dtype == torch.bfloat16
        if name in linears:
            steps, _ = grid_steps(exact[name], 4, exact[name].shape[1], symmetric=True)
            # half a step, and bf16's roundings of weight, step and product, 2^-9 of up to 8 steps
            # each
            limit = (0.5 + 5 * 8 * 2**-9) * steps[:, 0]
            assert ((weight - exact[name]).abs() <= limit).all(), name
        else:
            torch.testing.assert_close(weight.double(), exact[name], rtol=2**-8, atol=0)


@pytest.fixture(scope="module")
def olmo3(tmp_path_factory) -> tuple[Path, Outcome]:
    """A block that attends in windows, then one with full attention and YaRN."""
    root = tmp_path_factory.mktemp("awq")
    kinds = ["sliding_attention", "full_attention"]
    directory = make_model(root / "model", "olmo3", num_hidden_layers=2, layer_types=kinds)
    return directory, outcome_of(directory, root / "out", "awq-b3-g16", "fp32")


def test_scales_are_the_best_of_the_grid_on_every_calibration_token(hf_dir, olmo2):
    check_scales(hf_dir, olmo2)


def test_layers_are_calibrated_with_their_own_masks_and_rotary_embeddings(olmo3):
    check_scales(*olmo3)


def check_scales(hf_dir, olmo2) -> None:
    """s = mean|x|^r / mean(|w| / max of its group)^(1 - r), and s = 1: the least error of
    down_proj's output.
    """
    model = load_original(hf_dir)
    inputs_TI = inputs_of(model, "model.layers.1.mlp.down_proj", IDS)
    weight_OI = model.model.layers[1].mlp.down_proj.weight.detach()
    groups_OGK = weight_OI.abs().reshape(len(weight_OI), -1, 16)
    shares_OGK = groups_OGK / (groups_OGK.amax(-1, keepdim=True) + 1e-6)
    size_I, mean_I = shares_OGK.reshape(weight_OI.shape).mean(0), inputs_TI.abs().mean(0)
    candidates = [torch.ones_like(mean_I)]
    candidates += [mean_I ** (k / 18) / (size_I ** (1 - k / 18) + 1e-4) for k in range(19)]
    errors = []
    for scales_I in candidates:
        difference_OI = rounded(weight_OI * scales_I, 3, 16, symmetric=False) / scales_I - weight_OI
        errors.append(float((inputs_TI @ difference_OI.T).square().mean()))
    found_I = olmo2.scales["model.layers.1.mlp.up_proj"].double()
    ratio_I = found_I / candidates[errors.index(min(errors))]
    # the library normalises by a common factor
    even_I = torch.ones_like(ratio_I)
    torch.testing.assert_close(ratio_I / ratio_I.mean(), even_I, rtol=1e-3, atol=0)
    assert min(errors) < 0.99 * errors[0]


def test_the_report_says_what_was_scaled(olmo2):
    scaled = ("self_attn.v_proj", "mlp.up_proj")
    folds = [f"{name} -> {reader}" for name in scaled for reader in FOLDS[name]]
    assert olmo2.report.settings["folds"] == folds
    norms = [FOLDS[name] for name in FOLDS if name not in scaled]
    assert olmo2.report.settings["unscaled"].keys() == {name for names in norms for name in names}


@pytest.mark.stress
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_rounded_after_the_folds_it_reports(tmp_path, name, heads):
    directory = make_model(tmp_path / "model", name, num_key_value_heads=heads)
    job = make_job(directory, "awq-b3-g16", tmp_path / "out", random_ids(20, 64))
    report, scales = run_job(job), load_file(job.out / "scales.safetensors")
    model, weights = load_original(directory), load_file(job.out / WEIGHTS)
    mappings = mappings_for(model)
    assert report.settings["folds"] == [str(fold) for fold in mappings.folds]
    for index, block in enumerate(model.get_submodule(mappings.blocks).children()):
        for fold in mappings.folds:
            scales_I = scales.pop(f"{mappings.blocks}.{index}.{fold.smooth}")
            apply_fold(block, fold, scales_I.double())
    assert not scales
    for linears in linears_by_input(directory):
        for linear in linears:
            weight_OI = model.get_parameter(f"{linear}.weight").detach()
            assert share_rounded(weights[f"{linear}.weight"], weight_OI) > 0.99, linear
