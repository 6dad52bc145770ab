"""The accumulated second moment against X^T X of all inputs at once, in float64.

Shapes: N tokens, I input features.
"""

import pytest
import torch

from base.errors import UserError
from quant_eval.hessian import InputHessian

CPU = torch.device("cpu")


def inputs_of(num_tokens: int, width: int, dtype=torch.float32, seed=0) -> torch.Tensor:
    """Correlated, of very different sizes, and not centred."""
    generator = torch.Generator().manual_seed(seed)
    mixing_II = torch.randn(width, width, generator=generator, dtype=torch.float64)
    inputs_NI = (
        torch.randn(num_tokens, width, generator=generator, dtype=torch.float64) @ mixing_II + 1
    )
    return (inputs_NI * torch.logspace(2, -2, width, dtype=torch.float64)).to(dtype)


def close(ours_II: torch.Tensor, expected_II: torch.Tensor) -> bool:
    """Element by element, to what float64 sums of thousands of terms in another order differ by
    (measured: 3e-15).
    """
    sizes_I = expected_II.diagonal().sqrt()
    return bool(((ours_II - expected_II).abs() <= 1e-13 * sizes_I[:, None] * sizes_I).all())


# 64 columns are one block of columns, 65 two, 520 eight of 65, 1000 eight of 125; 1024 tokens are
# one chunk
@pytest.mark.parametrize(
    ("num_tokens", "width"), [(1, 3), (1500, 64), (1024, 65), (3000, 520), (1025, 1000)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_the_mean_of_outer_products_in_float64(num_tokens, width, dtype):
    inputs_NI = (
        inputs_of(num_tokens, width, dtype)
        if dtype != torch.float16
        else inputs_of(num_tokens, width).half() / 64
    )
    hessian = InputHessian(width, CPU)
    hessian.add(inputs_NI)
    ours_II = hessian.mean("layer")
    assert ours_II.dtype == torch.float64
    assert torch.equal(ours_II, ours_II.T)
    exact_NI = inputs_NI.double()
    assert close(ours_II, exact_NI.T @ exact_NI / num_tokens)


def test_batches_of_any_shape_add_up():
    inputs_NI = inputs_of(2600, 80)
    whole, parts = InputHessian(80, CPU), InputHessian(80, CPU)
    whole.add(inputs_NI)
    parts.add(inputs_NI[:2000].reshape(8, 250, 80))
    parts.add(inputs_NI[2000:2001, :])
    parts.add(inputs_NI[2001:].clone().requires_grad_())
    assert whole.tokens == parts.tokens == 2600
    assert close(parts.mean("layer"), whole.mean("layer"))
    assert not parts.sum_II.requires_grad


def test_the_sum_over_ranks_is_the_hessian_of_all_tokens():
    inputs_NI = inputs_of(2000, 130)
    ranks, whole = [InputHessian(130, CPU) for _ in range(3)], InputHessian(130, CPU)
    for rank, part_NI in zip(ranks, inputs_NI.split([700, 1300, 0]), strict=True):
        rank.add(part_NI)
    whole.add(inputs_NI)
    reduced = ranks[2]  # a rank that has no tokens of its own
    for other in ranks[:2]:
        reduced.sum_II += other.sum_II
        reduced.tokens += other.tokens
    assert close(reduced.mean("layer"), whole.mean("layer"))


def test_reading_the_mean_changes_nothing():
    inputs_NI = inputs_of(100, 70)
    hessian = InputHessian(70, CPU)
    hessian.add(inputs_NI[:50])
    hessian.mean("layer")
    hessian.add(inputs_NI[50:])
    first_II = hessian.mean("layer")
    assert torch.equal(first_II, hessian.mean("layer"))
    assert close(first_II, inputs_NI.double().T @ inputs_NI.double() / 100)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_inputs_that_are_not_finite_are_refused_by_name(value):
    inputs_NI = inputs_of(100, 70)
    inputs_NI[31, 69] = value
    hessian = InputHessian(70, CPU)
    hessian.add(inputs_NI)
    with pytest.raises(UserError, match=r"model\.layers\.3.*NaN or infinity; check the checkpoint"):
        hessian.mean("model.layers.3")


def test_large_and_small_inputs_neither_overflow_nor_vanish():
    """In fp32 the squares of both would."""
    inputs_NI = torch.tensor([[1e30, 1e-30], [2e30, 3e-30]])
    hessian = InputHessian(2, CPU)
    hessian.add(inputs_NI)
    expected = [[2.5e60, 3.5], [3.5, 5e-60]]
    torch.testing.assert_close(
        hessian.mean("x"), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )
