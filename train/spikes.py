"""Steps that are not taken: losses or gradients that overflowed, or that stand out from those before."""

import math
from collections import deque
from collections.abc import Iterable

from train.config import RunConfig
from train.engine import StepResult


def _limit(values: list[float], sigmas: float) -> float:
    """Mean plus `sigmas` sample standard deviations."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean + sigmas * math.sqrt(variance)


class StepJudge:
    """Decides before each update whether it is made. It sees global figures, so that all ranks decide alike.

    A spike stands above the window of the last accepted steps in loss or gradient norm (OLMo-core, SkipStepOptimizer);
    until the window is full there are none. Rejected steps do not enter it.

    Attributes:
        objection: why the last step was rejected; None if it was accepted.
        skips: whether a step with that objection is skipped; otherwise training is to stop.
    """

    def __init__(self, run: RunConfig, accepted: Iterable[tuple[float, float]]) -> None:
        self._spikes, self._not_finite = run.spikes, run.not_finite
        self._window: deque[tuple[float, float]] = deque(
            accepted if self._spikes else (), maxlen=self._spikes.window_steps if self._spikes else 0
        )
        self.objection: str | None = None
        self.skips = False

    @property
    def accepted(self) -> tuple[tuple[float, float], ...]:
        """Loss and gradient norm of the last accepted steps, oldest first: what a checkpoint keeps."""
        return tuple(self._window)

    def accept(self, result: StepResult) -> bool:
        """Whether the update is to be made: what `Engine.train_step` asks."""
        self.objection = None
        if not result.is_finite():
            self.objection = f"not finite: loss {result.loss}, gradient norm {result.grad_norm}"
            self.skips = self._not_finite == "skip"
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
        for name, value, before in (("loss", result.loss, losses), ("gradient norm", result.grad_norm, norms)):
            limit = _limit(list(before), sigmas)
            if value > limit:
                return f"a spike: {name} {value:.6g} lies above {limit:.6g}, {sigmas:g} standard deviations"
        return None
