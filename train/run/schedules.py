"""Learning rate as a pure function of the step."""

from train.run.config import RunConfig
from train.run.optimization import Anneal, share_left


def _before_anneal(config: RunConfig, step: int) -> float:
    schedule, peak_lr = config.schedule, config.optimizer.peak_lr
    tokens, begin = config.tokens_at(step), schedule.warmup_tokens
    if tokens < begin:
        return peak_lr * tokens / begin
    return schedule.phase.rate(peak_lr, tokens, begin)


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of update `step`, counted from 1.

    OLMo sets the rate after incrementing its counter, so update n uses LR(n) and the first one peak
    / warmup_steps (allenai/OLMo, olmo/train.py); plainLM and Megatron's scheduler start at 0
    instead. The anneal starts from the rate reached at its first step and ends at the last step of
    the run.

    Example: at a token a step, warm-up over 10 steps, and an anneal over the last 20 of 100.
        >>> from types import SimpleNamespace as Run
        >>> from train.optimizers.adamw import AdamW
        >>> from train.run.optimization import ConstantPhase, ScheduleConfig
        >>> phases = {"phase": ConstantPhase(), "anneal": Anneal(start_step=80)}
        >>> settings = {"optimizer": AdamW(peak_lr=1.0), "total_steps": 100}
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


def first_step(config: RunConfig) -> int:
    """Return the step before the first update: 0, or where this run branches from its parent."""
    return config.branch_from.step if config.branch_from else 0


def perturbed_in_words(config: RunConfig) -> str:
    """Return the perturbation with the updates that have it; empty for a run without one.

    Example: 'SAM rho 0.05: 2 passes of the steps 5,001 to 6,000'.
    """
    perturbation, first, last = config.perturbation, config.perturbed_from, config.total_steps
    if perturbation is None or first is None:
        return ""
    passes = f"{perturbation.PASSES} passes of " if perturbation.PASSES > 1 else ""
    count = config.perturbed_steps(first - 1, last)
    some = "" if count == last - first + 1 else f"{count:,} of "
    return f"{perturbation.describe()}: {passes}{some}the steps {first:,} to {last:,}"
