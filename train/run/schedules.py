"""Learning rate as a pure function of the step."""

import math

from train.run.config import RunConfig
from train.run.optimization import Anneal, ConstantPhase


def _before_anneal(config: RunConfig, step: int) -> float:
    schedule, peak_lr = config.schedule, config.optimizer.peak_lr
    tokens = config.tokens_at(step)
    if tokens < schedule.warmup_tokens:
        return peak_lr * tokens / schedule.warmup_tokens
    if isinstance(schedule.phase, ConstantPhase):
        return peak_lr
    floor_lr = schedule.phase.floor * peak_lr
    if tokens >= schedule.phase.horizon_tokens:
        return floor_lr
    progress = (tokens - schedule.warmup_tokens) / (
        schedule.phase.horizon_tokens - schedule.warmup_tokens
    )
    return floor_lr + (peak_lr - floor_lr) * share_left("cosine", progress)


def share_left(shape: str, progress: float) -> float:
    """Return the share of a decay of this shape that is left: 1 at its start, 0 at its end.

    Example: a quarter of the way.
        >>> share_left("linear", 0.25), share_left("sqrt", 0.25), share_left("cosine", 0.5)
        (0.75, 0.5, 0.5)
    """
    if shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - math.sqrt(progress) if shape == "sqrt" else 1 - progress


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of update `step`, counted from 1.

    OLMo sets the rate after incrementing its counter, so update n uses LR(n) and the first one peak
    / warmup_steps (allenai/OLMo, olmo/train.py); plainLM and Megatron's scheduler start at 0
    instead. The anneal starts from the rate reached at its first step and ends at the last step of
    the run.
    """
    anneal: Anneal | None = config.schedule.anneal
    if anneal is None or step <= anneal.start_step:
        return _before_anneal(config, step)
    start_lr = _before_anneal(config, anneal.start_step)
    progress = (step - anneal.start_step) / (config.total_steps - anneal.start_step)
    return start_lr * (anneal.floor + (1 - anneal.floor) * share_left(anneal.shape, progress))


def first_step(config: RunConfig) -> int:
    """Return the step before the first update: 0, or where this run branches from its parent."""
    return config.branch_from.step if config.branch_from else 0
