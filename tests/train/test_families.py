"""The families' shapes and configurations against transformers' own models."""

import math
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.runs import PROJECT, execute
from train.model.config import ModelConfig, hf_settings, parameter_shapes

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "olmo2": ModelConfig(**SMALL),
    "olmo2-gqa": ModelConfig(**SMALL | {"num_key_value_heads": 2}),
    "llama": ModelConfig(**SMALL, family="llama"),
    "llama-gqa": ModelConfig(**SMALL | {"num_key_value_heads": 2}, family="llama"),
    "gpt_neox": ModelConfig(**SMALL, family="gpt_neox", rotary_fraction=0.25, norm_eps=1e-5),
}


def model_of(model: ModelConfig):
    config = AutoConfig.for_model(
        model.family, **hf_settings(model, sequence_length=16, eos_token_id=0)
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_a_saved_model(tmp_path, name):
    """In files: in memory transformers calls gpt_neox's output matrix otherwise."""
    model_of(FAMILIES[name]).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert parameter_shapes(FAMILIES[name]) == {
        name: tuple(weight.shape) for name, weight in saved.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_finite_and_causal(name):
    """Another last token changes the last logits and no others."""
    torch.manual_seed(0)
    model = model_of(FAMILIES[name]).eval()
    inputs = torch.randint(64, (2, 16))
    changed = inputs.clone()
    changed[:, -1] = (inputs[:, -1] + 1) % 64
    with torch.no_grad():
        logits, others = model(inputs).logits, model(changed).logits
    assert logits.shape == (2, 16, 64)
    assert logits.isfinite().all()
    assert torch.equal(logits[:, :-1], others[:, :-1])
    assert not torch.equal(logits[:, -1], others[:, -1])


def test_a_quarter_of_a_gpt_neox_head_rotates():
    """Positions enter through the rotation alone: of 8 dimensions of a head the first two turn."""
    model = model_of(FAMILIES["gpt_neox"]).eval()
    positions = torch.arange(16)[None]
    cosine, sine = model.gpt_neox.rotary_emb(torch.zeros(1, 16, 32), positions)
    assert cosine.shape[-1] == 2  # a quarter of a head of 32 / 4
    torch.testing.assert_close(cosine[0, :, 0], torch.tensor([math.cos(t) for t in range(16)]))
    torch.testing.assert_close(sine[0, :, 0], torch.tensor([math.sin(t) for t in range(16)]))


def test_the_table_is_read_without_torch_and_transformers():
    """Help and refusals read it, which should not wait seconds."""
    code = "import sys, train.model.families; print({'torch', 'transformers'} & sys.modules.keys())"
    done = execute([sys.executable, "-c", code], cwd=PROJECT)
    assert done.stdout == "set()\n", done.stderr
