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
PYTHIA: dict[str, Any] = {
    "family": "gpt_neox",
    "vocab_size": 50304,
    "rotary_fraction": 0.25,
    "rope_theta": 10_000.0,
    "norm_eps": 1e-5,
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


def sizes(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int | None = None
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
    }


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        (PYTHIA | sizes(6, 512, 2048, 8), 70_426_624),
        (PYTHIA | sizes(12, 768, 3072, 12), 162_322_944),
        ({"vocab_size": 100_352} | sizes(16, 2048, 8192, 16), 1_484_916_736),
        ({"vocab_size": 100_352} | sizes(32, 4096, 11_008, 32), 7_298_617_344),
        ({"vocab_size": 100_352} | sizes(40, 5120, 13_824, 40), 13_716_198_400),
        ({"vocab_size": 100_352} | sizes(64, 5120, 27_648, 40, 8), 32_234_279_936),
    ],
    ids=["Pythia-70M", "Pythia-160M", "OLMo2-1B", "OLMo2-7B", "OLMo2-13B", "OLMo2-32B"],
)
def test_released_models_have_their_published_sizes(settings, parameters):
    assert (
        sum(math.prod(shape) for shape in parameter_shapes(ModelConfig(**settings)).values())
        == parameters
    )


def test_the_table_is_read_without_torch_and_transformers():
    """Help and refusals read it, which should not wait seconds."""
    code = "import sys, train.model.families; print({'torch', 'transformers'} & sys.modules.keys())"
    done = execute([sys.executable, "-c", code], cwd=PROJECT)
    assert done.stdout == "set()\n", done.stderr
