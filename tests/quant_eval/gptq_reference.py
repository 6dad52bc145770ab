"""GPTQ from its derivation, slow and in float64: the witness of the tests beside it.

Optimal Brain Quantization (arXiv:2208.11580, eqs. 2 and 3) with the columns in a given order,
nothing lazy: hold the inverse Hessian of the columns still free; after each column move all free
weights at once, then eliminate it.

Shapes: O outputs, I inputs, N calibration tokens, P points of a grid.
"""

import math
from functools import lru_cache

import numpy as np
import torch

from base.hessian import row_output_errors
from quant_eval.group import Rounded
from quant_eval.quantizer import ColumnSpec, GridSpec
from quant_eval.quantizers.mixed import MixedSpec

BLOCK = 128  # grids of groups do not see the corrections of their own block of columns, as in the authors' code


def problem(seed: int = 0, num_outputs: int = 24, num_inputs: int = 288, num_tokens: int = 700):
    """A weight with heavy tails, and the Hessian of inputs with a decaying spectrum, loud
    channels and a mean.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    spectrum_I = 1 / torch.arange(1, num_inputs + 1, dtype=torch.float64).sqrt()
    mixing_II = torch.linalg.qr(normal(num_inputs, num_inputs))[0]
    inputs_NI = (normal(num_tokens, num_inputs) * spectrum_I) @ mixing_II + 0.1 * normal(num_inputs)
    inputs_NI[:, ::37] *= 6
    weight_OI = 0.03 * normal(num_outputs, num_inputs) * (1 + normal(num_outputs, 1).abs())
    return weight_OI, inputs_NI.T @ inputs_NI


def cut(value: float, scales: str) -> float:
    """The largest number of the format not above a positive value; both formats have gradual
    underflow.
    """
    digits, smallest = (11, -24) if scales == "fp16" else (24, -149)
    unit = max(math.frexp(value)[1] - digits, smallest)
    return math.ldexp(math.floor(math.ldexp(value, -unit)), unit)


def grid_points(weights: np.ndarray, spec: GridSpec | MixedSpec) -> np.ndarray:
    """All points that a group of weights may take, from the definitions of the two conventions.

    That steps are cut matters: a group's largest negative weight is midway between two symmetric
    points, and the cut makes the outer one the nearer.
    """
    codes, scales = np.arange(2**spec.bits), spec.scales or "fp32"
    if spec.symmetric:
        low = -float(np.abs(weights).max())
        high = -low
    else:
        low, high = min(float(weights.min()), 0.0), max(float(weights.max()), 0.0)
    if low == high:
        low, high = -1.0, 1.0
    step = cut((high - low) / (2**spec.bits - 1), scales)
    zero = 2 ** (spec.bits - 1) if spec.symmetric else round(-low / step)
    return step * (codes - zero)


def closest(values_O: np.ndarray, points_OP: np.ndarray) -> np.ndarray:
    """Each row's point next to its value."""
    nearest_O = np.abs(points_OP - values_O[:, None]).argmin(1)
    return points_OP[np.arange(len(values_O)), nearest_O]


def order_of(diagonal_I: np.ndarray, spec: ColumnSpec) -> list[int]:
    """The input features in the order in which they are rounded."""
    features = list(range(len(diagonal_I)))
    if spec.order == "actorder":
        return sorted(features, key=lambda i: -diagonal_I[i])
    if spec.order == "groupaware":
        size = spec.group_size or 1
        groups = [
            sorted(features[i : i + size], key=lambda i: -diagonal_I[i]) for i in features[::size]
        ]
        return [
            i for group in sorted(groups, key=lambda group: -diagonal_I[group[0]]) for i in group
        ]
    return features


@lru_cache(maxsize=4)
def eliminations(hessian: bytes, order: tuple[int, ...], damping: float) -> list[np.ndarray]:
    """Per position, the row of the inverse Hessian of all columns not before it in the order."""
    hessian_II = np.frombuffer(hessian).reshape(len(order), -1)
    inverse_II = np.linalg.inv(
        hessian_II + damping * np.diag(hessian_II).mean() * np.eye(len(order))
    )
    rows = []
    for column in order:
        rows.append(inverse_II[column].copy())
        inverse_II = (
            inverse_II
            - np.outer(inverse_II[:, column], inverse_II[column]) / inverse_II[column, column]
        )
    return rows


def eliminate_columns(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, spec: ColumnSpec, points_of=grid_points
) -> torch.Tensor:
    """The rounded weight, float64 [O, I]; `points_of` makes the points of a row's group."""
    given, hessian = weight_OI.double().numpy(), hessian_II.numpy().copy()
    diagonal_I = np.diag(hessian_II.numpy())
    order = order_of(diagonal_I, spec)
    dead = diagonal_I == 0
    hessian[dead, dead] = diagonal_I[~dead].mean()
    weights = np.where(dead, 0.0, given)
    original, num_inputs = weights.copy(), len(order)
    size = spec.group_size or num_inputs
    along_order = spec.order == "actorder" and not spec.static_groups
    inverse_rows = eliminations(hessian.tobytes(), tuple(order), spec.damping)

    points: dict[int, np.ndarray] = {}
    for position, column in enumerate(order):
        if position % BLOCK == 0:
            at_block_start = weights.copy()
        group = (position if along_order else column) // size
        if group not in points:
            members = [
                i for at, i in enumerate(order) if (at if along_order else i) // size == group
            ]
            fitted = original if spec.static_groups else at_block_start
            if spec.group_size is None:
                fitted = given
            points[group] = np.stack(
                [points_of(weights_I, spec) for weights_I in fitted[:, members]]
            )
        rounded_O = closest(weights[:, column], points[group])
        error_O = (weights[:, column] - rounded_O) / inverse_rows[position][column]
        free = order[position + 1 :]
        weights[:, free] -= error_O[:, None] * inverse_rows[position][free]
        weights[:, column] = rounded_O
    return torch.from_numpy(weights)


def same_weights(ours: Rounded, theirs_OI: torch.Tensor, tolerance: float = 1e-6) -> float:
    """The fraction of weights within the tolerance, which is a fraction of a group's range, as
    fp32's rounding is.
    """
    ranges_OI = ours.scales_OG[:, ours.groups_I.long()] * int(ours.codes_OI.max())
    return float(((ours.dense() - theirs_OI).abs() <= tolerance * ranges_OI).double().mean())


def relative_output_error(
    weight_OI: torch.Tensor, quantized_OI: torch.Tensor, hessian_II: torch.Tensor
) -> float:
    """GPTQ's objective on the undamped H = X X^T over all rows, relative to tr(W H W^T)."""
    error_O, whole_O = row_output_errors(weight_OI, quantized_OI, hessian_II)
    return float(error_O.sum() / whole_O.sum())
