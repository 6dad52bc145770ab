"""Learning rate as a pure function of the step, and in words."""

import math
from collections.abc import Iterator
from typing import assert_never

from train.run.config import RunConfig
from train.run.optimization import Anneal, ConstantPhase, CosinePhase, Shape


def _before_anneal(config: RunConfig, step: int) -> float:
    schedule, peak_lr = config.schedule, config.optimizer.peak_lr
    tokens, begin = config.tokens_at(step), schedule.warmup_tokens
    if tokens < begin:
        return peak_lr * tokens / begin
    match schedule.phase:
        case ConstantPhase():
            return peak_lr
        case CosinePhase(horizon_tokens=end, floor=floor):
            floor_lr, progress = floor * peak_lr, min(1.0, (tokens - begin) / (end - begin))
            return floor_lr + (peak_lr - floor_lr) * share_left("cosine", progress)
        case phase:
            assert_never(phase)


def share_left(shape: Shape, progress: float) -> float:
    """Return the share of a decay of this shape that is left: 1 at its start, 0 at its end.

    Args:
        shape: linear, cosine, or sqrt for 1 - sqrt(progress).
        progress: from 0 to 1.

    Example:
        >>> [round(share_left(shape, 0.25), 3) for shape in ("linear", "cosine", "sqrt")]
        [0.75, 0.854, 0.5]
    """
    match shape:
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "sqrt":
            return 1 - math.sqrt(progress)
        case _:
            assert_never(shape)


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of update `step`, counted from 1.

    OLMo sets the rate after incrementing its counter, so update n uses LR(n) and the first one peak
    / warmup_steps (allenai/OLMo, olmo/train.py); plainLM and Megatron's scheduler start at 0
    instead. The anneal starts from the rate reached at its first step and ends at the last step of
    the run.

    Example: at a token a step, warm-up over 10 steps, and an anneal over the last 20 of 100.
        >>> from types import SimpleNamespace as Run
        >>> from train.run.optimization import OptimizerConfig, ScheduleConfig
        >>> phases = {"phase": ConstantPhase(), "anneal": Anneal(start_step=80)}
        >>> settings = {"optimizer": OptimizerConfig(peak_lr=1.0), "total_steps": 100}
        >>> schedule = ScheduleConfig(warmup_tokens=10, **phases)
        >>> run = Run(tokens_at=int, schedule=schedule, **settings)
        >>> [learning_rate(run, step) for step in (1, 10, 80, 90, 100)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    anneal: Anneal | None = config.schedule.anneal
    if anneal is None or step <= anneal.start_step:
        return _before_anneal(config, step)
    start_lr = _before_anneal(config, anneal.start_step)
    progress = (step - anneal.start_step) / (config.total_steps - anneal.start_step)
    return start_lr * (anneal.floor + (1 - anneal.floor) * share_left(anneal.shape, progress))


def describe(config: RunConfig) -> str:
    """Return the schedule in words, from the warm-up to the rate of the last step.

    Example: of the run in the example of `learning_rate`, with an anneal to half the rate.
        >>> from types import SimpleNamespace as Run
        >>> from train.run.optimization import ScheduleConfig
        >>> anneal = Anneal(start_step=80, floor=0.5)
        >>> schedule = ScheduleConfig(warmup_tokens=10, phase=ConstantPhase(), anneal=anneal)
        >>> describe(Run(schedule=schedule, warmup_steps=10))
        'warm-up to step 10, constant rate, linear anneal from step 80 to 50% of the rate there'
    """
    return ", ".join(_parts(config))


def _parts(config: RunConfig) -> Iterator[str]:
    schedule = config.schedule
    if schedule.warmup_tokens:
        yield f"warm-up to step {config.warmup_steps}"

    match schedule.phase:
        case ConstantPhase():
            yield "constant rate"
        case CosinePhase(floor=floor, horizon_tokens=horizon):
            yield f"cosine to {_share(floor, 'the peak')} at {horizon:,} tokens"
        case other:
            assert_never(other)

    if anneal := schedule.anneal:
        end = _share(anneal.floor, "the rate there")
        yield f"{anneal.shape} anneal from step {anneal.start_step} to {end}"


def _share(floor: float, whole: str) -> str:
    return f"{100 * floor:g}% of {whole}" if floor else "zero"


def first_step(config: RunConfig) -> int:
    """Return the step before the first update: 0, or where this run branches from its parent."""
    return config.branch_from.step if config.branch_from else 0
