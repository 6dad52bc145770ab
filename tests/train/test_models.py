"""Parameter counts and FLOPs of the released models against published ones and transformers'."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from train.model import presets
from train.model.config import hf_settings, parameter_shapes
from train.planning.flops import flops_per_token, peak_flops


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
    config = AutoConfig.for_model(model.family, **hf_settings(model, 4096, 0))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == published


def test_flops_per_token():
    """OLMo2-7B: 6 x (7,298,617,344 - 100,352 x 4,096) + 12 x 32 x 4,096 x 4,096 = 47.8 GFLOP."""
    assert flops_per_token(presets.OLMO2_7B, 4096) == 41_325_453_312 + 6_442_450_944


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
