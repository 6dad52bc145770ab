"""Megatron's tensors by HF name: the way back from `train.model.megatron_names.from_hf`."""

import torch
from torch import Tensor

from train.model.config import ModelConfig
from train.model.megatron_names import hf_rows


def to_hf(name: str, whole: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """Return the HF tensors of the whole megatron tensor `name`."""
    return {
        hf_name: torch.cat([whole[start:stop] for start, stop in rows])
        for hf_name, rows in hf_rows(name, model).items()
    }
