"""A dense float64 Hessian from HF's own code, against which everything is held.

Shapes: B sequences, S positions of a sequence, P parameters.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from base.ranks import ALONE
from ckpt_tools.hf.configuration import configuration
from curvature.__main__ import app
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel
from curvature.products.parameters import Parameters, dot
from quant_eval.__main__ import app as quant_eval
from tests.conftest import make_hf_directory, widths
from tests.runs import called

TINY: dict[str, Any] = {
    "vocab_size": 24,
    **widths(8, 12, 2, 2, num_hidden_layers=2, max_position_embeddings=16),
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": 0},
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def tiny_model(
    dtype: torch.dtype = torch.float64, *, std: float = 0.5, model_type: str = "olmo2", **config
) -> Any:
    """A random model of about 1,500 parameters, norm weights drawn too."""
    torch.manual_seed(1)
    settings = configuration(model_type, **(TINY | config))
    model = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=std)
    model.double() if dtype == torch.float64 else model.float()
    model.eval()
    return model


def command(*arguments: object) -> int:
    """The exit code of `python -m curvature`."""
    return called(app, "curvature", *arguments)


QUANTIZING = "--spec rtn-b3-g16 --dense --eval-tokens 5000 --calibration-sequences 2"


class Family(NamedTuple):
    """HF directories of theta_K and theta_K-1, and the result of quantizing theta_K, with its
    dequantized weights.
    """

    base: Path
    previous: Path
    quantized: Path


def make_family(base: Path, train_prefix: Path, held_out_prefix: Path) -> Family:
    """A checkpoint before an HF directory, beside it, and its quantization in it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    previous = base.parent / f"before-{base.name}"
    model.save_pretrained(previous)
    texts = ["--calibration", train_prefix, "--eval", held_out_prefix]
    assert called(quant_eval, "quant_eval", "run", base, *texts, *QUANTIZING.split()) == 0
    return Family(base, previous, base / "quant" / "rtn-b3-g16")


@pytest.fixture(scope="session")
def family(tmp_path_factory, train_prefix, held_out_prefix) -> Family:
    root = tmp_path_factory.mktemp("family")
    return make_family(make_hf_directory(root / "model"), train_prefix, held_out_prefix)


def dual_hessian(model: PreTrainedModel, **options) -> DualHessian:
    """Products of a model, which is taken over."""
    return DualHessian(CurvedModel(model, ranks=ALONE, **options))


def gaussian(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random vector v_P."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def dots_of(parameters: Parameters, a_p: Tensor, b_p: Tensor) -> dict[str, float]:
    """a_t . b_t of every tensor t over all ranks, by name; their sum is a . b."""
    a, b = parameters.split(a_p), parameters.split(b_p)
    return parameters.total([dot(a[name], b[name]) for name in a])


def random_tokens(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    """Sequences of `length` inputs and labels, int64 [batch, length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, int(TINY["vocab_size"]), (batch, length + 1), generator=generator)


class _DoubleForFloat:
    """Stands for `torch` inside HF's file and reads float32, which it hard-codes in norms and
    softmax, as float64.

    Rotary tables stay as HF has them, computed in fp32: the dual layers take theirs from the same
    module.
    """

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


class Dense(NamedTuple):
    """The whole Hessian and gradient of the mean loss, by HF's forward and double backward."""

    loss: float
    gradient_P: Tensor
    hessian_PP: Tensor


def differentiable_gradient(model: PreTrainedModel, tokens_BS1: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient by HF's own forward, ready to be differentiated once more."""
    logits_BSV = model(tokens_BS1[:, :-1], use_cache=False).logits
    loss = -F.log_softmax(logits_BSV, dim=-1).gather(-1, tokens_BS1[:, 1:, None]).mean()
    gradient = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss, torch.cat([part.flatten() for part in gradient])


def dense_hessian(model: PreTrainedModel, tokens_BS1: Tensor) -> Dense:
    """Row after row by reverse mode over reverse mode, in float64."""
    weights = list(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        for name in {type(module).__module__ for module in model.modules()}:
            if name.startswith("transformers.models."):
                patch.setattr(sys.modules[name], "torch", _DoubleForFloat())
        loss, gradient_P = differentiable_gradient(model, tokens_BS1)
    size = len(gradient_P)
    chunks = []
    for units in torch.eye(size, dtype=torch.float64).split(128):
        rows = torch.autograd.grad(
            gradient_P, weights, units, is_grads_batched=True, retain_graph=True
        )
        chunks.append(torch.cat([row.reshape(len(units), -1) for row in rows], dim=1))
    hessian_PP = torch.cat(chunks)
    return Dense(float(loss.detach()), gradient_P.detach(), hessian_PP)


class Case(NamedTuple):
    """A float64 model, a batch, and their dense Hessian."""

    model: PreTrainedModel
    config: dict
    tokens_BS1: Tensor
    dense: Dense


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(2, marks=pytest.mark.stress, id="multi-head"),
        pytest.param(1, id="grouped-query"),
    ],
)
def case(request) -> Case:
    """The same model with one key/value head per query head, and with one for two."""
    config = {"num_key_value_heads": request.param}
    model, tokens = tiny_model(**config), random_tokens()
    return Case(model, config, tokens, dense_hessian(model, tokens))


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative distance |actual - expected| / |expected|."""
    return float((actual.double() - expected).norm() / expected.norm())
