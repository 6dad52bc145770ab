"""Updates whose forward and backward passes see other weights: QAT, noise and SAM.

An engine's `train_step` asks `accept` between the backward pass and the update. There the exact
weights are restored, bit for bit, and so the gradient at the changed weights updates the exact
ones. Loss and gradient norm of such an update are those at the changed weights. Checkpoints,
held-out losses, probes and averages never see one: an update that an error ends leaves the engine
with changed weights, and the run ends with it, without a save.

The weights that are changed are those that the engine computes with: bf16 ones under megatron in
bf16, whose changed values are bf16 again, and else fp32 ones, which DeepSpeed in bf16 casts in its
products. An export in fp32 or bf16 has the same weights, and `quant_eval run` rounds them alike.

Settings are in `train.run.perturbation`, changes of weights in `train.weight_changes`, the passes
of SAM in `train.ascending`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

from train.ascending import after_ascent
from train.data.batches import Batch
from train.engine import Accept, Change, Engine, Flags, LinearPart, StepResult
from train.run.config import RunConfig
from train.run.perturbation import Noise, Qat, Sam
from train.weight_changes import noisy, rounded

# As of `Engine.train_step`.
TrainStep = Callable[..., StepResult]


def train_step_of(run: RunConfig, engine: Engine, step: int) -> TrainStep:
    """Return what makes update `step`: the engine's `train_step`, or one with changed weights."""
    perturbation = run.perturbation
    if perturbation is None or not run.perturbed_at(step):
        return engine.train_step
    match perturbation:
        case Qat() | Noise():
            return partial(_with_changed_linears, engine, perturbation, run, step)
        case Sam():
            return partial(after_ascent, engine, perturbation)
        case _:
            assert_never(perturbation)


def _change_of(
    settings: Qat | Noise, run: RunConfig, step: int, linears: Iterable[LinearPart]
) -> Change:
    """Return the change of a weight at an update."""
    if isinstance(settings, Qat):
        return rounded(settings, run, linears)
    return noisy(settings, run, step)


def _with_changed_linears(
    engine: Engine,
    settings: Qat | Noise,
    run: RunConfig,
    step: int,
    batch: Batch,
    learning_rate: float,
    accept: Accept,
    flags: Flags = tuple,
) -> StepResult:
    """Run the engine's `train_step` at changed weights of linears; update the exact ones."""
    restore = engine.change_linears(_change_of(settings, run, step, engine.linears()))

    def restored(result: StepResult) -> bool:
        restore()
        return accept(result)

    return engine.train_step(batch, learning_rate, restored, flags)
