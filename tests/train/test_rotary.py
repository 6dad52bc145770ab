"""The rotary embedding of the megatron engine, against transformers' and in float64."""

import pytest
import torch
from transformers import Olmo2Config
from transformers.models.olmo2 import modeling_olmo2

from train.model.rotary import rotated, rotations

LENGTH, HEADS, WIDTH, BASE = 4096, 2, 128, 500_000.0


@pytest.fixture(scope="module")
def heads() -> torch.Tensor:
    return torch.randn(LENGTH, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(3))


def turned(heads_SBND: torch.Tensor) -> torch.Tensor:
    turns = rotations(LENGTH, WIDTH, BASE, heads_SBND.device)
    return rotated(heads_SBND, *turns).to(heads_SBND.dtype)


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


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-7), (torch.bfloat16, 1e-4)])
def test_heads_are_those_of_transformers(heads, dtype, most):
    """Products and sum are rounded together, not one by one: few results differ, by their last bit.

    mcore's own function would be 2e-3 from transformers' in bf16.
    """
    ours, expected = turned(heads.to(dtype)).double(), by_transformers(heads.to(dtype)).double()
    assert (ours - expected).norm() < most * expected.norm()


def test_bf16_is_rounded_once(heads):
    """mcore's own function, with cos and sin in bf16, is off by 2.5e-3."""
    heads_SBND = heads.bfloat16()
    exponents = torch.arange(0, WIDTH, 2).double() / WIDTH
    angles_SD = torch.outer(torch.arange(LENGTH).double(), BASE**-exponents)
    turns = torch.polar(torch.ones_like(angles_SD), angles_SD)[:, None, None]
    pairs = torch.complex(*heads_SBND.double().chunk(2, -1)) * turns
    exact = torch.cat((pairs.real, pairs.imag), -1)
    error = (turned(heads_SBND).double() - exact).norm() / exact.norm()
    assert error < 1.7e-3


def test_minus_sin_turns_back(heads):
    """Rotations are orthogonal: this is the gradient, too."""
    cos, sin = rotations(LENGTH, WIDTH, BASE, heads.device)
    back = rotated(rotated(heads, cos, sin), cos, -sin)
    torch.testing.assert_close(back, heads, rtol=1e-5, atol=1e-5)
