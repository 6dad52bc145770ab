"""A tiny model in true float64 with its dense Hessian, and a family of checkpoints: base,
previous and quantized.

Shapes: P parameters.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.olmo2 import modeling_olmo2

from curvature.slices.plane import SequenceLosses
from tests.conftest import make_hf_directory
from tests.curvature.conftest import (
    Dense,
    _DoubleForFloat,
    dense_hessian,
    quantize,
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


class Family(NamedTuple):
    """HF directories of theta_K and theta_K-1, and the result of quantizing theta_K."""

    base: Path
    previous: Path
    quantized: Path


def make_family(base: Path, train_prefix: Path, held_out_prefix: Path) -> Family:
    """A checkpoint before an HF directory, and its quantization, both beside it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    previous = base.parent / f"before-{base.name}"
    model.save_pretrained(previous)
    return Family(base, previous, quantize(base, train_prefix, held_out_prefix))


@pytest.fixture(scope="session")
def family(tmp_path_factory, train_prefix, held_out_prefix) -> Family:
    root = tmp_path_factory.mktemp("family")
    return make_family(make_hf_directory(root / "model"), train_prefix, held_out_prefix)
