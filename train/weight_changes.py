"""Weights of linears rounded to a grid, or with noise of the size of its steps, at any layout.

A rank changes its part of a weight as it would be changed in the whole one, so the numbers are
those of one rank. Rounding is by functions of `quant_eval` that are looked up by their names, as in
`train.rounding`: what an update sees is what `quant_eval run` makes of an export of the same
weights.

Shapes: O output features (rows), I input features, G groups of a row, or of linears that read one
input, R ranks.
"""

import math
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from base.random_words import upper_halves_at
from train.engine import Change, LinearPart
from train.model.config import ModelConfig, input_groups, parameter_shapes
from train.model.initialization import standard_normal
from train.run.config import RunConfig
from train.run.perturbation import Noise, Qat, WeightGrid

PROBING = "quant_eval.probing"
WORDS_AT_ONCE = 1 << 24  # of 8 bytes, and as much again a few times


def rounded(settings: Qat, run: RunConfig, linears: Iterable[LinearPart]) -> Change:
    """Return the rounding of a weight to the grid of the settings.

    Args:
        settings: of the run.
        run: whose model has the linears.
        linears: all of this rank, also those that keep their weights.
    """
    round_to_grid, grid = _of_probing("round_to_grid"), settings.grid
    shapes = parameter_shapes(run.model)
    largest = _largest(run.model, linears) if grid.scales_tensors else {}

    def change(linear: LinearPart, weight_OI: Tensor) -> Tensor | None:
        if not settings.takes(linear.name):
            return None
        whole_OI = _whole_groups(linear, weight_OI, shapes[linear.name][1], grid)
        rounded_OI: Tensor = round_to_grid(grid, whole_OI, largest.get(linear.name))
        return _own_columns(linear, rounded_OI, weight_OI.shape[1])

    return change


def noisy(settings: Noise, run: RunConfig, step: int) -> Change:
    """Return the addition of noise to a weight, in proportion to the steps of the grid.

    The number at a place of a weight is a function of seed, step, name and place.
    """
    step_sizes, grid = _of_probing("step_sizes"), settings.grid
    shapes = parameter_shapes(run.model)

    def change(linear: LinearPart, weight_OI: Tensor) -> Tensor | None:
        if not settings.takes(linear.name):
            return None
        inputs = shapes[linear.name][1]
        whole_OI = _whole_groups(linear, weight_OI, inputs, grid)
        sizes_OG = step_sizes(grid, whole_OI) * settings.size
        width = whole_OI.shape[1] // sizes_OG.shape[1]

        changed_OI = weight_OI.to(torch.float32, copy=True)
        for rows in _some_rows(weight_OI):
            places = _places(linear, rows, weight_OI, inputs)
            halves_OI = upper_halves_at(f"{run.seed}/{step}/{linear.name}", *places)
            noise_OI = centered(halves_OI, settings.distribution)
            step_OI = sizes_OG[rows].repeat_interleave(width, dim=1)
            noise_OI.mul_(_own_columns(linear, step_OI, weight_OI.shape[1]))
            changed_OI[rows].add_(noise_OI)
        return changed_OI

    return change


def centered(words: Tensor, distribution: str) -> Tensor:
    """Return a number for each of 32 bits, fp32, of variance 1 / 12: uniform in +-1/2, or normal.

    The same on any device: only numbers that fp32 holds exactly, sums and products.

    Args:
        words: random int32 of any shape.
        distribution: of `Noise`.

    Example: the ends of the uniform ones are 2^-25 from -1/2 and 1/2.
        >>> ends = centered(torch.tensor([0, -1], dtype=torch.int32), "uniform")
        >>> ends.tolist() == [2**-25 - 1 / 2, 1 / 2 - 2**-25]
        True
    """
    if distribution == "uniform":
        # 24 bits and the half that keeps them off the ends: odd multiples of 2^-25.
        return ((words >> 8) & ((1 << 24) - 1)).float().add_(0.5 - (1 << 23)).mul_(2.0**-24)
    return standard_normal(words).mul_(math.sqrt(1 / 12))


def _of_probing(name: str) -> Any:
    return getattr(import_module(PROBING), name)


def _some_rows(weight_OI: Tensor) -> Iterator[slice]:
    """Yield ranges of rows of which the words take little memory."""
    rows, columns = weight_OI.shape
    count = max(1, WORDS_AT_ONCE // columns)
    for begin in range(0, rows, count):
        yield slice(begin, min(begin + count, rows))


def _places(
    linear: LinearPart, rows: slice, weight_OI: Tensor, inputs: int
) -> tuple[Tensor, Tensor]:
    """Return the places of some rows of this rank in the whole weight, counted along its rows.

    They are sums: of the beginnings of rows [O, 1], and of columns [I].
    """
    device = weight_OI.device
    row_O = torch.arange(linear.row + rows.start, linear.row + rows.stop, device=device)
    column_I = torch.arange(linear.column, linear.column + weight_OI.shape[1], device=device)
    return row_O[:, None] * inputs, column_I


def _whole_groups(linear: LinearPart, weight_OI: Tensor, inputs: int, grid: WeightGrid) -> Tensor:
    """Return a weight in which all inputs of a scale are here; of other ranks, if they cut groups.

    Every rank of the linear has to call it.
    """
    columns = weight_OI.shape[1]
    if columns == inputs or (grid.group_size and columns % grid.group_size == 0):
        return weight_OI
    assert linear.ranks is not None
    everyone_ROI = weight_OI.new_empty(linear.ranks.size(), *weight_OI.shape)
    dist.all_gather_into_tensor(
        everyone_ROI.view(-1, columns), weight_OI.contiguous(), group=linear.ranks
    )
    return everyone_ROI.transpose(0, 1).reshape(len(weight_OI), inputs)


def _own_columns(linear: LinearPart, weight_OI: Tensor, columns: int) -> Tensor:
    """Return the columns of this rank, of a weight with all of them or with these alone."""
    if weight_OI.shape[1] == columns:
        return weight_OI
    return weight_OI[:, linear.column : linear.column + columns]


def _largest(model: ModelConfig, linears: Iterable[LinearPart]) -> dict[str, Tensor]:
    """Return max|w| over all linears that read the same input and all their ranks, fp32 [1].

    By the name of each. Every rank has to call it, and the ranks reduce once.
    """
    ranks = None
    group_of = {name: names for names in input_groups(model) for name in names}
    maxima: dict[tuple[str, ...], list[Tensor]] = {}
    for linear in linears:
        ranks = linear.ranks
        parts = [part.abs().amax() for part in linear.pieces]
        maxima.setdefault(group_of[linear.name], []).extend(parts)

    largest_G = torch.stack([torch.stack(parts).amax() for parts in maxima.values()]).float()
    if ranks is not None:
        dist.all_reduce(largest_G, dist.ReduceOp.MAX, group=ranks)
    of_groups = zip(maxima, largest_G.split(1), strict=True)
    return {name: largest for names, largest in of_groups for name in names}
