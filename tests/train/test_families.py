"""Shapes, configurations, counts and FLOPs of models against transformers' and published ones."""

import math
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import widths
from tests.runs import PROJECT, execute
from train.model import presets
from train.model.config import ModelConfig, hf_settings, parameter_shapes
from train.planning.flops import flops_per_token, peak_flops

SMALL = widths(32, 48, 4, 4, vocab_size=64, num_hidden_layers=2)
GROUPED = widths(32, 48, 4, 2, vocab_size=64, num_hidden_layers=2)
FAMILIES = {
    "olmo2": ModelConfig(**SMALL),
    "olmo2-gqa": ModelConfig(**GROUPED),
    "llama": ModelConfig(**SMALL, family="llama"),
    "llama-gqa": ModelConfig(**GROUPED, family="llama"),
    "llama-tied": ModelConfig(**GROUPED, family="llama", tie_word_embeddings=True),
    "qwen2": ModelConfig(**GROUPED, family="qwen2"),
    "qwen3": ModelConfig(**GROUPED, family="qwen3", head_dim=12, tie_word_embeddings=True),
    "smollm3": ModelConfig(**GROUPED, family="smollm3", tie_word_embeddings=True),
    "olmo": ModelConfig(**SMALL, family="olmo", norm_eps=1e-5, tie_word_embeddings=True),
    "gpt_neox": ModelConfig(**SMALL, family="gpt_neox", rotary_fraction=0.25, norm_eps=1e-5),
}


def model_of(model: ModelConfig, length: int = 16) -> Any:
    config = AutoConfig.for_model(model.family, **hf_settings(model, length, eos_token_id=0))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_a_saved_model(tmp_path, name):
    """In files: in memory transformers calls gpt_neox's output matrix otherwise."""
    model_of(FAMILIES[name]).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert parameter_shapes(FAMILIES[name]) == {
        name: tuple(weight.shape) for name, weight in saved.items()
    }


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


@pytest.mark.parametrize(
    ("model", "published"),
    [
        # OLMo-core counts one of the two embedding matrices, hence the name.
        (presets.OLMO2_190M, 190_354_176 + 768 * 100_352),
        (presets.OLMO2_1B, 1_484_916_736),
        (presets.OLMO2_7B, 7_298_617_344),
        (presets.OLMO2_13B, 13_716_198_400),
        (presets.OLMO2_32B, 32_234_279_936),
        (presets.PYTHIA_70M, 70_426_624),
        (presets.PYTHIA_160M, 162_322_944),
    ],
)
def test_totals_are_the_published_ones_and_transformers(model, published):
    assert sum(math.prod(shape) for shape in parameter_shapes(model).values()) == published
    with torch.device("meta"):
        built = model_of(model, 4096)
    assert sum(parameter.numel() for parameter in built.parameters()) == published


def test_flops_per_token():
    """OLMo2-7B: 6 x (7,298,617,344 - 100,352 x 4,096) + 12 x 32 x 4,096 x 4,096 = 47.8 GFLOP."""
    assert flops_per_token(presets.OLMO2_7B, 4096) == 41_325_453_312 + 6_442_450_944
    # A head is multiplied with, whether it is the embedding as well or not.
    tied = presets.OLMO2_7B.model_copy(update={"tie_word_embeddings": True})
    assert flops_per_token(tied, 4096) == flops_per_token(presets.OLMO2_7B, 4096)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 PCIe", None),  # 756
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peaks_of_devices(name, teraflops):
    assert peak_flops(name) == (teraflops * 1e12 if teraflops else None)
