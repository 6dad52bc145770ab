"""Models that forecast the error after a cooldown, and how near they were to those that ended.

With e_t the error at its start, and D_t and D_end the tokens at its start and end, all are

    log e_end = log e_t + sum_k c_k x_k + residual

with coefficients c_k by least squares over the cooldowns of other runs. They have at most two,
since cooldowns are few. Which models there are was fixed before any was scored.

Shapes: R cooldowns, P coefficients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from base.grouping import grouped

LEVEL = 0.9  # coverage of the intervals
LEAST_SPREAD = 1e-6  # singular value of the terms, which are logs: below, they are one term
LEAST_COOLDOWNS = 10  # below, a ranking is that of these cooldowns
ALPHA = 0.05


@dataclass(frozen=True)
class Cooldown:
    """A cooldown with what was known at its start; one to be forecast has no end yet.

    Attributes:
        label: of the run.
        group: of the runs that are the same but for their seed; they are left out together.
        stem: group of the runs that hold the stable phase.
        step: of the checkpoint that it starts from.
        tokens: at its start.
        error: measured there, above 0.
        log_rate: logarithm of the peak learning rate; None where no source states it.
        tokens_end: at its end.
        error_end: measured there.
    """

    label: str
    group: str
    stem: str
    step: int
    tokens: int
    error: float
    log_rate: float | None
    tokens_end: int
    error_end: float | None

    @property
    def growth(self) -> float:
        """The log of the tokens at its end over those at its start."""
        return math.log(self.tokens_end / self.tokens)


class Forecast(NamedTuple):
    """An error with its interval; without one where no other cooldown shows how far it is off."""

    error: float
    interval: tuple[float, float] | None


class ForecastFit(NamedTuple):
    """Coefficients by least squares, with what their errors follow from.

    Attributes:
        coefficients_P: of the terms.
        inverse_PP: of X'X: times `variance`, the covariance of the coefficients.
        variance: of the residuals.
        degrees_of_freedom: groups less coefficients.
        cooldowns: number of cooldowns.
    """

    coefficients_P: NDArray[np.float64]
    inverse_PP: NDArray[np.float64]
    variance: float
    degrees_of_freedom: int
    cooldowns: int


@dataclass(frozen=True)
class ForecastModel:
    """A forecast by these terms.

    Attributes:
        name: unique, in words.
        terms: whose coefficients are fitted; 'ratio' is a constant, 'tokens' the log growth.
    """

    name: str
    terms: tuple[str, ...] = ()

    def values(self, cooldown: Cooldown) -> list[float] | None:
        """Return the fitted terms' values, [P]; None where one is not known."""
        known = {"ratio": 1.0, "tokens": cooldown.growth, "learning rate": cooldown.log_rate}
        values = [value for term in self.terms if (value := known[term]) is not None]
        return values if len(values) == len(self.terms) else None

    def fit(self, cooldowns: Sequence[Cooldown]) -> ForecastFit | None:
        """Return the least squares over those cooldowns that have the terms; None if too few."""
        rows, residuals, groups = [], [], set()
        for cooldown in cooldowns:
            values = self.values(cooldown)
            if values is None or cooldown.error_end is None:
                continue
            rows.append(values)
            # The error at the start has the coefficient 1, so it is taken off.
            residuals.append(math.log(cooldown.error_end) - math.log(cooldown.error))
            groups.add(cooldown.group)
        if not rows:
            return None

        x_RP = np.array(rows, dtype=float).reshape(len(rows), len(self.terms))
        # Too few groups, or terms that vary together: the coefficients are not determined.
        rank = np.linalg.matrix_rank(x_RP, tol=LEAST_SPREAD) if self.terms else 0
        if rank < len(self.terms) or len(groups) <= len(self.terms):
            return None
        inverse_PP = np.linalg.inv(x_RP.T @ x_RP)
        y_R = np.array(residuals)
        coefficients_P = inverse_PP @ x_RP.T @ y_R
        squares = float(((y_R - x_RP @ coefficients_P) ** 2).sum())
        variance = squares / (len(rows) - len(self.terms))
        return ForecastFit(
            coefficients_P, inverse_PP, variance, len(groups) - len(self.terms), len(rows)
        )

    def forecast(self, cooldown: Cooldown, learned: Sequence[Cooldown]) -> Forecast | None:
        """Return the error at the end by what these other cooldowns teach.

        The interval has the coverage LEVEL where residuals are normal: Student's, of a new value
        of a regression. Its degrees of freedom are groups less coefficients, as seeds of a group
        are not independent. The model has no forecast where a term is not known, or where its
        terms need more cooldowns than there are.

        Args:
            cooldown: whose end is not read.
            learned: cooldowns with an end, of other groups.

        Example: persistence, with nothing to learn from.
            >>> cooldown = Cooldown("run", "group", "stem", 40, 400, 0.1, None, 800, None)
            >>> ForecastModel("persistence").forecast(cooldown, [])
            Forecast(error=0.1, interval=None)
        """
        values, fit = self.values(cooldown), self.fit(learned)
        if values is None or (self.terms and fit is None):
            return None
        # Persistence has no coefficients: it forecasts even where there is no residual.
        if fit is None:
            return Forecast(cooldown.error, None)
        x_P = np.array(values)
        log_error = math.log(cooldown.error) + float(x_P @ fit.coefficients_P)
        # A prediction interval: 1 for the new residual, the rest for errors of coefficients.
        spread = math.sqrt(fit.variance * (1 + float(x_P @ fit.inverse_PP @ x_P)))
        half = float(stdtrit(fit.degrees_of_freedom, (1 + LEVEL) / 2)) * spread
        interval = (math.exp(log_error - half), math.exp(log_error + half))
        return Forecast(math.exp(log_error), interval)


