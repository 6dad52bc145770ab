"""GPTQ (Frantar et al. 2022, arXiv:2210.17323, algorithm 1), in float64 throughout.

Shapes: O output features (rows), I input features (columns), C columns of one lazy block, R columns right of it.
"""

import torch
from torch import Tensor

from quant_eval.grid import fit_grid
from quant_eval.specs import QuantSpec
from train.command import UserError

# Columns whose rounding errors are collected before they reach the columns further right: a matter of speed only.
LAZY_BLOCK_COLUMNS = 128


def relative_output_error(weight_OI: Tensor, quantized_OI: Tensor, hessian_II: Tensor) -> float:
    """||(W - Wq) X||_F^2 / ||W X||_F^2 = tr((W - Wq) H (W - Wq)^T) / tr(W H W^T); dimensionless.

    GPTQ's objective (eq. 1) on the undamped H = X X^T, normalised so that layers compare.
    """
    difference_OI = weight_OI.double() - quantized_OI.double()
    weight_OI = weight_OI.double()
    error = torch.sum((difference_OI @ hessian_II) * difference_OI)
    return float(error / torch.sum((weight_OI @ hessian_II) * weight_OI))


def inverse_factor(hessian_II: Tensor, damping: float, name: str) -> Tensor:
    """Upper triangular U with U^T U = (H + damping x mean(diag H) x identity)^-1, float64 [I, I] (section 3.3, step 3).

    Raises:
        UserError: H is not positive definite in float64. A pivot that rounding noise alone could have made counts as
            zero: the factor of such a matrix is noise too.
    """
    diagonal_I = hessian_II.diagonal()
    identity_II = torch.eye(len(diagonal_I), dtype=torch.float64, device=hessian_II.device)
    lower_II, failed_at = torch.linalg.cholesky_ex(hessian_II + damping * diagonal_I.mean() * identity_II)
    noise = len(diagonal_I) * torch.finfo(torch.float64).eps * diagonal_I.max()
    if failed_at or not bool((lower_II.diagonal().square() > noise).all()):
        raise UserError(
            f"{name}: the calibration Hessian with damping {damping:g} is not positive definite; "
            f"use a spec with a larger damp or more calibration sequences"
        )
    upper_II: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower_II), upper=True)
    return upper_II


def gptq(weight_OI: Tensor, hessian_II: Tensor, spec: QuantSpec, name: str) -> Tensor:
    """The rounded weight, float64 [O, I]: each column's error is made good by the columns after it.

    Rows do not interact, so linears that read the same input may be stacked along O.

    Groups: a group's grid is fitted when its first column is reached, to weights that already carry the corrections of
    every earlier column. With `actorder` columns run by falling diag(H), ties in natural order, and groups are formed
    along that order, as in the authors' code (so a group is no range of input features; kernels need its index).

    Dead columns: where H_ii = 0 no calibration token excites input i and the objective does not depend on its weights,
    so they become 0, as in the authors' code. The zero on the diagonal is replaced by the mean of the live diagonal;
    row and column i are zero elsewhere, so nothing flows in or out, and the damping is what the live columns ask for.

    Args:
        weight_OI: the linear's weight, any float dtype.
        hessian_II: X X^T over the calibration tokens, float64; its scale is free.
        spec: bits, groups, symmetry, order and damping.
        name: what an error calls this weight.

    Raises:
        UserError: H holds no live column, is not finite, or cannot be factored; nothing else is tried.
    """
    assert spec.damping is not None
    diagonal_I = hessian_II.diagonal()
    dead_I = diagonal_I == 0
    if bool(dead_I.all()):
        raise UserError(f"{name}: every calibration input is zero; check the checkpoint's weights")
    live_II = hessian_II + torch.diag(dead_I * diagonal_I[~dead_I].mean())
    weight_IO = weight_OI.double().T.masked_fill(dead_I[:, None], 0.0)  # transposed: a column is contiguous
    order_I = torch.arange(len(diagonal_I), device=diagonal_I.device)
    if spec.order == "actorder":
        order_I = torch.argsort(diagonal_I, descending=True, stable=True)
    factor_II = inverse_factor(live_II[order_I][:, order_I], spec.damping, name)
    rounded_IO = _round_columns(weight_IO[order_I].contiguous(), factor_II, spec)
    return torch.empty_like(rounded_IO).index_copy_(0, order_I, rounded_IO).T


def _round_columns(weight_IO: Tensor, factor_II: Tensor, spec: QuantSpec) -> Tensor:
    """Rounds the columns in the given order; `weight_IO` is overwritten on the way."""
    num_inputs = len(weight_IO)
    group_size = spec.group_size or num_inputs
    rounded_IO = torch.empty_like(weight_IO)
    for group_start in range(0, num_inputs, group_size):
        group_end = group_start + group_size
        grid = fit_grid(weight_IO[group_start:group_end].T, spec.bits, spec.symmetric)
        for start in range(group_start, group_end, LAZY_BLOCK_COLUMNS):
            end = min(start + LAZY_BLOCK_COLUMNS, group_end)
            errors_CO = torch.empty_like(weight_IO[start:end])
            for i in range(start, end):
                rounded_IO[i] = grid.nearest(weight_IO[i, :, None])[:, 0]
                errors_CO[i - start] = (weight_IO[i] - rounded_IO[i]) / factor_II[i, i]
                weight_IO[i + 1 : end].addr_(factor_II[i, i + 1 : end], errors_CO[i - start], alpha=-1)
            weight_IO[end:].addmm_(factor_II[start:end, end:].T, errors_CO, alpha=-1)  # [R, C] @ [C, O]
    return rounded_IO
