"""The configuration of schedule, batch-size warm-up, averages and spikes."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Self, assert_never, override

from pydantic import Field, model_validator

from base.frozen import Frozen

Shape = Literal["linear", "cosine", "sqrt"]  # of a fall of the learning rate


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


class Phase(Frozen, ABC):
    """The learning rate between warm-up and anneal. A kind of it is one class, with all of these.

    Attributes:
        DECAYS: whether the rate falls in it, so that an anneal is one more fall.
    """

    DECAYS: ClassVar[bool]

    @abstractmethod
    def rate(self, peak_lr: float, tokens: int, warmup_tokens: int) -> float:
        """Return the learning rate after so many tokens, which are not fewer than the warm-up's."""

    @abstractmethod
    def title(self, *, annealed: bool) -> str:
        """Return the name of a schedule of this phase, with an anneal or without."""

    @abstractmethod
    def describe(self) -> str:
        """Return the phase in words."""

    def check(self, warmup_tokens: int) -> None:
        """Raise ValueError if the phase does not fit the warm-up."""


class ConstantPhase(Phase):
    """The peak learning rate from the end of the warm-up on."""

    DECAYS = False

    kind: Literal["constant"] = "constant"

    @override
    def rate(self, peak_lr: float, tokens: int, warmup_tokens: int) -> float:
        """Return the peak."""
        return peak_lr

    def title(self, *, annealed: bool) -> str:
        """Return the name of the schedule."""
        return "WSD" if annealed else "constant rate"

    def describe(self) -> str:
        """Return the phase in words."""
        return "constant rate"


class CosinePhase(Phase):
    """Cosine from the peak to `floor` x peak at `horizon_tokens`, perhaps after the run's end."""

    DECAYS = True

    kind: Literal["cosine"] = "cosine"
    horizon_tokens: int = Field(gt=0)
    floor: float = Field(default=0.1, ge=0, le=1)

    def rate(self, peak_lr: float, tokens: int, warmup_tokens: int) -> float:
        """Return the rate on the cosine, and after its horizon the floor."""
        progress = min(1.0, (tokens - warmup_tokens) / (self.horizon_tokens - warmup_tokens))
        floor_lr = self.floor * peak_lr
        return floor_lr + (peak_lr - floor_lr) * share_left("cosine", progress)

    def title(self, *, annealed: bool) -> str:
        """Return the name of the schedule."""
        return "cosine with an anneal" if annealed else "cosine"

    def describe(self) -> str:
        """Return the phase in words: 'cosine to 10% of the peak at 2,560 tokens'."""
        return f"cosine to {_share(self.floor, 'the peak')} at {self.horizon_tokens:,} tokens"

    def check(self, warmup_tokens: int) -> None:
        """Raise ValueError if the cosine ends within the warm-up."""
        if self.horizon_tokens <= warmup_tokens:
            raise ValueError(f"the cosine ends within the warm-up of {warmup_tokens} tokens")


class Anneal(Frozen):
    """A fall from the rate reached at `start_step` to `floor` x that rate at the run's last step.

    With progress t from 0 to 1 the rate falls as 1 - t (linear), (1 + cos(pi t)) / 2 (cosine), or 1
    - sqrt(t) (sqrt; Haegele et al. 2024, arXiv 2405.18392).
    """

    start_step: int = Field(ge=0)
    shape: Shape = "linear"
    floor: float = Field(default=0.0, ge=0, le=1)

    def describe(self) -> str:
        """Return the fall with its floor: 'linear anneal from step 80 to 50% of the rate there'."""
        end = _share(self.floor, "the rate there")
        return f"{self.shape} anneal from step {self.start_step} to {end}"


def _share(floor: float, whole: str) -> str:
    return f"{100 * floor:g}% of {whole}" if floor else "zero"


class ScheduleConfig(Frozen):
    """Learning rate over tokens: linear warm-up from zero, a phase, perhaps an anneal (in steps).

    A constant phase with an anneal is WSD (arXiv 2404.06395).
    """

    warmup_tokens: int = Field(ge=0)
    phase: ConstantPhase | CosinePhase = Field(discriminator="kind")
    anneal: Anneal | None = None

    @property
    def name(self) -> str:
        """Return the kind of schedule: WSD, constant rate, cosine or cosine with an anneal."""
        return self.phase.title(annealed=self.anneal is not None)

    def describe(self, warmup_steps: int) -> str:
        """Return the schedule in words, from the warm-up to the rate of the last step.

        Args:
            warmup_steps: `RunConfig.warmup_steps`, which depend on the sizes of batches.

        Example:
            >>> anneal = Anneal(start_step=80, floor=0.5)
            >>> ScheduleConfig(warmup_tokens=0, phase=ConstantPhase(), anneal=anneal).describe(0)
            'constant rate, linear anneal from step 80 to 50% of the rate there'
        """
        parts = [f"warm-up to step {warmup_steps}"] if self.warmup_tokens else []
        parts.append(self.phase.describe())
        if self.anneal:
            parts.append(self.anneal.describe())
        return ", ".join(parts)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        self.phase.check(self.warmup_tokens)
        return self


class SmallerBatch(Frozen):
    """A stage of the batch-size warm-up."""

    until_step: int = Field(gt=0, description="the last update of the stage")
    batch_size: int = Field(gt=0, description="sequences per optimizer step, over all ranks")


class Lawa(Frozen):
    """Latest weight averaging (arXiv 2209.14981): the mean of `window` weights."""

    kind: Literal["lawa"] = "lawa"
    interval_steps: int = Field(gt=0)
    window: int = Field(gt=1)

    @property
    def slots(self) -> int:
        """Return the copies of the weights that it keeps."""
        return self.window

    @property
    def name(self) -> str:
        """Return the name of its checkpoints: lawa5x500."""
        return f"lawa{self.window}x{self.interval_steps}"

    def describe(self) -> str:
        """Return the average in words."""
        return f"LAWA, {self.window} weights {self.interval_steps} steps apart"


class Ema(Frozen):
    """Exponential moving average of the weights, updated every `interval_steps` by 1 - `decay`."""

    kind: Literal["ema"] = "ema"
    decay: float = Field(gt=0, lt=1)
    interval_steps: int = Field(default=1, gt=0)
    slots: ClassVar[int] = 1  # copies of the weights that it keeps

    @property
    def name(self) -> str:
        """Return the name of its checkpoints: ema0.999x10."""
        return f"ema{self.decay:g}x{self.interval_steps}"

    def describe(self) -> str:
        """Return the average in words."""
        return f"EMA, decay {self.decay:g} every {self.interval_steps} steps"


class SpikeConfig(Frozen):
    """Steps whose loss or gradient norm is `sigmas` standard deviations above the steps before.

    OLMo2-32B skips such steps (OLMo-core, SkipStepOptimizer, 6 sigmas over 128 steps). Skipped
    steps count among the steps before: a loss that stays high is soon no spike any more, one that
    keeps rising stops the run. Where a perturbation begins, no step before counts any more.
    """

    window_steps: int = Field(default=128, gt=1, description="steps before, at most")
    sigmas: float = Field(default=6.0, gt=0)
    action: Literal["stop", "skip"] = "stop"
    most_skips: int = Field(default=32, gt=0, description="in a row; one more stops the run")
