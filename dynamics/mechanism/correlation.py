"""Correlations over checkpoints, and mean ratios, with intervals over trainings.

Shapes: N checkpoints, C quantities that are held fixed, U trainings.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from base.statistics import INTERVAL_LEVEL
from curvature.trace.estimates import estimate_mean
from dynamics.mechanism.checkpoints import CheckpointRow, Floats, divergence_of, loss_of
from study.definition import Study

LEAST_TRAININGS = 3
MOST = 1 - 1e-9  # of |r|: Fisher's z of 1 is infinite


class Correlation(NamedTuple):
    """A partial rank correlation, its 95% interval, and the two-sided p-value of 0."""

    value: float
    low: float
    high: float
    p_value: float
    checkpoints: int
    trainings: int

    def __str__(self) -> str:
        """Return '+0.71 [+0.30, +0.90] over 4 trainings'."""
        interval = f"[{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.value:+.2f} {interval} over {self.trainings} trainings"


def partial_correlation(
    first_N: Floats, second_N: Floats, given_NC: Floats, trainings: Sequence[str]
) -> Correlation | None:
    """Return Spearman's correlation of two quantities with others held fixed.

    Both are replaced by their ranks and freed of the least-squares fit by the ranks of the others
    (Kendall 1942, "Partial rank correlation", in Spearman's form). Checkpoints of one training are
    not independent. So the error is that of a jackknife over trainings, of Fisher's z = artanh r,
    with Student's quantile at U - 1 degrees: it holds for other trainings of such settings.

    Args:
        first_N: a quantity of each checkpoint.
        second_N: the other.
        given_NC: what is held fixed; C may be 0.
        trainings: whose each checkpoint is.

    Returns:
        None with fewer than three trainings, or where nothing is left that varies.

    Example: one rises and one falls with the step; at equal steps they rise together.
        >>> step_N, part_N = np.arange(9.0), np.array([0, 1, -1, 1, -1, 0, -1, 0, 1])
        >>> first_N, second_N = part_N + step_N, part_N - step_N
        >>> for given_NC in (np.zeros((9, 0)), step_N[:, None]):
        ...     round(partial_correlation(first_N, second_N, given_NC, list("aaabbbccc")).value, 2)
        -0.85
        0.86
    """
    return _over_trainings(
        lambda kept_N: _z(first_N[kept_N], second_N[kept_N], given_NC[kept_N]), trainings
    )


def _over_trainings(
    z_of: Callable[[NDArray[np.bool_]], float], trainings: Sequence[str]
) -> Correlation | None:
    """Return tanh z with the interval of a jackknife over trainings; None as above.

    `z_of` gives Fisher's z of the checkpoints in a mask.
    """
    names = np.array(trainings)
    # U masks, each of which leaves one training out.
    kept = [names != name for name in dict.fromkeys(trainings)]
    whole = z_of(np.full(len(names), True))
    parts_U = np.array([z_of(others_N) for others_N in kept])
    if len(kept) < LEAST_TRAININGS or not np.isfinite([whole, *parts_U]).all():
        return None
    degrees = len(kept) - 1
    # The jackknife: (U - 1) / U times the sum of squares of the leave-one-out values.
    standard_error = math.sqrt(degrees / len(kept) * float(((parts_U - parts_U.mean()) ** 2).sum()))
    # The interval is symmetric in z, whose variance hardly depends on r; tanh takes it back.
    half = float(stdtrit(degrees, (1 + INTERVAL_LEVEL) / 2)) * standard_error
    t = abs(whole) / standard_error if standard_error > 0 else math.inf
    low, high = math.tanh(whole - half), math.tanh(whole + half)
    p_value = 2 * float(stdtr(degrees, -t))
    return Correlation(math.tanh(whole), low, high, p_value, len(names), len(kept))


class Association(NamedTuple):
    """A correlation of two quantities; its interval is None with too few trainings."""

    value: float
    interval: Correlation | None
    checkpoints: int
    trainings: int

    def __str__(self) -> str:
        """Return '+0.71 [+0.30, +0.90]', or '+0.71' without an interval."""
        if self.interval is None:
            return f"{self.value:+.2f}"
        return f"{self.value:+.2f} [{self.interval.low:+.2f}, {self.interval.high:+.2f}]"


def association(
    first_N: Floats,
    second_N: Floats,
    trainings: Sequence[str],
    *,
    ranked: bool,
    within: bool,
) -> Association | None:
    """Return Pearson's correlation of two quantities or of their ranks (Spearman's).

    The interval is that of `partial_correlation`.

    Args:
        first_N: a quantity of each checkpoint.
        second_N: the other.
        trainings: whose each checkpoint is.
        ranked: ranks in place of the values.
        within: both are freed of the mean of their training first (ranks are those in it).

    Returns:
        None where nothing is left that varies, or less than two degrees of freedom besides the
        means, with which a correlation is 1 or -1.

    Example: over all they fall together, within a training one rises as the other falls.
        >>> first_N, second_N = np.array([0.0, 1, 2, 10, 11, 12]), np.array([2.0, 1, 0, 12, 11, 10])
        >>> for within in (False, True):
        ...     round(association(
        ...         first_N, second_N, list("aaabbb"), ranked=False, within=within
        ...     ).value, 2)
        0.95
        -1.0
    """
    names = np.array(trainings)

    def z_of(kept_N: NDArray[np.bool_]) -> float:
        pairs = first_N[kept_N], second_N[kept_N]
        groups = names[kept_N] if within else np.full(kept_N.sum(), "")
        left = [_centred(values_N, groups, ranked=ranked) for values_N in pairs]
        lengths = [float(np.linalg.norm(values_N)) for values_N in left]
        is_constant = min(lengths) <= 1e-12 * max(np.abs(pairs).max(), 1e-300)
        if len(groups) - len(set(groups)) < 2 or is_constant:
            return math.nan
        return math.atanh(max(-MOST, min(MOST, float(left[0] @ left[1]) / math.prod(lengths))))

    whole = z_of(np.full(len(names), True))
    if not math.isfinite(whole):
        return None
    interval = _over_trainings(z_of, trainings)
    return Association(math.tanh(whole), interval, len(names), len(set(trainings)))


def _centred(values_N: Floats, groups_N: NDArray[np.str_], *, ranked: bool) -> Floats:
    """Return values or ranks, each less the mean of its group."""
    left_N = np.empty(len(values_N))
    for group in dict.fromkeys(groups_N.tolist()):
        is_of_N = groups_N == group
        of_group = ranks(values_N[is_of_N]) if ranked else values_N[is_of_N]
        left_N[is_of_N] = of_group - of_group.mean()
    return left_N


def ranks(values_N: Floats) -> Floats:
    """Return the ranks from 1 on; equal values share their mean rank, and NaN leaves none.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    if np.isnan(values_N).any():
        return np.full(len(values_N), np.nan)
    # A tie of c values that ends at cumulative count e has ranks e - c + 1 to e.
    _, place_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place_N])


