"""AWQ by llmcompressor, in the process that `run_job` starts, against float64 arithmetic on the
original model.

Shapes: O output features, I input features, T calibration tokens, G groups of a row, K weights of a
    group.
"""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quant_eval.libraries.job import WEIGHTS, Job, run_job
from quant_eval.specs import parse_spec

SEQUENCES, LENGTH, BATCH = 10, 32, 4  # the last batch is not full
BLOCK_LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
BLOCK_LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def calibration_tokens():
    return torch.randint(320, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(3))


def make_job(hf_dir, out, spec, dtype):
    out.mkdir(parents=True)
    save_file({"input_ids": calibration_tokens()}, out / "calibration.safetensors")
    values = {
        "hf_dir": hf_dir,
        "spec": parse_spec(spec),
        "calibration": out / "calibration.safetensors",
    }
    return Job(**values, dtype=dtype, device="cpu", batch_size=BATCH, threads=1, out=out)


def load_original(hf_dir):
    """The model in float64, its weights as the directory holds them."""
    return AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager").double().eval()


@pytest.fixture(scope="module")
def olmo2(hf_dir, tmp_path_factory):
    """3 bits, asymmetric groups of 16, fp32: report, weights, scales."""
    job = make_job(hf_dir, tmp_path_factory.mktemp("awq") / "olmo2", "awq-b3-g16", "fp32")
    return run_job(job), load_file(job.out / WEIGHTS), load_file(job.out / "scales.safetensors")


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    """A Llama in bf16 with biases, norms that are not identities, and as many value as query
    heads.
    """
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**shape, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    directory = tmp_path_factory.mktemp("llama") / "model"
    model.bfloat16().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(llama_dir, tmp_path_factory):
    """4 bits, symmetric rows, bf16: report, weights, scales."""
    job = make_job(
        llama_dir, tmp_path_factory.mktemp("awq") / "llama", "awq-b4-perchannel-sym", "bf16"
    )
    return run_job(job), load_file(job.out / WEIGHTS), load_file(job.out / "scales.safetensors")


def fold_values_and_gates(model, scales):
    """The two exact folds of OLMo2, written out."""
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            prefix = f"model.layers.{index}."
            for smooth, balanced, name in (
                (layer.self_attn.v_proj, layer.self_attn.o_proj, "self_attn.v_proj"),
                (layer.mlp.up_proj, layer.mlp.down_proj, "mlp.up_proj"),
            ):
                scales_I = scales[prefix + name].double()
                balanced.weight *= scales_I
                smooth.weight /= scales_I[:, None]
                if smooth.bias is not None:
                    smooth.bias /= scales_I


def fold_norms(model, scales):
    """The two folds that Llama has besides."""
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers, name in (
                (
                    layer.input_layernorm,
                    [attention.q_proj, attention.k_proj, attention.v_proj],
                    "input_layernorm",
                ),
                (
                    layer.post_attention_layernorm,
                    [mlp.gate_proj, mlp.up_proj],
                    "post_attention_layernorm",
                ),
            ):
                scales_I = scales[f"model.layers.{index}.{name}"].double()
                norm.weight /= scales_I
                for reader in readers:
                    reader.weight *= scales_I


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=calibration_tokens()[:2]).logits


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


