"""Exports of DeepSpeed checkpoints, of every family: `model.safetensors` against transformers' own models.

The checkpoints are made here from models that transformers built, so that only the export itself is looked at.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Olmo2Config

from ckpt_tools.export import export
from ckpt_tools.hf_model import load_hf_model
from tests.ckpt_tools.checkpoints import seal, write_record
from tests.runs import error_line, make_run, python
from train.command import UserError
from train.settings import ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# family -> settings of ours beside SHAPE, and the same model in transformers' words
FAMILIES: dict[str, tuple[dict[str, Any], Any]] = {
    "olmo2": (
        {"num_key_value_heads": 2, "rope_theta": 10_000.0},
        Olmo2Config(**SHAPE, num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters=ROPE),
    ),
    "llama": (
        {"num_key_value_heads": 2, "rope_theta": 10_000.0, "norm_eps": 1e-5},
        LlamaConfig(**SHAPE, num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters=ROPE),
    ),
    "gpt_neox": (
        {"num_key_value_heads": 4, "rope_theta": 10_000.0, "rotary_fraction": 0.25, "norm_eps": 1e-5},
        GPTNeoXConfig(
            **SHAPE,
            layer_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
        ),
    ),
}


def make_checkpoint(directory, inputs, family, dtype=torch.float32):
    """A run directory with one checkpoint of a random model; no weight is what it is initialised to."""
    ours, config = FAMILIES[family]
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    model_config = ModelConfig(family=family, **SHAPE, **ours)
    run = make_run(directory, **inputs, engine="deepspeed", model=model_config, precision=precision)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        input_ids = torch.randint(320, (2, 24))
        logits = model(input_ids).logits.float()
    checkpoint = directory / "checkpoints" / "step00000020"
    checkpoint.mkdir(parents=True)
    model.save_pretrained(directory / "saved")
    (directory / "saved" / "model.safetensors").rename(checkpoint / "model.safetensors")
    save_file({"input_ids": input_ids, "logits": logits}, checkpoint / "probe.safetensors")
    (checkpoint / "optimizer-00000-of-00002.safetensors").write_bytes(b"what no export may open")
    write_record(checkpoint, run, step=20)
    return checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exported_bit_for_bit(tmp_path, inputs, family):
    checkpoint = make_checkpoint(tmp_path / family, inputs, family)
    out = tmp_path / "hf"
    parity = export(checkpoint, out)
    assert parity["max_absolute_error"] <= 1e-5 < 0.1 < parity["max_logit"]
    stored, exported = load_file(checkpoint / "model.safetensors"), load_file(out / "model.safetensors")
    assert stored.keys() == exported.keys()
    assert all(torch.equal(stored[name], exported[name]) for name in stored)
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    probe = load_file(checkpoint / "probe.safetensors")
    with torch.no_grad():
        assert (model(probe["input_ids"]).logits - probe["logits"]).abs().max() <= 1e-5
    lineage = json.loads((out / "lineage.json").read_text())
    assert (lineage["engine"], lineage["step"], lineage["average"]) == ("deepspeed", 20, None)
    if family != "olmo2":
        with pytest.raises(UserError, match=r"give one of Olmo2ForCausalLM"):
            load_hf_model(out, torch.float32)


def test_bf16_weights_are_exported_as_trained(tmp_path, inputs):
    checkpoint = make_checkpoint(tmp_path / "run", inputs, "olmo2", torch.bfloat16)
    export(checkpoint, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


QUERY, VALUE = (f"model.layers.0.self_attn.{part}_proj.weight" for part in ("k", "v"))


def swap(weights):
    weights[QUERY], weights[VALUE] = weights[VALUE], weights[QUERY]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weights: weights.pop(QUERY), f"missing key '{QUERY}'"),
        (lambda weights: weights.update(extra=torch.ones(3)), "unknown key 'extra'"),
        (lambda weights: weights.update({QUERY: torch.ones(4, 7)}), "is F32 (4, 7) in model.safetensors"),
        (lambda weights: weights.update({QUERY: weights[QUERY].bfloat16()}), "is BF16 (16, 32)"),
        (swap, "HF logits differ"),
        (lambda weights: weights["model.norm.weight"].mul_(1.001), "HF logits differ"),
    ],
    ids=["missing", "extra", "shape", "dtype", "swapped", "value"],
)
def test_wrong_keys_and_wrong_weights_are_refused(tmp_path, inputs, change, expected):
    checkpoint = make_checkpoint(tmp_path / "run", inputs, "llama")
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, checkpoint / "model.safetensors")
    seal(checkpoint)
    with pytest.raises(UserError) as caught:
        export(checkpoint, tmp_path / "hf" / "one")
    assert expected in str(caught.value)
    assert list((tmp_path / "hf").iterdir()) == [] if (tmp_path / "hf").exists() else True


def test_the_command_refuses_a_checkpoint_without_weights(tmp_path, inputs):
    checkpoint = make_checkpoint(tmp_path / "run", inputs, "gpt_neox")
    (checkpoint / "model.safetensors").unlink()
    seal(checkpoint)
    done = python("ckpt_tools", "export", str(checkpoint), "--into", str(tmp_path / "hf"))
    assert "model.safetensors does not exist" in error_line(done)
