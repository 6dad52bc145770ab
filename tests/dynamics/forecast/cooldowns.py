"""Cooldowns whose errors follow a known law, with noise of a known size."""

import math
from dataclasses import replace

import numpy as np

from dynamics.forecast.models import Cooldown

PAST = (100, 200, 400, 800)  # tokens of the checkpoints of the stable phase


def cooldown(label: str = "one", *, exponent: float = 0.5, tokens_end: int = 1000) -> Cooldown:
    """A cooldown to be forecast, of a run whose error is a power law in the tokens."""
    return Cooldown(
        label=label,
        group=label,
        stem=label,
        step=8,
        past=tuple((tokens, 0.01 * (tokens / 100) ** exponent) for tokens in PAST),
        tokens_end=tokens_end,
        error_end=None,
        signals={},
    )


def drawn(generator, groups: int, seeds: int, *, a: float, b: float, noise: float):
    """Cooldowns with log end - log start = a log growth + b log signal + noise."""
    cooldowns = []
    for group in range(groups):
        for seed in range(seeds):
            signal = generator.normal(0.3, 0.2)
            sample = cooldown(
                f"{group}, seed {seed}", tokens_end=int(generator.integers(900, 1600))
            )
            sample = replace(sample, group=str(group), stem=str(group), signals={"error": signal})
            log_end = sample.log_error + a * sample.growth + b * signal + generator.normal(0, noise)
            cooldowns.append(replace(sample, error_end=math.exp(log_end)))
    return cooldowns


def rng(seed: int = 0) -> np.random.Generator:
    """A generator of its own."""
    return np.random.default_rng(seed)