# Baselines first. Where all cooldowns grow the tokens by one factor, the term 'tokens' is a mean
# ratio, so that the last one asks what the learning rate adds to that.
MODELS = (
    ForecastModel("persistence"),
    ForecastModel("mean ratio", ("ratio",)),
    ForecastModel("tokens and learning rate", ("tokens", "learning rate")),
)


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
class ForecastScore:
    """A model's forecasts of the cooldowns that it could forecast."""

    model: ForecastModel
    forecasts: list[Scored]

    @property
    def errors(self) -> list[float]:
        """The distances |log(forecast / measured)|."""
        return [scored.error for scored in self.forecasts]

    @property
    def by_group(self) -> dict[str, float]:
        """The mean of `errors` over the seeds of each group."""
        groups = grouped(self.forecasts, lambda scored: scored.cooldown.group)
        return {
            group: fmean(scored.error for scored in members) for group, members in groups.items()
        }

    @property
    def covered(self) -> tuple[int, int]:
        """The number of intervals that hold the measured error, and of all intervals."""
        inside = [scored.is_covered for scored in self.forecasts if scored.forecast.interval]
        return sum(map(bool, inside)), len(inside)


def back_test(cooldowns: Sequence[Cooldown]) -> list[ForecastScore]:
    """Return the models' scores, leaving out all seeds of a cooldown's group with it.

    A cooldown without an end is not scored.

    Example: errors that halve; persistence, the first model, forecasts that they stay.
        >>> cooldowns = [
        ...     Cooldown(name, name, "stem", 1, 100, 0.2, None, 200, 0.1) for name in "ab"
        ... ]
        >>> [round(error, 4) for error in back_test(cooldowns)[0].errors]  # log 2
        [0.6931, 0.6931]
    """
    scores = []
    for model in MODELS:
        forecasts = []
        for cooldown in cooldowns:
            # Seeds of one group share settings and would give the answer away.
            others = [other for other in cooldowns if other.group != cooldown.group]
            forecast = model.forecast(cooldown, others)
            if forecast and cooldown.error_end:
                forecasts.append(Scored(cooldown, forecast, cooldown.error_end))
        scores.append(ForecastScore(model, forecasts))
    return scores


def verdict(scores: Sequence[ForecastScore]) -> str:
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
    # Below 0 where the best is nearer; ties count for neither side.
    differences = [best.by_group[group] - error for group, error in second.by_group.items()]
    # The sign test takes groups, since seeds of one group are not independent.
    nearer = sum(difference < 0 for difference in differences)
    farther = sum(difference > 0 for difference in differences)
    p_value = _sign_test(nearer, nearer + farther)
    words = (
        f"{best.model.name} is nearer than {second.model.name} for {nearer} of {len(differences)}"
        f" groups of seeds (sign test, p {p_value:.2g})."
    )
    return ("Best: " if p_value < ALPHA and nearer > farther else "Not decided: ") + words


def _sign_test(nearer: int, count: int) -> float:
    """Return the probability of a split at least as uneven, were both ways equally likely.

    >>> _sign_test(5, 5), _sign_test(2, 4)
    (0.0625, 1.0)
    """
    tail = sum(math.comb(count, k) for k in range(min(nearer, count - nearer) + 1))
    return min(1.0, 2.0 * tail / float(2**count))
