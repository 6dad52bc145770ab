"""Learning rate as a pure function of the step."""

import math

from train.config import CosinePhase, RunConfig, ScheduleConfig


def _before_anneal(schedule: ScheduleConfig, peak_lr: float, step: int) -> float:
    if step < schedule.warmup_steps:
        return peak_lr * step / schedule.warmup_steps
    if isinstance(schedule.phase, CosinePhase):
        floor_lr = schedule.phase.floor * peak_lr
        if step >= schedule.phase.horizon_steps:
            return floor_lr
        progress = (step - schedule.warmup_steps) / (schedule.phase.horizon_steps - schedule.warmup_steps)
        return floor_lr + (peak_lr - floor_lr) * (1 + math.cos(math.pi * progress)) / 2
    return peak_lr


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of update `step`, counted from 1.

    OLMo sets the rate after incrementing its counter, so update n uses LR(n) and the first one peak / warmup_steps
    (allenai/OLMo, olmo/train.py); plainLM and Megatron's scheduler start at 0 instead. The anneal starts from the rate
    reached at its first step and reaches zero at the last step of the run.
    """
    anneal = config.schedule.anneal
    if anneal is None or step <= anneal.start_step:
        return _before_anneal(config.schedule, config.optimizer.peak_lr, step)
    start_lr = _before_anneal(config.schedule, config.optimizer.peak_lr, anneal.start_step)
    return start_lr * (config.total_steps - step) / (config.total_steps - anneal.start_step)
