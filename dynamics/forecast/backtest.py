"""The back-test: every cooldown forecast from the others, its own runs left out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from scipy.stats import binomtest

from dynamics.forecast.models import MODELS, Cooldown, Forecast, Model

LEAST_COOLDOWNS = 10  # below, a ranking is that of these cooldowns
ALPHA = 0.05


class Scored(NamedTuple):
    """A forecast with the cooldown that it is of."""

    cooldown: Cooldown
    forecast: Forecast
    measured: float

    @property
    def error(self) -> float:
        """The distance |log(forecast / measured)|."""
        return abs(math.log(self.forecast.error / self.measured))

    @property
    def is_covered(self) -> bool | None:
        """The interval holds the measured error; None without an interval."""
        interval = self.forecast.interval
        return interval and interval[0] <= self.measured <= interval[1]


@dataclass(frozen=True)
class Score:
    """A model's forecasts of the cooldowns that it could forecast."""

    model: Model
    forecasts: list[Scored]

    @property
    def errors(self) -> list[float]:
        """The distances |log(forecast / measured)|."""
        return [scored.error for scored in self.forecasts]

    @property
    def by_group(self) -> dict[str, float]:
        """The mean of `errors` over the seeds of each group."""
        groups: dict[str, list[float]] = {}
        for scored in self.forecasts:
            groups.setdefault(scored.cooldown.group, []).append(scored.error)
        return {group: fmean(errors) for group, errors in groups.items()}

    @property
    def covered(self) -> tuple[int, int]:
        """The number of intervals that hold the measured error, and of all intervals."""
        inside = [scored.is_covered for scored in self.forecasts if scored.forecast.interval]
        return sum(map(bool, inside)), len(inside)


def back_test(cooldowns: Sequence[Cooldown]) -> list[Score]:
    """Return the models' scores, leaving out all seeds of a cooldown's group with it.

    Args:
        cooldowns: measured ones; one without an end is not scored.

    Example: errors that halve; persistence, the first model, forecasts that they stay.
        >>> past = ((100, 0.2),)
        >>> cooldowns = [Cooldown(name, name, "stem", 1, past, 200, 0.1, {}) for name in "ab"]
        >>> [round(error, 4) for error in back_test(cooldowns)[0].errors]  # log 2
        [0.6931, 0.6931]
    """
    scores = []
    for model in MODELS:
        forecasts = []
        for cooldown in cooldowns:
            others = [other for other in cooldowns if other.group != cooldown.group]
            forecast = model.forecast(cooldown, others)
            if forecast and cooldown.error_end:
                forecasts.append(Scored(cooldown, forecast, cooldown.error_end))
        scores.append(Score(model, forecasts))
    return scores


def verdict(scores: Sequence[Score]) -> str:
    """Return which model forecasts best, or why that is not decided.

    Models that forecast every cooldown are compared, the best with the next by a sign test over
    groups of seeds, two-sided.
    """
    count = max((len(score.forecasts) for score in scores), default=0)
    if count < LEAST_COOLDOWNS:
        return f"Not decided: {count} cooldowns rank the models, {LEAST_COOLDOWNS} would decide."
    complete = [score for score in scores if len(score.forecasts) == count]
    if len(complete) < 2:
        return f"Not decided: one model alone forecasts all {count} cooldowns."
    best, second = sorted(complete, key=lambda score: median(score.errors))[:2]
    differences = [best.by_group[group] - error for group, error in second.by_group.items()]
    nearer, farther = (
        sum(difference < 0 for difference in differences),
        sum(difference > 0 for difference in differences),
    )
    p_value = float(binomtest(nearer, nearer + farther).pvalue) if nearer + farther else 1.0
    words = (
        f"{best.model.name} is nearer than {second.model.name} for {nearer} of {len(differences)}"
        f" groups of seeds (sign test, p {p_value:.2g})."
    )
    return ("Best: " if p_value < ALPHA and nearer > farther else "Not decided: ") + words
