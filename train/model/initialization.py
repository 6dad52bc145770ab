"""Initial weights, drawn parameter by parameter: the same for every engine and layout."""

import hashlib

import torch
from torch import Tensor

from train.model.config import ModelConfig
from train.model.families import parameter_shapes


def initial_parameter(name: str, model: ModelConfig, seed: int) -> Tensor:
    """Return the initial fp32 value of a parameter, a function of seed and HF name.

    Norm weights are 1 and biases 0. Every matrix, the embedding and lm_head included, is normal
    with std `initializer_range` without scaling by depth; for OLMo2 truncated at three standard
    deviations (allenai/OLMo, olmo/initialization.py, init_cutoff_factor 3).
    """
    shape = parameter_shapes(model)[name]
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    std, weight = model.initializer_range, torch.empty(shape)
    if model.initializer == "normal":
        return weight.normal_(std=std, generator=generator)
    return torch.nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)
