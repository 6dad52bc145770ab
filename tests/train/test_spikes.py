"""The judge of spikes against numpy, on losses that shift, jump, drift and run away.

Also where a skipped update leaves the loss as it was, which an update made would have changed.
"""

import json
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from train.engine import StepResult
from train.run.optimization import SpikeConfig
from train.spikes import StepJudge

WINDOW, SIGMAS, NOISE = 128, 6.0, 0.01


def spikes_of(figures_S2: np.ndarray, *, window_steps: int, sigmas: float) -> list[bool]:
    """Spikes by all steps before each, at most a window, once there is half of one."""
    spikes = []
    for step, now_2 in enumerate(figures_S2):
        before_S2 = figures_S2[max(0, step - window_steps) : step]
        judged = step >= max(2, window_steps // 2 - 1)
        limit_2 = before_S2.mean(0) + sigmas * before_S2.std(0, ddof=1) if judged else math.inf
        spikes.append(bool((now_2 > limit_2).any()))
    return spikes


def judge_of(record: Any = None, **changes: Any) -> StepJudge:
    settings: dict[str, Any] = {"window_steps": WINDOW, "sigmas": SIGMAS, "action": "skip"}
    run: Any = SimpleNamespace(spikes=SpikeConfig(**settings | changes))
    return StepJudge(run, record)


def result(loss: float, norm: float = 1.0) -> StepResult:
    return StepResult(loss, norm, {})


def noise(count: int, seed: int = 0) -> np.ndarray:
    return NOISE * np.random.default_rng(seed).standard_normal(count)


SHIFT, SPIKE, DRIFT, FALL_WITH_OUTLIERS = [
    lambda step: 0.15 * (step >= 200),
    lambda step: 5.0 * (step == 200),
    lambda step: 0.002 * step,
    lambda step: 3 * math.exp(-step / 50) + 0.2 * (step % 97 == 0),
]


@pytest.mark.parametrize("of_step", [SHIFT, SPIKE, DRIFT, FALL_WITH_OUTLIERS])
@pytest.mark.parametrize("window", [2, 5, WINDOW])
def test_decisions_are_those_of_numpy(of_step, window):
    """Loss and gradient norm each have a limit; at small windows steps are often rejected."""
    losses = noise(600) + [3 + of_step(step) for step in range(600)]
    figures_S2 = np.stack([losses, 1 + np.roll(losses, 30)], 1)
    sigmas = 6.0 if window == WINDOW else 0.5
    judge = judge_of(window_steps=window, sigmas=sigmas, most_skips=600)
    ours = [not judge.accept(result(*figures)) for figures in figures_S2.tolist()]
    assert ours == spikes_of(figures_S2, window_steps=window, sigmas=sigmas)


@pytest.mark.parametrize(("of_step", "most"), [(SHIFT, 5), (SPIKE, 1), (DRIFT, 0)])
def test_few_steps_are_skipped_whatever_comes(of_step, most):
    """A level that is higher for good is learned from after some steps; before, never again."""
    judge = judge_of()
    skipped = [
        not judge.accept(result(3 + of_step(step) + error))
        for step, error in enumerate(noise(5000))
    ]
    assert sum(skipped) <= most
    assert any(skipped) == (most > 0)


class OlmoCore:
    """The rule of OLMo-core's SkipStepOptimizer at fa6c501, in our words: what it looks at is the
    list of all losses so far, the last one included.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []

    def accept(self, loss: float) -> bool:
        self.losses = [*self.losses[-WINDOW:], loss]
        if len(self.losses) < max(2, WINDOW // 2):
            return True
        *before, last = self.losses
        return bool(last - np.mean(before) <= SIGMAS * np.std(before, ddof=1))


# The level of the loss by updates made since step 200: higher until 50 of them have trained that
# away, higher for good, a single spike, a slow rise that updates bring down again.
LEVELS = {
    "shift that training undoes": lambda step, made: 0.15 * max(0, 1 - made / 50) * (step >= 200),
    "shift for good": lambda step, made: 0.15 * (step >= 200),
    "spike": lambda step, made: 5.0 * (step == 200),
    "drift": lambda step, made: 0.002 * (step - made) * (step >= 200),
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_skipped_as_by_olmo_core_and_never_frozen(level):
    """Both rules train, each its own run on the same noise."""
    outcomes = []
    judge, other = judge_of(), OlmoCore()
    for accept in (lambda loss: judge.accept(result(loss)), other.accept):
        made, skipped = 0, []
        for step, error in enumerate(noise(1500)):
            accepted = accept(3 + LEVELS[level](step, made) + error)
            made += step >= 200 and accepted
            skipped += [] if accepted else [step]
        outcomes.append((skipped, made))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) <= 5
    assert outcomes[0][1] >= 1295  # of 1300


@pytest.mark.parametrize(("sigmas", "expected"), [(6.0, 4), (3.0, 13), (2.0, 26)])
def test_a_shift_without_noise_by_hand(sigmas, expected):
    """With a share p of the window shifted by D, the limit is p D + sigmas D sqrt(p (1 - p)): it
    reaches D at p = 1 / (1 + sigmas^2), by the sample deviation of 128 a little before.
    """
    judge = judge_of(sigmas=sigmas)
    for _ in range(WINDOW):
        assert judge.accept(result(3.0))
    for _ in range(expected):
        assert not judge.accept(result(4.0))
        assert judge.skips
    assert judge.accept(result(4.0))
    assert judge.skips_in_a_row == 0


def test_a_loss_that_runs_away_stops_the_run():
    """Each step is a spike beside all before: 32 are skipped, the next one ends it."""
    judge = judge_of()
    for error in noise(WINDOW):
        judge.accept(result(3 + error))
    for step in range(33):
        assert not judge.accept(result(3 + 10.0 ** (step + 1)))
        assert judge.skips == (step < 32)
    assert str(judge.objection).startswith("after 32 steps skipped in a row again a spike: loss 1e")


def test_action_stop_skips_nothing():
    judge = judge_of(action="stop")
    for error in noise(WINDOW):
        judge.accept(result(3 + error))
    assert not judge.accept(result(4.0))
    assert not judge.skips


def test_what_is_not_finite_stops_and_leaves_no_trace():
    judge = judge_of(window_steps=2)
    for loss in (1.0, 1.1, math.nan, math.inf):
        judge.accept(result(loss))
    assert str(judge.objection).startswith("not finite: loss inf")
    assert not judge.skips
    assert judge.saved["judged_steps"] == ((1.0, 1.0), (1.1, 1.0))


def resumed_after(judge: StepJudge) -> StepJudge:
    """A judge made of what checkpoint.json holds of another."""
    saved = json.loads(json.dumps(judge.saved))
    saved["judged_steps"] = tuple((loss, norm) for loss, norm in saved["judged_steps"])
    return judge_of(SimpleNamespace(**saved), most_skips=4)


def decisions(judges: Sequence[StepJudge], losses: Iterator[float]) -> Iterator[tuple[Any, ...]]:
    for loss in losses:
        yield tuple((judge.accept(result(loss)), judge.objection, judge.skips) for judge in judges)


def test_a_resumed_judge_decides_to_the_bit_as_one_that_never_stopped():
    """Also within skips in a row."""
    losses = [3 + error for error in noise(200)] + [1e3, 1e6, 1e9, 1e12, 1e15]
    for stop in (3, 100, 202, 204):
        whole = judge_of(most_skips=4)
        for loss in losses[:stop]:
            whole.accept(result(loss))
        again = resumed_after(whole)
        for expected, resumed in decisions([whole, again], iter(losses[stop:])):
            assert resumed == expected
        assert again.saved == whole.saved
        assert str(whole.objection).startswith("after 4 steps")
