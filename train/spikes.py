"""The rejection of updates whose losses or gradients overflowed, or are far above those before."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from train.engine import StepResult
from train.run.config import RunConfig


def _limit(values: Sequence[float], sigmas: float) -> float:
    """Return the mean plus `sigmas` sample standard deviations."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean + sigmas * math.sqrt(variance)


class StepJudge:
    """The judge of each update before it is made, by global figures: all ranks decide alike.

    A spike is a loss or gradient norm above the window of the last accepted steps (OLMo-core,
    SkipStepOptimizer). Until the window is full there are none; rejected steps do not enter it.

    Attributes:
        objection: why the last step was rejected; None if it was accepted.
        skips: whether a step with that objection is skipped; otherwise training is to stop.
    """

    def __init__(self, run: RunConfig, accepted: Iterable[tuple[float, float]]) -> None:
        self._spikes = run.spikes
        self._window: deque[tuple[float, float]] = deque(
            accepted if self._spikes else (),
            maxlen=self._spikes.window_steps if self._spikes else 0,
        )
        self.objection: str | None = None
        self.skips = False

    @property
    def accepted(self) -> tuple[tuple[float, float], ...]:
        """Return loss and gradient norm of the last accepted steps, oldest first, to be saved."""
        return tuple(self._window)

    def accept(self, result: StepResult) -> bool:
        """Return whether the update is to be made: `Engine.train_step` asks."""
        self.objection = None
        if not result.is_finite():
            self.objection = f"not finite: loss {result.loss}, gradient norm {result.grad_norm}"
            self.skips = False
        elif self._spikes:
            self.objection = self._spike(result, self._spikes.sigmas)
            self.skips = self._spikes.action == "skip"
        if self.objection is None:
            self._window.append((result.loss, result.grad_norm))
        return self.objection is None

    def _spike(self, result: StepResult, sigmas: float) -> str | None:
        if len(self._window) < (self._window.maxlen or 0):
            return None
        losses, norms = zip(*self._window, strict=True)
        for name, value, limit in (
            ("loss", result.loss, _limit(losses, sigmas)),
            ("gradient norm", result.grad_norm, _limit(norms, sigmas)),
        ):
            if value > limit:
                return f"a spike: {name} {value:.6g} is above {limit:.6g}, {sigmas:g} deviations"
        return None
