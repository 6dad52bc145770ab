"""Models that forecast the error after a cooldown from what is known where it starts.

With e_t the error at its start, and D_t and D_end the tokens at its start and end, all are

    log e_end = log e_t + g log(D_end / D_t) + sum_k c_k x_k + residual

with an exponent g of the run's own past, and coefficients c_k by least squares over the cooldowns
of other runs. They have at most two, since cooldowns are few. Which models there are was fixed
before any was scored.

Shapes: R cooldowns, P coefficients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

LEVEL = 0.9  # coverage of the intervals
LEAST_PAST = 3  # checkpoints that a power law is fitted to: two would always be on it
LEAST_SPREAD = 1e-6  # singular value of the terms, which are logs: below, they are one term


@dataclass(frozen=True)
class Cooldown:
    """A cooldown with what was known at its start; one to be forecast has no end yet.

    Attributes:
        label: of the run.
        group: of the runs that are the same but for their seed; they are left out together.
        stem: group of the runs that hold the stable phase.
        step: of the checkpoint that it starts from.
        past: tokens and error of the checkpoints of the stable phase up to there, rising.
        tokens_end: at its end.
        error_end: measured there.
        signals: logarithms of what else was measured by then, by name: 'error' and 'layer output
            error' of the miniature cooldown over those at the start, the 'trace' at the start over
            the first one of the stable phase, and the largest 'learning rate'.
    """

    label: str
    group: str
    stem: str
    step: int
    past: tuple[tuple[int, float], ...]
    tokens_end: int
    error_end: float | None
    signals: Mapping[str, float]

    @property
    def growth(self) -> float:
        """The log of the tokens at its end over those at its start."""
        return math.log(self.tokens_end / self.past[-1][0])

    @property
    def log_error(self) -> float:
        """The log of the error at its start."""
        return math.log(self.past[-1][1])

    @property
    def exponent(self) -> float | None:
        """The slope of log error in log tokens over the stable phase; None below three points."""
        if len(self.past) < LEAST_PAST:
            return None
        log_tokens, log_errors = np.log(np.array(self.past, dtype=float)).T
        return float(np.polyfit(log_tokens, log_errors, 1)[0])


class Forecast(NamedTuple):
    """An error with its interval; without one where no other cooldown shows how far it is off."""

    error: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Model:
    """A forecast by these terms.

    Attributes:
        name: unique, in words.
        terms: whose coefficients are fitted; 'ratio' is a constant, 'tokens' the log growth.
        extrapolates: the exponent of the run's own past is added.
    """

    name: str
    terms: tuple[str, ...] = ()
    extrapolates: bool = False

    def baseline(self, cooldown: Cooldown) -> float | None:
        """Return the log of the error at the end as far as nothing is fitted to other runs."""
        if not self.extrapolates:
            return cooldown.log_error
        exponent = cooldown.exponent
        return None if exponent is None else cooldown.log_error + exponent * cooldown.growth

    def values(self, cooldown: Cooldown) -> list[float] | None:
        """Return the fitted terms' values, [P]; None where one is not measured."""
        signals = {"ratio": 1.0, "tokens": cooldown.growth, **cooldown.signals}
        if not set(self.terms) <= set(signals):
            return None
        return [signals[term] for term in self.terms]

    def fit(self, cooldowns: Sequence[Cooldown]) -> "Fit | None":
        """Return the least squares over those cooldowns that have the terms; None if too few."""
        rows, residuals, groups = [], [], set()
        for cooldown in cooldowns:
            baseline, values = self.baseline(cooldown), self.values(cooldown)
            if baseline is None or values is None or cooldown.error_end is None:
                continue
            rows.append(values)
            residuals.append(math.log(cooldown.error_end) - baseline)
            groups.add(cooldown.group)
        if not rows:
            return None
        x_RP = np.array(rows, dtype=float).reshape(len(rows), len(self.terms))
        rank = np.linalg.matrix_rank(x_RP, tol=LEAST_SPREAD) if self.terms else 0
        if rank < len(self.terms) or len(groups) <= len(self.terms):
            return None
        inverse_PP = np.linalg.inv(x_RP.T @ x_RP)
        y_R = np.array(residuals)
        coefficients_P = inverse_PP @ x_RP.T @ y_R
        squares = float(((y_R - x_RP @ coefficients_P) ** 2).sum())
        variance = squares / (len(rows) - len(self.terms))
        return Fit(coefficients_P, inverse_PP, variance, len(groups) - len(self.terms), len(rows))

    def forecast(self, cooldown: Cooldown, learned: Sequence[Cooldown]) -> Forecast | None:
        """Return the error at the end by what these other cooldowns teach.

        The interval has the coverage LEVEL where residuals are normal: Student's, of a new value
        of a regression. Its degrees of freedom are groups less coefficients, as seeds of a group
        are not independent. The model has no forecast where a term is not measured, or where its
        terms need more cooldowns than there are.

        Args:
            cooldown: whose end is not read.
            learned: cooldowns with an end, of other groups.

        Example: an error that falls as 1 / tokens, from 0.1 at 400 tokens to 800.
            >>> past = ((100, 0.4), (200, 0.2), (400, 0.1))
            >>> cooldown = Cooldown("run", "group", "stem", 40, past, 800, None, {})
            >>> forecast = Model("power law", extrapolates=True).forecast(cooldown, [])
            >>> round(forecast.error, 4), forecast.interval
            (0.05, None)
        """
        baseline, values = self.baseline(cooldown), self.values(cooldown)
        fit = self.fit(learned)
        if baseline is None or values is None or (self.terms and fit is None):
            return None
        if fit is None:
            return Forecast(math.exp(baseline), None)
        x_P = np.array(values)
        log_error = baseline + float(x_P @ fit.coefficients_P)
        spread = math.sqrt(fit.variance * (1 + float(x_P @ fit.inverse_PP @ x_P)))
        half = float(stdtrit(fit.degrees_of_freedom, (1 + LEVEL) / 2)) * spread
        interval = (math.exp(log_error - half), math.exp(log_error + half))
        return Forecast(math.exp(log_error), interval)


class Fit(NamedTuple):
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


# Baselines first. Where all cooldowns grow the tokens by one factor, the term 'tokens' is a mean
# ratio, so that the others ask what a signal adds to that.
MODELS = (
    Model("persistence"),
    Model("power law in tokens", extrapolates=True),
    Model("mean ratio", ("ratio",)),
    Model("tokens and miniature cooldown", ("tokens", "error")),
    Model("tokens and its layer output error", ("tokens", "layer output error")),
    Model("tokens and trace", ("tokens", "trace")),
    Model("tokens and learning rate", ("tokens", "learning rate")),
)
