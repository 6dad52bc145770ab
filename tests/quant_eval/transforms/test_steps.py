"""Each step against the dense matrix it stands for."""

import copy
from functools import partial

import pytest
import torch

from quant_eval.transforms.steps import Blocks, Diagonal, Kronecker, Permutation, Transform
from tests.quant_eval.transforms.linears import normal

WIDTH = 24


def orthogonal(*shape, seed=0):
    return torch.linalg.qr(normal(*shape, shape[-1], seed=seed))[0]


ORDER = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
# step and its dense T, by the definitions of permutation, Kronecker product and block diagonal
STEPS = {
    "diagonal": (
        Diagonal(torch.linspace(-3, 2, WIDTH, dtype=torch.float64)),
        torch.diag(torch.linspace(-3, 2, WIDTH, dtype=torch.float64)),
    ),
    "permutation": (Permutation(ORDER), torch.eye(WIDTH, dtype=torch.float64)[:, ORDER]),
    "rotations": (
        Kronecker(orthogonal(4), orthogonal(6)),
        torch.kron(orthogonal(4), orthogonal(6)),
    ),
    "invertible": (
        Kronecker(normal(3, 3), normal(8, 8)),
        torch.kron(normal(3, 3), normal(8, 8)),
    ),
    "blocks": (Blocks(orthogonal(3, 8)), torch.block_diag(*orthogonal(3, 8))),
    "blocks-invertible": (Blocks(normal(3, 8, 8)), torch.block_diag(*normal(3, 8, 8))),
    "equal-blocks": (
        Kronecker(normal(2, 2), normal(3, 3), repeats=4),
        torch.block_diag(*torch.kron(normal(2, 2), normal(3, 3)).expand(4, 6, 6)),
    ),
}


def check(transform, dense_II):
    """In float64, on weights [O, I], tokens [B, L, I] and a Hessian."""
    weight_OI, x_BLI = normal(5, WIDTH, seed=2), normal(2, 3, WIDTH, seed=3)
    inverse_II = torch.linalg.inv(dense_II)
    hessian_II = normal(WIDTH, WIDTH, seed=4)
    hessian_II = hessian_II @ hessian_II.T
    near = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    near(transform.weight(weight_OI), weight_OI @ dense_II)
    near(transform.inputs(x_BLI), x_BLI @ inverse_II.T)
    near(transform.restored(weight_OI), weight_OI @ inverse_II)
    transformed_II = transform.hessian(hessian_II)
    near(transformed_II, inverse_II @ hessian_II @ inverse_II.T)
    assert torch.equal(transformed_II, transformed_II.T)


@pytest.mark.parametrize("name", STEPS)
def test_step_is_its_dense_matrix(name):
    step, dense_II = STEPS[name]
    check(Transform(step), dense_II)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("call", ["weight", "inputs", "restored", "hessian"])
def test_rows_of_another_width_are_refused(name, call):
    """Twice the features as twice the blocks would be exact as well, but another transform."""
    rows = normal(2 * WIDTH, 2 * WIDTH)
    with pytest.raises(AssertionError, match="rows of 48 features for a step of 24"):
        getattr(Transform(STEPS[name][0]), call)(rows)


def test_composed_steps_are_the_product_of_their_matrices():
    names = ("diagonal", "invertible", "permutation", "blocks")
    dense_II = torch.linalg.multi_dot([STEPS[name][1] for name in names])
    check(Transform(*(STEPS[name][0] for name in names)), dense_II)


@torch.no_grad()
def test_many_rows_are_transformed_a_few_at_a_time():
    """Without gradients; parts of 218 rows and a rest, of columns that are mirrored by 256."""
    width = 600
    left_AA, right_BB = normal(20, 20), orthogonal(30).contiguous()
    factors_I = 1 + normal(width).abs()
    dense_II = factors_I[:, None] * torch.kron(left_AA, right_BB)
    transform = Transform(Diagonal(factors_I), Kronecker(left_AA, right_BB))
    rows_BLI = normal(3, 167, width, seed=1)
    near = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)
    near(transform.weight(rows_BLI), rows_BLI @ dense_II)
    near(transform.weight(rows_BLI[0, 0]), rows_BLI[0, 0] @ dense_II)
    near(transform.restored(transform.weight(rows_BLI)), rows_BLI)
    hessian_II = rows_BLI[1].T @ rows_BLI[1]
    inverse_II = torch.linalg.inv(dense_II)
    transformed_II = transform.hessian(hessian_II)
    near(transformed_II, inverse_II @ hessian_II @ inverse_II.T)
    assert torch.equal(transformed_II, transformed_II.T)
    half_BLI = transform.inputs(rows_BLI.bfloat16())
    assert half_BLI.dtype == torch.bfloat16
    with torch.enable_grad():
        assert torch.equal(half_BLI, transform.inputs(rows_BLI.bfloat16()))


def test_shifted_inputs_and_their_hessian():
    """The Hessian is that of the tokens which `inputs` returns, worked out from them."""
    x_NI = normal(400, WIDTH) + normal(WIDTH, seed=5)
    transform = Transform(
        *(STEPS[name][0] for name in ("diagonal", "rotations")), shift_I=x_NI.mean(0)
    )
    read_NI = transform.inputs(x_NI)
    assert float(read_NI.mean(0).abs().max()) < 1e-12
    hessian_II = transform.hessian(x_NI.T @ x_NI / len(x_NI))
    torch.testing.assert_close(hessian_II, read_NI.T @ read_NI / len(x_NI), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_bf16_is_computed_in_fp32(dtype):
    transform = Transform(STEPS["rotations"][0], STEPS["blocks"][0], STEPS["permutation"][0])
    x_NI = normal(50, WIDTH).to(dtype)
    read_NI = transform.inputs(x_NI)
    assert read_NI.dtype == dtype
    exact_NI = transform.inputs(x_NI.double())
    # sums of 24 products in fp32, and one rounding to the dtype, however many steps
    rounding_NI = exact_NI.abs() * torch.finfo(dtype).eps / 2
    assert bool(((read_NI.double() - exact_NI).abs() <= 1.01 * rounding_NI + 2e-6).all())


def test_copies_and_state_hold_all_values():
    transform = Transform(STEPS["invertible"][0], STEPS["blocks"][0], shift_I=normal(WIDTH))
    tensors = list(transform.buffers())
    shared = copy.deepcopy(transform, {id(tensor): tensor for tensor in tensors})
    assert all(a is b for a, b in zip(tensors, shared.buffers(), strict=True))
    on_meta = copy.deepcopy(transform).to("meta")
    assert all(tensor.device.type == "meta" for tensor in on_meta.buffers())
    assert not list(transform.parameters())
    x_NI = normal(3, WIDTH)
    assert torch.equal(shared.inputs(x_NI), transform.inputs(x_NI))


def test_values_may_need_a_gradient():
    angle = torch.zeros((), dtype=torch.float64, requires_grad=True)
    rotation_22 = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    x_NI = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    Transform(Blocks(rotation_22[None])).weight(x_NI)[0, 1].backward()
    assert angle.grad is not None
    assert float(angle.grad) == -1.0  # d(-sin)/d(angle) at 0
