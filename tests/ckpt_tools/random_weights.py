"""Weights of any model's shapes, for files as large as those of training."""

import torch

from ckpt_tools.formats.weights import Described
from train.model.config import ModelConfig, parameter_shapes


class RandomWeights:
    """Weights of the size that training would leave, some rows at a time."""

    def __init__(self, model: ModelConfig) -> None:
        self.tensors = {
            name: Described(shape, torch.float32) for name, shape in parameter_shapes(model).items()
        }

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = (stop - start, *self.tensors[name].shape[1:])
        generator = torch.Generator().manual_seed(hash((name, start)) % 2**31)
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.empty(shape).uniform_(-0.03, 0.03, generator=generator)
