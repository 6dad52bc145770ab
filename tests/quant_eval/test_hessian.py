"""The accumulated second moment against X^T X of all inputs at once, in float64.

Shapes: N tokens, I input features.
"""

import pytest
import torch

from base.errors import UserError
from base.hessian import InputHessian
from quant_eval.rounding.gptq import gptq, prepare
from tests.quant_eval.specs import gptq_spec

CPU = torch.device("cpu")


def inputs_of(num_tokens: int, width: int, dtype=torch.float32, seed=0, size=1.0) -> torch.Tensor:
    """Correlated, of very different sizes, and not centred."""
    generator = torch.Generator().manual_seed(seed)
    mixing_II, white_NI = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64)
        for rows in (width, num_tokens)
    )
    sizes_I = size * torch.logspace(2, -2, width, dtype=torch.float64)
    return ((white_NI @ mixing_II + 1) * sizes_I).to(dtype)


def hessian_of(inputs: torch.Tensor) -> InputHessian:
    hessian = InputHessian(inputs.shape[-1], CPU, inputs.dtype)
    hessian.add(inputs)
    return hessian


def close(ours_II: torch.Tensor, expected_II: torch.Tensor, limit: float = 1e-13) -> bool:
    """Element by element, to what float64 sums of thousands of terms in another order differ by
    (measured: 3e-15).
    """
    sizes_I = expected_II.diagonal().sqrt()
    return bool(((ours_II - expected_II).abs() <= limit * sizes_I[:, None] * sizes_I).all())


# 64 columns are one block of columns, 65 two, 520 eight of 65, 1000 eight of 125; 1024 tokens are
# one chunk
@pytest.mark.parametrize(
    ("num_tokens", "width"), [(1, 3), (1500, 64), (1024, 65), (3000, 520), (1025, 1000)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_the_mean_of_outer_products(num_tokens, width, dtype):
    """The mean of float64 products; of bf16 inputs of products summed in fp32 over 1,024 tokens.

    A matrix product sums parts: its roundings, of at most 6e-8 each, moved a sum of positive terms
    by 5.2e-7 in all. Of 65 columns the last is alone in its block, and some CPUs sum it term after
    term: the walk of 1,024 roundings is about 32 times one of them, 1.9e-6 (measured: 1.8e-6).
    """
    inputs_NI = inputs_of(num_tokens, width, dtype, size=1 / 64 if dtype == torch.float16 else 1)
    ours_II = hessian_of(inputs_NI).mean("layer")
    assert ours_II.dtype == torch.float64
    assert torch.equal(ours_II, ours_II.T)
    exact_NI = inputs_NI.double()
    of_sums_in_fp32 = 4e-6 if width == 65 else 1e-6
    limit = of_sums_in_fp32 if dtype == torch.bfloat16 else 1e-13
    assert close(ours_II, exact_NI.T @ exact_NI / num_tokens, limit)


@pytest.mark.parametrize(
    "name", ["gptq-b3-g32", "gptq-b4-g128", "gptq-b4-perchannel-asym-actorder"]
)
def test_sums_in_fp32_of_bf16_inputs_leave_nearly_all_codes(name):
    """At least 99.99% of the codes are those of a float64 Hessian of the same inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs_NI = inputs_of(4096, 256, torch.bfloat16)
    weight_OI = torch.randn(1024, 256, generator=generator)
    spec, exact_NI = gptq_spec(name), inputs_NI.double()
    ours, exact = (
        gptq(weight_OI, prepare(hessian_II, spec, "layer", products), spec).codes_OI
        for hessian_II, products in (
            (hessian_of(inputs_NI).mean("layer"), torch.float32),
            (exact_NI.T @ exact_NI / 4096, torch.float64),
        )
    )
    assert float((ours == exact).double().mean()) >= 0.9999


@pytest.mark.parametrize("order", ["natural", "actorder"])
@pytest.mark.parametrize("seed", range(3))
def test_sums_in_fp32_hide_no_singular_hessian_and_leave_regular_ones_regular(order, seed):
    """In bf16 and without damping: features of sizes 1e2 to 1e-2, of which one is twice another, or
    too few tokens.
    """
    spec = gptq_spec(f"gptq-b3-g32-{order}-damp0")
    regular_II = hessian_of(inputs_of(3000, 160, torch.bfloat16, seed)).mean("layer")
    assert prepare(regular_II, spec, "layer", torch.float32).factor_II.isfinite().all()
    for num_tokens in (1, 80, 159, 3000):
        inputs_NI = inputs_of(num_tokens, 160, torch.bfloat16, seed)
        inputs_NI[:, 70] = 2 * inputs_NI[:, 3]
        hessian_II = hessian_of(inputs_NI).mean("layer")
        with pytest.raises(UserError, match="not positive definite"):
            prepare(hessian_II, spec, "layer", torch.float32)


def test_batches_of_any_shape_add_up():
    inputs_NI = inputs_of(2600, 80)
    whole, parts = hessian_of(inputs_NI), InputHessian(80, CPU, torch.float32)
    parts.add(inputs_NI[:2000].reshape(8, 250, 80))
    parts.mean("layer")  # reading it changes nothing
    parts.add(inputs_NI[2000:2001, :])
    parts.add(inputs_NI[2001:].clone().requires_grad_())
    assert whole.tokens == parts.tokens == 2600
    assert close(parts.mean("layer"), whole.mean("layer"))
    assert not parts.sum_II.requires_grad


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_inputs_that_are_not_finite_are_refused_by_name(value):
    inputs_NI = inputs_of(100, 70)
    inputs_NI[31, 69] = value
    hessian = hessian_of(inputs_NI)
    with pytest.raises(UserError, match=r"model\.layers\.3.*NaN or infinity; check the checkpoint"):
        hessian.mean("model.layers.3")


def test_large_and_small_inputs_neither_overflow_nor_vanish():
    """In fp32 the squares of both would."""
    inputs_NI = torch.tensor([[1e30, 1e-30], [2e30, 3e-30]])
    hessian = hessian_of(inputs_NI)
    expected = [[2.5e60, 3.5], [3.5, 5e-60]]
    torch.testing.assert_close(
        hessian.mean("x"), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )
