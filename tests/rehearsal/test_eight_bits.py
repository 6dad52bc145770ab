"""Checks of Transformer Engine's 8-bit products, on the CPU: they find what they have to."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quant_eval.numbers import E4M3, E5M2
from tests.gpu import training, transformer_engine
from tests.gpu.transformer_engine import (
    ACTIVATION,
    BLOCKS,
    GRADIENT,
    MOST,
    WEIGHT,
    Linear,
    Results,
    compared,
    rounded,
    written_out,
)
from tests.gpu.workbench import FULL, IN_SMALL, Workbench
from tests.runs import python, succeed


def values(precision: str, linear: Linear) -> list[float]:
    workbench = Workbench("cpu", IN_SMALL, Path())
    return [float(figure.value or 0) for figure in compared(workbench, precision, linear)]


def in_bf16(x_TI: Tensor, weight_OI: Tensor, gradient_TO: Tensor, _: str) -> Results:
    return x_TI @ weight_OI.t(), gradient_TO @ weight_OI, gradient_TO.t() @ x_TI


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("other", [*BLOCKS, "bf16"])
def test_another_recipe_is_found(precision, other):
    def linear(x: Tensor, weight: Tensor, gradient: Tensor, _: str) -> Results:
        three = x, weight, gradient
        return in_bf16(*three, "") if other == "bf16" else written_out(*three, other)

    errors = values(precision, linear)
    assert (max(errors) == 0) if precision == other else (min(errors) > 8 * MOST)


@pytest.mark.parametrize("precision", BLOCKS)
def test_sums_as_tensor_cores_keep_them_are_within_the_limit(precision):
    """14 bits after every 32 numbers, the rest cut off."""

    def cut(x: Tensor) -> Tensor:
        spacing = torch.exp2(torch.floor(torch.log2(x.abs())) - 13)
        return torch.where(x == 0, x, torch.trunc(x / spacing) * spacing)

    def product(left_RK: Tensor, right_SK: Tensor) -> Tensor:
        total = torch.zeros(len(left_RK), len(right_SK))
        for piece in range(0, left_RK.shape[1], 32):
            span = slice(piece, piece + 32)
            total = cut(total + left_RK[:, span] @ right_SK[:, span].t())
        return total.bfloat16()

    def linear(x: Tensor, weight: Tensor, gradient: Tensor, precision: str) -> Results:
        def factor(tensor: Tensor, role: str) -> Tensor:
            return rounded(tensor, role, precision)

        return (
            product(factor(x, ACTIVATION), factor(weight, WEIGHT)),
            product(factor(gradient, GRADIENT), factor(weight.t(), WEIGHT)),
            product(factor(gradient.t(), GRADIENT), factor(x.t(), ACTIVATION)),
        )

    errors = values(precision, linear)
    assert 0 < max(errors) <= MOST


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("role", [ACTIVATION, WEIGHT, GRADIENT])
def test_every_number_is_the_nearest_of_its_block(precision, role):
    """Block by block, by a search through all numbers of the format."""
    factor = torch.randn(130, 200, generator=torch.Generator().manual_seed(1)).exp()
    factor[:, :40] *= -1e-3
    factor[3] = 0
    result = rounded(factor, role, precision)

    kind = E5M2 if role == GRADIENT and precision == "fp8" else E4M3
    levels = kind.table()
    levels = levels[levels.isfinite()].unique().double()
    size = {"fp8": (130, 200), "mxfp8": (1, 32), "fp8_blockwise": (1, 128)}[precision]
    if role == WEIGHT and precision == "fp8_blockwise":
        size = (128, 128)
    pieces = factor.double().split(size[0], 0), result.double().split(size[0], 0)
    for rows, rounded_rows in zip(*pieces, strict=True):
        blocks = rows.split(size[1], 1), rounded_rows.split(size[1], 1)
        for block, numbers in zip(*blocks, strict=True):
            scale = float(block.abs().max()) / kind.largest or 1.0
            if precision != "fp8":
                scale = 2.0 ** math.ceil(math.log2(scale))
            above = torch.searchsorted(levels, block / scale).clamp(1, len(levels) - 1)
            nearest = torch.minimum(
                (block - levels[above] * scale).abs(), (block - levels[above - 1] * scale).abs()
            )
            # The scale is an fp32 number, rounded.
            assert torch.all((block - numbers).abs() <= nearest + block.abs() * 2e-7)


@pytest.fixture
def written_out_training(monkeypatch) -> None:
    """Training with products written out in place of Transformer Engine's."""

    def begin(directory: Path, device: str) -> Any:
        assert device == "cpu"
        succeed(python("tests.rehearsal.processes", "eight-bits", str(directory)))
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setattr(training, "begin", begin)
    monkeypatch.setattr(transformer_engine, "check_can_run", lambda _: None)


@pytest.mark.usefixtures("written_out_training")
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_training_is_compared(tmp_path, precision):
    (figure,) = transformer_engine.training(Workbench("cpu", IN_SMALL, tmp_path), precision)
    assert figure.verdict == "ok"
    assert (figure.value == 0) == (precision == "bf16")


@pytest.mark.stress
@pytest.mark.usefixtures("written_out_training")
@pytest.mark.parametrize("precision", BLOCKS)
def test_trainings_of_full_size_are_far_within_the_limit(tmp_path, precision):
    """A minute each. The limit leaves room for other seeds, and for the sums of another device."""
    (figure,) = transformer_engine.training(Workbench("cpu", FULL, tmp_path), precision)
    assert figure.most is not None
    assert 0 < float(figure.value or 0) < figure.most / 3
