"""A tiny model in true float64 with its dense Hessian.

Shapes: P parameters.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.olmo2 import modeling_olmo2

from curvature.slices.plane import SequenceLosses
from tests.curvature.conftest import (
    Dense,
    _DoubleForFloat,
    dense_hessian,
    random_tokens,
    tiny_model,
)


class Curved(NamedTuple):
    """Losses of a model, and gradient and Hessian of their mean by double backward."""

    losses: SequenceLosses
    dense: Dense
    tokens_BS1: Tensor

    def flat(self, direction: dict[str, Tensor]) -> Tensor:
        """A direction in the order of the dense Hessian, absent tensors as zeros."""
        weights = self.losses.weights
        return torch.cat(
            [
                direction.get(name, torch.zeros_like(w)).detach().flatten()
                for name, w in weights.items()
            ]
        )


@pytest.fixture(scope="session")
def dense() -> Dense:
    return dense_hessian(tiny_model(), random_tokens(4))


@pytest.fixture
def curved(monkeypatch, dense) -> Curved:
    """In float64 throughout: HF's float32 inside norms and softmax hides second differences."""
    monkeypatch.setattr(modeling_olmo2, "torch", _DoubleForFloat())
    tokens = random_tokens(4)
    return Curved(SequenceLosses(tiny_model(), tokens, batch_size=3), dense, tokens)
