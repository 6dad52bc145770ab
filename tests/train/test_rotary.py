"""The rotary embedding of the megatron engine, against transformers' and in float64."""

import pytest
import torch
from transformers import Olmo2Config
from transformers.models.olmo2 import modeling_olmo2

from train.model.rotary import rotated

LENGTH, HEADS, WIDTH, BASE = 4096, 2, 128, 500_000.0


@pytest.fixture(scope="module")
def heads() -> torch.Tensor:
    return torch.randn(LENGTH, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(3))


def by_transformers(heads_SBND: torch.Tensor) -> torch.Tensor:
    config = Olmo2Config(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    rotary = modeling_olmo2.Olmo2RotaryEmbedding(config)
    cos, sin = rotary(heads_SBND, torch.arange(LENGTH)[None])
    heads_BNSD = heads_SBND.permute(1, 2, 0, 3)
    query, _ = modeling_olmo2.apply_rotary_pos_emb(heads_BNSD, heads_BNSD, cos, sin)
    return query.permute(2, 0, 1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_those_of_transformers_bit_for_bit(heads, dtype):
    heads_SBND = heads.to(dtype)
    assert torch.equal(rotated(heads_SBND, BASE), by_transformers(heads_SBND))


def test_bf16_is_rounded_once(heads):
    """mcore's own function, with cos and sin in bf16, is off by 2.5e-3."""
    heads_SBND = heads.bfloat16()
    exponents = torch.arange(0, WIDTH, 2).double() / WIDTH
    angles_SD = torch.outer(torch.arange(LENGTH).double(), BASE**-exponents)
    turns = torch.polar(torch.ones_like(angles_SD), angles_SD)[:, None, None]
    pairs = torch.complex(*heads_SBND.double().chunk(2, -1)) * turns
    exact = torch.cat((pairs.real, pairs.imag), -1)
    error = (rotated(heads_SBND, BASE).double() - exact).norm() / exact.norm()
    assert error < 1.7e-3


def test_the_gradient_turns_back(heads):
    """Rotations are orthogonal: the gradient of <rotated(x), rotated(y)> by x is y."""
    left, right = heads.clone().requires_grad_(), heads.flip(0)
    (rotated(left, BASE) * rotated(right, BASE)).sum().backward()
    assert left.grad is not None
    torch.testing.assert_close(left.grad, right, rtol=1e-5, atol=1e-5)
