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

from base.cli import run_command
from curvature.slices.plane import SequenceLosses
from quant_eval.__main__ import app
from tests.conftest import make_hf_directory
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
    """In float64 throughout: HF's float32 inside norms and softmax would hide what second
    differences show.
    """
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
    previous, quantized = base.parent / f"before-{base.name}", base / "quant" / "rtn-b3-g16"
    model.save_pretrained(previous)
    arguments = [
        "quant_eval",
        "run",
        base,
        "--spec",
        "rtn-b3-g16",
        "--dense",
        "--eval-tokens",
        "5000",
    ]
    arguments += [
        "--calibration",
        train_prefix,
        "--eval",
        held_out_prefix,
        "--calibration-sequences",
        "8",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", list(map(str, arguments)))
        with pytest.raises(SystemExit) as ended:
            run_command(app, "quant_eval")
    assert not ended.value.code
    return Family(base, previous, quantized)


@pytest.fixture(scope="session")
def family(tmp_path_factory, train_prefix, held_out_prefix) -> Family:
    root = tmp_path_factory.mktemp("family")
    return make_family(make_hf_directory(root / "model"), train_prefix, held_out_prefix)
