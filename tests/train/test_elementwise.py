"""The functions between a layer's matrix products: values and gradients against autograd's of plain
definitions, in transformers where it has them.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from transformers import Olmo2Config
from transformers.models.olmo2 import modeling_olmo2

from train.model import elementwise
from train.model.config import Llama3Scaling
from train.model.elementwise import normed, normed_and_rotated, swiglu
from train.model.recomputing import recomputed
from train.model.rotary import rotated, rotations

LENGTH, SEQUENCES, HEADS, WIDTH, EPS, BASE = 64, 2, 4, 16, 1e-6, 500_000.0
SIZE = HEADS * WIDTH


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def differentiated(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of its product with random numbers."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    (output * draw(*output.shape, seed=9)).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_equal(function: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs) -> None:
    """fp32 sums of some hundred terms in another order: 1e-6 of the largest."""
    pairs = zip(differentiated(function, *inputs), differentiated(plain, *inputs), strict=True)
    for ours, expected in pairs:
        assert (ours - expected).abs().max() < 2e-6 * expected.abs().max()


def fused(qkv: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
    """Queries and keys as views of one tensor, as a layer has them; both in one output."""
    query, key, _ = qkv.unflatten(-1, (HEADS, 3 * WIDTH)).split(WIDTH, -1)
    weights = query_weight, key_weight
    return torch.stack(
        normed_and_rotated(query, key, *weights, rotary_base=BASE, eps=EPS, group=None)
    )


def turned_by_transformers(query_SBND: Tensor, key_SBND: Tensor) -> list[Tensor]:
    length, _, heads, width = query_SBND.shape
    config = Olmo2Config(
        hidden_size=heads * width,
        num_attention_heads=heads,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    rotary = modeling_olmo2.Olmo2RotaryEmbedding(config)
    cos, sin = rotary(query_SBND, torch.arange(length)[None])
    heads_BNSD = (x_SBND.permute(1, 2, 0, 3) for x_SBND in (query_SBND, key_SBND))
    turned = modeling_olmo2.apply_rotary_pos_emb(*heads_BNSD, cos, sin)
    return [x_BNSD.permute(2, 0, 1, 3) for x_BNSD in turned]


def by_transformers(qkv: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
    query, key, _ = qkv.unflatten(-1, (HEADS, 3 * WIDTH)).split(WIDTH, -1)
    heads = []
    for x_SBND, weight in ((query, query_weight), (key, key_weight)):
        norm = modeling_olmo2.Olmo2RMSNorm(SIZE, EPS)
        flat_SBH = functional_call(norm, {"weight": weight}, x_SBND.flatten(2))
        heads.append(flat_SBH.unflatten(-1, (HEADS, WIDTH)))
    return torch.stack(turned_by_transformers(*heads))


QKV = draw(LENGTH, SEQUENCES, 3 * SIZE) * 3
WEIGHTS = draw(SIZE, seed=1).abs() + 0.5, draw(SIZE, seed=2).abs() + 0.5


def test_queries_and_keys_are_those_of_transformers():
    assert_equal(fused, by_transformers, QKV, *WEIGHTS)


def test_bf16_queries_and_keys_are_rounded_once():
    """One rounding to 8 bits leaves 1.65e-3; one more, after the norm, would leave 2.3e-3."""
    rounded = [x.bfloat16() for x in (QKV, *WEIGHTS)]
    exact = by_transformers(*(x.float() for x in rounded))
    error = (fused(*rounded).float() - exact).norm() / exact.norm()
    assert error < 1.7e-3


LONG_SBND = draw(4096, 1, 2, 128, seed=3)


def turned(heads_SBND: Tensor) -> Tensor:
    turns = rotations(*heads_SBND.shape[::3], BASE, heads_SBND.device)
    return rotated(heads_SBND, *turns).to(heads_SBND.dtype)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-7), (torch.bfloat16, 1e-4)])
def test_turned_heads_are_those_of_transformers(dtype, most):
    """Products and sum are rounded together, not one by one: few results differ, by their last bit.

    mcore's own function would be 2e-3 from transformers' in bf16.
    """
    heads_SBND = LONG_SBND.to(dtype)
    expected = turned_by_transformers(heads_SBND, heads_SBND)[0].double()
    assert (turned(heads_SBND).double() - expected).norm() < most * expected.norm()


def test_turned_bf16_is_rounded_once():
    """mcore's own function, with cos and sin in bf16, is off by 2.5e-3."""
    heads_SBND = LONG_SBND.bfloat16()
    length, _, _, width = heads_SBND.shape
    exponents = torch.arange(0, width, 2).double() / width
    angles_SD = torch.outer(torch.arange(length).double(), BASE**-exponents)
    turns = torch.polar(torch.ones_like(angles_SD), angles_SD)[:, None, None]
    pairs = torch.complex(*heads_SBND.double().chunk(2, -1)) * turns
    exact = torch.cat((pairs.real, pairs.imag), -1)
    error = (turned(heads_SBND).double() - exact).norm() / exact.norm()
    assert error < 1.7e-3