def _z(first_N: Floats, second_N: Floats, given_NC: Floats) -> float:
    """Return Fisher's z; NaN where there is no correlation."""
    # The column of ones centres the residuals, so their cosine is the correlation.
    ranks_NC = np.column_stack([np.ones(len(first_N)), *map(ranks, given_NC.T)])
    if len(first_N) <= ranks_NC.shape[1] + 1:
        return math.nan
    left = [_residual(ranks(values), ranks_NC) for values in (first_N, second_N)]
    lengths = [float(np.linalg.norm(residual)) for residual in left]
    if min(lengths) < 1e-9 * len(first_N):  # rounding: nothing is left
        return math.nan
    return math.atanh(max(-MOST, min(MOST, float(left[0] @ left[1]) / math.prod(lengths))))


def _residual(values_N: Floats, terms_NC: Floats) -> Floats:
    coefficients_C = np.linalg.lstsq(terms_NC, values_N, rcond=None)[0]
    return np.asarray(values_N - terms_NC @ coefficients_C)


class Ratio(NamedTuple):
    """A geometric mean of ratios over trainings, its interval, and the two-sided p-value of 1."""

    value: float
    low: float
    high: float
    p_value: float
    trainings: int

    def __str__(self) -> str:
        """Return 'x 1.25 [1.1, 1.42]'."""
        return f"x {self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mean_ratio(logarithms: Mapping[str, Sequence[float]]) -> Ratio | None:
    """Return the mean of natural logarithms of ratios, by training; None with too few trainings.

    The unit is the training: those of one are averaged first, and Student's interval is over the
    averages.

    Example: 2, the geometric mean 4 of 2 and 8, and 8.
        >>> log = math.log
        >>> mean = mean_ratio({"a": [log(2)], "b": [log(2), log(8)], "c": [log(8)]})
        >>> round(mean.value, 4), mean.trainings
        (4.0, 3)
    """
    means = [math.fsum(values) / len(values) for values in logarithms.values() if values]
    if len(means) < LEAST_TRAININGS:
        return None
    estimate = estimate_mean(means, level=INTERVAL_LEVEL)
    error = estimate.standard_error
    t = abs(estimate.mean) / error if error > 0 else math.inf
    low, high = map(math.exp, estimate.interval)
    # A mean of exactly 0 without spread has t = inf above, and yet nothing against 1.
    p_value = 2 * float(stdtr(len(means) - 1, -t)) if estimate.mean else 1.0
    return Ratio(math.exp(estimate.mean), low, high, p_value, len(means))


def given_loss_and_tokens(
    study: Study, points: Sequence[CheckpointRow], column: str
) -> Correlation | None:
    """Return the partial rank correlation of a measure of curvature and of the KL divergence.

    Both grow as training continues and the loss falls; at equal loss and equal tokens, what is left
    is what the settings of the trainings and the phase of the schedule make of them. None where it
    is not known.
    """

    def values(name: str) -> list[float]:
        return [float(point.row[name]) for point in points]

    return partial_correlation(
        np.array(values(column)),
        np.array(values(divergence_of(study))),
        np.column_stack([values(loss_of(study)), values("tokens")]),
        [point.training for point in points],
    )