def test_folding_alone_leaves_the_logits(hf_dir, olmo2):
    model = load_original(hf_dir)
    expected = logits_of(model)
    fold_values_and_gates(model, olmo2[2])
    assert any((scales_I / scales_I.mean() - 1).abs().max() > 0.1 for scales_I in olmo2[2].values())
    torch.testing.assert_close(
        logits_of(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


def test_folding_alone_leaves_the_logits_of_llama(llama_dir, llama):
    model = load_original(llama_dir)
    expected = logits_of(model)
    fold_norms(model, llama[2])
    fold_values_and_gates(model, llama[2])
    assert any((scales_I / scales_I.mean() - 1).abs().max() > 0.1 for scales_I in llama[2].values())
    torch.testing.assert_close(
        logits_of(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


def test_weights_are_the_scaled_ones_on_their_grid(hf_dir, olmo2):
    model = load_original(hf_dir)
    fold_values_and_gates(model, olmo2[2])
    names = [f"model.layers.{i}.{name}.weight" for i in range(2) for name in BLOCK_LINEARS]
    assert sorted(olmo2[1]) == sorted(names)
    for name in names:
        weight_OI = model.get_parameter(name).detach()
        expected_OI = rounded(weight_OI, 3, 16, symmetric=False)
        # fp32 against float64: a weight, or a zero point, next to a rounding boundary may go the
        # other way
        close_OI = (olmo2[1][name] - expected_OI).abs() <= 1e-5 * weight_OI.abs().max()
        assert close_OI.double().mean() >= 0.99, name
        for group_OK in olmo2[1][name].reshape(-1, 16)[:8]:
            assert len(group_OK.unique()) <= 8


def test_bf16_weights_norms_and_biases_are_the_scaled_ones(llama_dir, llama):
    model = load_original(llama_dir)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    fold_norms(model, llama[2])
    fold_values_and_gates(model, llama[2])
    linears = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in BLOCK_LINEARS}
    scaled = {
        name for name, value in model.state_dict().items() if not torch.equal(value, original[name])
    }
    assert set(llama[1]) == linears | scaled
    assert {name.rsplit(".", 2)[1] for name in scaled - linears} >= {
        "post_attention_layernorm",
        "v_proj",
        "up_proj",
    }
    for name, weight in llama[1].items():
        assert weight.dtype == torch.bfloat16
        exact = model.state_dict()[name]
        if name in linears:
            steps, _ = grid_steps(exact, 4, exact.shape[1], symmetric=True)
            # half a step, and bf16's roundings of weight, step and product, 2^-9 of up to 8 steps
            # each
            assert ((weight - exact).abs() <= (0.5 + 5 * 8 * 2**-9) * steps[:, 0]).all(), name
        else:
            torch.testing.assert_close(weight.double(), exact, rtol=2**-8, atol=0)


def test_scales_are_the_best_of_the_grid_on_every_calibration_token(hf_dir, olmo2):
    """s = mean|x|^r / mean(|w| / max of its group)^(1 - r), and s = 1: the least error of
    down_proj's output.
    """
    model = load_original(hf_dir)
    seen: list[torch.Tensor] = []
    linear: nn.Linear = model.model.layers[1].mlp.down_proj
    linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        model(input_ids=calibration_tokens())
    inputs_TI = seen[0].reshape(SEQUENCES * LENGTH, -1)
    weight_OI = linear.weight.detach()
    groups_OGK = weight_OI.abs().reshape(len(weight_OI), -1, 16)
    size_I = (
        (groups_OGK / (groups_OGK.amax(-1, keepdim=True) + 1e-6)).reshape(weight_OI.shape).mean(0)
    )
    mean_I = inputs_TI.abs().mean(0)
    candidates = [torch.ones_like(mean_I)]
    candidates += [mean_I ** (k / 18) / (size_I ** (1 - k / 18) + 1e-4) for k in range(19)]
    errors = []
    for scales_I in candidates:
        difference_OI = rounded(weight_OI * scales_I, 3, 16, symmetric=False) / scales_I - weight_OI
        errors.append(float((inputs_TI @ difference_OI.T).square().mean()))
    best = errors.index(min(errors))
    found_I = olmo2[2]["model.layers.1.mlp.up_proj"].double()
    ratio_I = found_I / candidates[best]  # the library normalises by a common factor
    torch.testing.assert_close(
        ratio_I / ratio_I.mean(), torch.ones_like(ratio_I), rtol=1e-3, atol=0
    )
    assert min(errors) < 0.99 * errors[0]


def test_the_report_says_what_was_scaled(olmo2):
    report = olmo2[0]
    assert report.settings["folds"] == [
        "self_attn.v_proj -> self_attn.o_proj",
        "mlp.up_proj -> mlp.down_proj",
    ]
    assert set(report.settings["unscaled"]) == set(BLOCK_LINEARS) - {
        "self_attn.o_proj",
        "mlp.down_proj",
    }