def test_slowed_rotations_are_those_of_llama_3():
    """Llama 3.2's: by the wavelength in tokens, feature by feature, and by transformers."""
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = Llama3Scaling(**scaling, original_max_position_embeddings=8192)
    cos, sin = rotations(2048, 64, 5e5, torch.device("cpu"), llama3)
    slowed = 0
    for feature in range(32):
        wavelength = 2 * math.pi * 5e5 ** (2 * feature / 64)
        divisor = 1.0
        if wavelength > 8192 / 1:
            divisor = 32.0
        elif wavelength > 8192 / 4:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisor = 1 / ((1 - smooth) / 32 + smooth)
        slowed += divisor > 1
        angle = math.atan2(sin[1, 0, 0, 32 + feature].item(), cos[1, 0, 0, feature].item())
        assert angle == pytest.approx(2 * math.pi / wavelength / divisor, rel=1e-5)
    assert 0 < slowed < 32

    rope = {"rope_type": "llama3", "rope_theta": 5e5, **llama3.model_dump()}
    config = Olmo2Config(hidden_size=128, num_attention_heads=2, rope_parameters=rope)
    embedding = modeling_olmo2.Olmo2RotaryEmbedding(config)
    expected = embedding(torch.zeros(1), torch.arange(2048)[None])
    torch.testing.assert_close(cos[:, 0, 0], expected[0][0], atol=2e-5, rtol=0)
    torch.testing.assert_close(sin[:, 0, 0].abs(), expected[1][0].abs(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("with_residual", [True, False])
def test_a_norm_with_its_residual(with_residual):
    x, residual = draw(LENGTH, SEQUENCES, SIZE), draw(LENGTH, SEQUENCES, SIZE, seed=3)

    def ours(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return normed(x, weight, EPS, residual if with_residual else None)

    def plain(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return F.rms_norm(x, (SIZE,), weight, EPS) + (residual if with_residual else 0)

    assert_equal(ours, plain, x, WEIGHTS[0], residual)


def test_swiglu():
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate / (1 + torch.exp(-gate)) * up

    assert_equal(swiglu, plain, draw(LENGTH, SEQUENCES, 2 * SIZE))


def test_torch_compiles_each_into_one_graph():
    """The function a GPU runs is traced whole, forward and backward, and equals the CPU's."""
    query, key, _ = QKV.unflatten(-1, (HEADS, 3 * WIDTH)).split(WIDTH, -1)
    heads, weights = [query, key], list(WEIGHTS)
    turns = rotations(LENGTH, WIDTH, BASE, QKV.device)
    _, inverses = elementwise._heads(heads, weights, *turns, EPS, None)
    x, gate_up = draw(LENGTH, SEQUENCES, SIZE), draw(LENGTH, SEQUENCES, 2 * SIZE)
    _, inverse = elementwise._normed(x, WEIGHTS[0], x, EPS)
    for function, *arguments in (
        (elementwise._heads, heads, weights, *turns, EPS, None),
        (elementwise._heads_gradients, heads, weights, inverses, [key, query], *turns, None),
        (elementwise._normed, x, WEIGHTS[0], x, EPS),
        (elementwise._normed_gradients, x, WEIGHTS[0], inverse, x.flip(0)),
        (elementwise._swiglu, gate_up),
        (elementwise._swiglu_gradient, gate_up, x),
    ):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_what_is_recomputed_is_not_kept():
    """Only the input of SwiGLU is kept for a product with its output, whose gradient is the same."""
    weight, gate_up = draw(SIZE, 8), draw(LENGTH, SEQUENCES, 2 * SIZE)
    kept: list[Tensor] = []

    def product(gate_up: Tensor, weight: Tensor) -> Tensor:
        output = swiglu(gate_up)
        with recomputed((output,), lambda: (swiglu(gate_up),)):
            return output @ weight

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    expected = differentiated(lambda x, w: swiglu(x) @ w, gate_up, weight)
    assert all(map(torch.equal, differentiated(product, gate_up, weight), expected))
    with saved_tensors_hooks(pack, lambda x: x):
        product(gate_up.requires_grad_(), weight.requires_grad_())
    assert {x.untyped_storage().data_ptr() for x in kept} <= {gate_up.untyped_storage().data_ptr()}
