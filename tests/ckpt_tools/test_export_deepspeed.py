"""Exports of DeepSpeed checkpoints, of every family: `model.safetensors` against transformers'
own models.

The checkpoints are made here from models that transformers built, so that only the export itself is
looked at.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Olmo2Config

from base.errors import UserError
from ckpt_tools.export import export
from ckpt_tools.hf.model import load_hf_model
from tests.ckpt_tools.checkpoints import seal, write_record
from tests.probes import largest_error, plain_probe
from tests.runs import error_line, make_run, python
from train.model.config import ModelConfig

SHAPE: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4}
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
        {"num_key_value_heads": 4, "rope_theta": 10_000.0}
        | {"rotary_fraction": 0.25, "norm_eps": 1e-5},
        GPTNeoXConfig(
            **SHAPE,
            layer_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
        ),
    ),
}


def make_checkpoint(directory, inputs, family):
    """A run directory with one checkpoint of a random model, no weight as initialised."""
    ours, config = FAMILIES[family]
    model_config = ModelConfig(family=family, **SHAPE, **ours)
    run = make_run(directory, **inputs, engine="deepspeed", model=model_config)
    torch.manual_seed(3)
    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    input_ids = torch.randint(320, (2, 24))
    checkpoint = directory / "checkpoints" / "step00000020"
    checkpoint.mkdir(parents=True)
    model.save_pretrained(directory / "saved")
    (directory / "saved" / "model.safetensors").rename(checkpoint / "model.safetensors")
    save_file(
        {"input_ids": input_ids, **plain_probe(model, input_ids)}, checkpoint / "probe.safetensors"
    )
    (checkpoint / "optimizer-00000-of-00002.safetensors").write_bytes(b"what no export may open")
    write_record(checkpoint, run, step=20)
    return checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exported_bit_for_bit(tmp_path, inputs, family):
    checkpoint = make_checkpoint(tmp_path / family, inputs, family)
    out = tmp_path / "hf"
    parity = export(checkpoint, out)
    assert parity["max_absolute_error"] <= 1e-5 < 0.1 < parity["max_logit"]
    stored, exported = (load_file(path / "model.safetensors") for path in (checkpoint, out))
    assert stored.keys() == exported.keys()
    assert all(torch.equal(stored[name], exported[name]) for name in stored)
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    probe = load_file(checkpoint / "probe.safetensors")
    assert largest_error(plain_probe(model, probe.pop("input_ids")), probe) <= 1e-5
    lineage = json.loads((out / "lineage.json").read_text())
    assert (lineage["engine"], lineage["step"], lineage["average"]) == ("deepspeed", 20, None)
    assert type(load_hf_model(out, torch.float32)) is type(model)


KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weights: weights.pop(KEY), f"missing ['{KEY}']"),
        (lambda weights: weights.update(extra=torch.ones(3)), "unknown ['extra']"),
        (lambda weights: weights.update({KEY: torch.ones(4, 7)}), "is (4, 7), the model needs"),
        (lambda weights: weights.update({KEY: weights[KEY].bfloat16()}), "is torch.bfloat16"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_wrong_keys_are_refused(tmp_path, inputs, change, expected):
    checkpoint = make_checkpoint(tmp_path / "run", inputs, "llama")
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, checkpoint / "model.safetensors")
    seal(checkpoint)
    with pytest.raises(UserError) as caught:
        export(checkpoint, tmp_path / "hf" / "one")
    assert expected in str(caught.value)
    assert not (tmp_path / "hf").exists() or not list((tmp_path / "hf").iterdir())


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        ("gpt_neox.embed_in", ["weight"]),
        ("gpt_neox.layers.1.attention.query_key_value", ["weight", "bias"]),
        ("gpt_neox.layers.1.post_attention_layernorm", ["weight", "bias"]),
        ("gpt_neox.layers.1.mlp.dense_4h_to_h", ["weight", "bias"]),
        ("embed_out", ["weight"]),
    ],
)
def test_gpt_neox_parameters_are_named_as_in_the_files(tmp_path, inputs, module, parts):
    """Attention and MLP see the same residual stream, so that one's fault is not the other's."""
    checkpoint = make_checkpoint(tmp_path / "run", inputs, "gpt_neox")
    weights = load_file(checkpoint / "model.safetensors")
    weights[f"{module}.weight"] = weights[f"{module}.weight"].roll(1, 0)
    save_file(weights, checkpoint / "model.safetensors")
    seal(checkpoint)
    with pytest.raises(UserError) as caught:
        export(checkpoint, tmp_path / "hf")
    named = ", ".join(f"{module}.{part}" for part in parts)
    assert f"not what was trained: {named};" in str(caught.value)


def test_the_command_refuses_a_checkpoint_without_weights(tmp_path, inputs):
    checkpoint = make_checkpoint(tmp_path / "run", inputs, "gpt_neox")
    (checkpoint / "model.safetensors").unlink()
    seal(checkpoint)
    done = python("ckpt_tools", "export", str(checkpoint), "--into", str(tmp_path / "hf"))
    assert "holds no safetensors weights" in error_line(done)
