"""OLMo2's initialisation, every parameter drawn for itself: the same for every engine, layout and world size."""

import hashlib

import torch
from torch import Tensor

from train import layout
from train.config import ModelConfig


def parameter_shape(name: str, model: ModelConfig) -> tuple[int, ...]:
    """Shape of an HF OLMo2 parameter by its name. KeyError for a name that OLMo2 does not have."""
    hidden, query, key_value = (
        model.hidden_size,
        model.num_attention_heads * model.head_dim,
        model.num_key_value_heads * model.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (model.vocab_size, hidden),
        "lm_head": (model.vocab_size, hidden),
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (model.intermediate_size, hidden),
        "up_proj": (model.intermediate_size, hidden),
        "down_proj": (hidden, model.intermediate_size),
        "q_norm": (query,),
        "k_norm": (key_value,),
        "post_attention_layernorm": (hidden,),
        "post_feedforward_layernorm": (hidden,),
        "norm": (hidden,),
    }
    return shapes[name.removesuffix(".weight").rsplit(".", 1)[-1]]


def megatron_shape(name: str, model: ModelConfig) -> tuple[int, ...]:
    """Shape of a whole megatron tensor by its global name: its HF parts, stacked along their rows."""
    shapes = [parameter_shape(hf_name, model) for hf_name in layout.hf_names(name)]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def initial_parameter(name: str, model: ModelConfig, seed: int) -> Tensor:
    """The initial fp32 value of an HF OLMo2 parameter: a function of seed and name.

    Norm weights are 1; every matrix, the embedding and lm_head included, is normal with std 0.02, truncated at three
    standard deviations, without scaling by depth (allenai/OLMo, olmo/initialization.py, init_cutoff_factor 3).
    """
    shape = parameter_shape(name, model)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    std = model.initializer_range
    weight = torch.empty(shape)
    return torch.nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)
