"""Learning rate as a pure function of the step."""

import math

from train.config import RunConfig
from train.settings import Anneal, ConstantPhase


def _before_anneal(config: RunConfig, step: int) -> float:
    schedule, peak_lr, tokens = config.schedule, config.optimizer.peak_lr, step * config.tokens_per_step
    if tokens < schedule.warmup_tokens:
        return peak_lr * tokens / schedule.warmup_tokens
    if isinstance(schedule.phase, ConstantPhase):
        return peak_lr
    floor_lr = schedule.phase.floor * peak_lr
    if tokens >= schedule.phase.horizon_tokens:
        return floor_lr
    progress = (tokens - schedule.warmup_tokens) / (schedule.phase.horizon_tokens - schedule.warmup_tokens)
    return floor_lr + (peak_lr - floor_lr) * share_left(schedule.phase.kind, progress)


def share_left(shape: str, progress: float) -> float:
    """The share of the way down that is still left: 1 at the start of a decay of this shape, 0 at its end."""
    if shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - math.sqrt(progress) if shape == "sqrt" else 1 - progress


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of update `step`, counted from 1.

    OLMo sets the rate after incrementing its counter, so update n uses LR(n) and the first one peak / warmup_steps
    (allenai/OLMo, olmo/train.py); plainLM and Megatron's scheduler start at 0 instead. The anneal starts from the rate
    reached at its first step and ends at the last step of the run.
    """
    anneal: Anneal | None = config.schedule.anneal
    if anneal is None or step <= anneal.start_step:
        return _before_anneal(config, step)
    start_lr = _before_anneal(config, anneal.start_step)
    progress = (step - anneal.start_step) / (config.total_steps - anneal.start_step)
    return start_lr * (anneal.floor + (1 - anneal.floor) * share_left(anneal.shape, progress))


def phase_at(config: RunConfig, step: int) -> str:
    """What decides the learning rate of update `step`: 'warm-up', the phase's kind, its floor, or the anneal."""
    schedule, tokens = config.schedule, step * config.tokens_per_step
    if schedule.anneal and step > schedule.anneal.start_step:
        return f"{schedule.anneal.shape} anneal"
    if tokens < schedule.warmup_tokens:
        return "warm-up"
    if not isinstance(schedule.phase, ConstantPhase) and tokens >= schedule.phase.horizon_tokens:
        return f"{schedule.phase.kind} floor"
    return schedule.phase.kind


def first_step(config: RunConfig) -> int:
    """The step before the first update: 0, or the step of the parent that this run branches from."""
    return config.branch_from.step if config.branch_from else 0


def corner_steps(config: RunConfig) -> list[int]:
    """Steps at which the learning rate begins, bends or ends, rising: straight or smooth curves lie in between."""
    phase, anneal = config.schedule.phase, config.schedule.anneal
    corners = {first_step(config), config.warmup_steps, config.total_steps}
    if not isinstance(phase, ConstantPhase):
        corners.add(-(-phase.horizon_tokens // config.tokens_per_step))
    if anneal:
        corners = {step for step in corners if step < anneal.start_step} | {anneal.start_step, config.total_steps}
    return sorted(step for step in corners if first_step(config) <= step <= config.total_steps)
