"""The rejection of updates whose losses or gradients overflowed, or are far above those before.

A run that cannot continue for that has diverged. That is a result of training, not a failure of it.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from base.errors import UserError
from train.engine import StepResult
from train.run.config import RunConfig
from train.run.directory import CheckpointRecord, RunDirectory


class DivergedError(UserError):
    """The end of a run that diverged at `step`.

    Attributes:
        loss: of training at that step, nats per token; None where it is not finite.
    """

    def __init__(
        self, directory: RunDirectory, run: str, step: int, figures: str, loss: float | None
    ) -> None:
        self.loss = loss if loss is not None and math.isfinite(loss) else None
        steps = sorted(directory.complete_steps() + directory.complete_restarts())
        super().__init__(
            f"{run} diverged at step {step}: {figures}; the last good checkpoint is"
            f" {f'step {steps[-1]}' if steps else 'none'}, lower the peak learning rate"
        )


def _limit(values: Sequence[float], sigmas: float) -> float:
    """Return the mean plus `sigmas` sample standard deviations."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean + sigmas * math.sqrt(variance)


class StepJudge:
    """The judge of each update before it is made, by global figures: all ranks decide alike.

    A spike is a loss or gradient norm far above those of the steps before, at most `window_steps`
    (OLMo-core, SkipStepOptimizer). All of them count, skipped ones too: otherwise a loss that rose
    for good would be a spike for ever, and the weights would never change again. Steps are judged
    once they are half a window, themselves included.

    Args:
        run: its spikes say what is one; without, only what is not finite is rejected.
        record: of the checkpoint that the run resumes from.

    Attributes:
        objection: why the last step was rejected; None if it was accepted.
        skips: whether a step with that objection is skipped; otherwise training is to stop.
        skips_in_a_row: number of the last steps that were skipped.
    """

    def __init__(self, run: RunConfig, record: CheckpointRecord | None) -> None:
        self._spikes = run.spikes
        self._window: deque[tuple[float, float]] = deque(
            record.judged_steps if record and self._spikes else (),
            maxlen=self._spikes.window_steps if self._spikes else 0,
        )
        self.skips_in_a_row = record.skips_in_a_row if record else 0
        self.objection: str | None = None
        self.skips = False

    @property
    def saved(self) -> dict[str, Any]:
        """Return the fields of a CheckpointRecord by which a resumed run judges as this one."""
        return {"judged_steps": tuple(self._window), "skips_in_a_row": self.skips_in_a_row}

    def forget(self) -> None:
        """Judge the next steps by themselves alone: losses before have another level."""
        self._window.clear()

    def accept(self, result: StepResult) -> bool:
        """Return whether the update is to be made: `Engine.train_step` asks."""
        self.objection, self.skips = None, False
        if not result.is_finite():
            self.objection = f"not finite: loss {result.loss}, gradient norm {result.grad_norm}"
        elif self._spikes:
            self.objection = self._spike(result, self._spikes.sigmas)
            # A step is judged by those before it; then it is one of them, skipped or not.
            self._window.append((result.loss, result.grad_norm))
            self._count(self._spikes.action == "skip", self._spikes.most_skips)
        return self.objection is None

    def _count(self, skips: bool, most: int) -> None:
        """Decide whether a rejected step is skipped: one skip too many in a row stops the run."""
        if self.objection is None:
            self.skips_in_a_row = 0
        elif skips and self.skips_in_a_row == most:
            self.objection = f"after {most} steps skipped in a row again {self.objection}"
        elif skips:
            self.skips = True
            self.skips_in_a_row += 1

    def _spike(self, result: StepResult, sigmas: float) -> str | None:
        count, window_steps = len(self._window), self._window.maxlen or 0
        if count < 2 or count + 1 < window_steps // 2:  # two have a deviation
            return None
        losses, norms = zip(*self._window, strict=True)
        for name, value, limit in (
            ("loss", result.loss, _limit(losses, sigmas)),
            ("gradient norm", result.grad_norm, _limit(norms, sigmas)),
        ):
            if value > limit:
                return f"a spike: {name} {value:.6g} is above {limit:.6g}, {sigmas:g} deviations"
        return None
