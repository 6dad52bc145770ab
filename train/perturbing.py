"""Updates whose forward and backward passes see other weights: QAT, noise and SAM.

An engine's `train_step` asks `accept` between the backward pass and the update. There the exact
weights are restored, bit for bit, and so the gradient at the changed weights updates the exact
ones. Checkpoints, held-out losses and averages never see a changed weight.

Settings are in `train.run.perturbation`. As in `train.rounding`, weights are rounded by functions
of `quant_eval` that are looked up by their names.

Shapes: O output features (rows), I input features.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, assert_never

import torch
from torch import Tensor

from base.random_words import words_at
from train.data.batches import Batch
from train.engine import Accept, Engine, Flags, Linear, StepResult
from train.model.config import parameter_shapes
from train.run.config import RunConfig
from train.run.perturbation import Noise, Qat, Sam

# As of `Engine.train_step`.
TrainStep = Callable[..., StepResult]
# Returns the weight [O, I] that replaces the one given.
Change = Callable[[Linear, Tensor], Tensor]

PROBING = "quant_eval.probing"


def train_step_of(run: RunConfig, engine: Engine, step: int) -> TrainStep:
    """Return what makes update `step`: the engine's `train_step`, or one with changed weights."""
    perturbation = run.perturbation
    if perturbation is None or not run.perturbed_at(step):
        return engine.train_step
    match perturbation:
        case Qat():
            return partial(_with_changed_linears, engine, perturbation, _rounded(perturbation))
        case Noise():
            change = _noisy(perturbation, run, step)
            return partial(_with_changed_linears, engine, perturbation, change)
        case Sam():
            return partial(_after_ascent, engine, perturbation)
        case _:
            assert_never(perturbation)


def _of_probing(name: str) -> Any:
    return getattr(import_module(PROBING), name)


def _rounded(settings: Qat) -> Change:
    """Return the rounding of a weight to the spec's grid."""
    round_by_names = _of_probing("round_by_names")

    def change(linear: Linear, weight_OI: Tensor) -> Tensor:
        rounded_OI: Tensor = round_by_names([settings.spec], weight_OI, None, linear.name)[0]
        return rounded_OI

    return change


def _noisy(settings: Noise, run: RunConfig, step: int) -> Change:
    """Return the addition of noise of the size of the spec's rounding errors.

    The number at a place of a weight is a function of seed, step, name and place: of no layout.
    """
    step_sizes, shapes = _of_probing("step_sizes"), parameter_shapes(run.model)

    def change(linear: Linear, weight_OI: Tensor) -> Tensor:
        rows, columns = (
            torch.arange(first, first + count, device=weight_OI.device)
            for first, count in zip((linear.row, linear.column), weight_OI.shape, strict=True)
        )
        places_OI = rows[:, None] * shapes[linear.name][1] + columns
        words_OI = words_at(f"{run.seed}/{step}/{linear.name}", places_OI)
        step_OI = step_sizes(settings.spec, weight_OI) * settings.size
        noise_OI: Tensor = step_OI * _centered(words_OI, settings.distribution)
        return weight_OI + noise_OI

    return change


def _centered(words: Tensor, distribution: str) -> Tensor:
    """Return a number for each word, fp32, of variance 1 / 12: uniform in +-1/2, or normal."""
    # 24 bits are exact in fp32; the half keeps them off the ends.
    uniform = ((words >> 40) & ((1 << 24) - 1)).float().add_(0.5).mul_(2.0**-24)
    if distribution == "uniform":
        return uniform - 0.5
    normal: Tensor = torch.special.ndtri(uniform)
    return normal / math.sqrt(12)


@torch.no_grad()
def _with_changed_linears(
    engine: Engine,
    settings: Qat | Noise,
    change: Change,
    batch: Batch,
    learning_rate: float,
    accept: Accept,
    flags: Flags = tuple,
) -> StepResult:
    """Run the engine's `train_step` at changed weights of linears; update the exact ones."""
    pieces: list[Tensor] = []
    exact: list[Tensor] = []
    for linear in engine.linears():
        if settings.takes(linear.name):
            weight_OI = torch.cat(linear.pieces)
            changed_OI = change(linear, weight_OI)
            pieces.extend(linear.pieces)
            rows = [len(piece) for piece in linear.pieces]
            exact.extend(weight_OI.split(rows))
            torch._foreach_copy_(list(linear.pieces), list(changed_OI.split(rows)))

    def restore(result: StepResult) -> bool:
        torch._foreach_copy_(pieces, exact)
        return accept(result)

    with torch.enable_grad():
        return engine.train_step(batch, learning_rate, restore, flags)


def _after_ascent(
    engine: Engine,
    settings: Sam,
    batch: Batch,
    learning_rate: float,
    accept: Accept,
    flags: Flags = tuple,
) -> StepResult:
    """Run the engine's `train_step` at the weights after a step up the loss of the batch."""
    raise NotImplementedError
