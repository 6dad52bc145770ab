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
    jackknifed = _jackknife(z_of, trainings)
    if jackknifed is None:
        return None
    z, half, p_value, count = jackknifed
    # The interval is symmetric in z, whose variance hardly depends on r; tanh takes it back.
    low, high = math.tanh(z - half), math.tanh(z + half)
    return Correlation(math.tanh(z), low, high, p_value, len(trainings), count)


class _Jackknifed(NamedTuple):
    """A value over trainings, half of its interval, and the two-sided p-value of 0."""

    value: float
    half_width: float
    p_value: float
    trainings: int


def _jackknife(
    value_of: Callable[[NDArray[np.bool_]], float], trainings: Sequence[str]
) -> _Jackknifed | None:
    """Return a value of the checkpoints in a mask with its error over trainings; None as above."""
    names = np.array(trainings)
    # U masks, each of which leaves one training out.
    kept = [names != name for name in dict.fromkeys(trainings)]
    if len(kept) < LEAST_TRAININGS:
        return None
    whole = value_of(np.full(len(names), True))
    parts_U = np.array([value_of(others_N) for others_N in kept])
    if not np.isfinite([whole, *parts_U]).all():
        return None
    degrees = len(kept) - 1
    # The jackknife: (U - 1) / U times the sum of squares of the leave-one-out values.
    standard_error = math.sqrt(degrees / len(kept) * float(((parts_U - parts_U.mean()) ** 2).sum()))
    half_width = float(stdtrit(degrees, (1 + INTERVAL_LEVEL) / 2)) * standard_error
    t = abs(whole) / standard_error if standard_error > 0 else math.inf
    return _Jackknifed(whole, half_width, 2 * float(stdtr(degrees, -t)), len(kept))


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
    groups_N = names if within else np.full(len(names), "")

    def z_of(kept_N: NDArray[np.bool_]) -> float:
        pair = first_N[kept_N], second_N[kept_N]
        r = _correlation(*pair, groups_N[kept_N], ranked=ranked)
        # NaN stays NaN here, which min and max would take for the largest.
        return math.atanh(float(np.clip(r, -MOST, MOST)))

    whole = z_of(np.full(len(names), True))
    if not math.isfinite(whole):
        return None
    interval = _over_trainings(z_of, trainings)
    return Association(math.tanh(whole), interval, len(names), len(set(trainings)))


class Advantage(NamedTuple):
    """The rank correlation of one quantity with a third less that of another, with its interval.

    The p-value is two-sided, of no difference.
    """

    first: float
    second: float
    low: float
    high: float
    p_value: float
    checkpoints: int
    trainings: int

    @property
    def value(self) -> float:
        """The difference, first - second."""
        return self.first - self.second

    def __str__(self) -> str:
        """Return '+0.90 against +0.10: +0.80 [+0.50, +1.10]'."""
        ends = f"[{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.first:+.2f} against {self.second:+.2f}: {self.value:+.2f} {ends}"


def advantage(
    target_N: Floats,
    first_N: Floats,
    second_N: Floats,
    trainings: Sequence[str],
    *,
    within: bool,
) -> Advantage | None:
    """Return Spearman's correlation of one quantity with the target less that of another.

    Both are of the same checkpoints, so their errors are not independent: the difference itself is
    jackknifed over trainings. It is of r and not of Fisher's z, which has no end at the
    correlation of 1 that a quantity near the target's definition can have.

    Args:
        target_N: what both are to predict, of each checkpoint.
        first_N: a quantity of each.
        second_N: the other.
        trainings: whose each checkpoint is.
        within: ranks are those in a training, freed of their mean there.

    Returns:
        None with fewer than three trainings, where nothing is left that varies, or where the
        difference is the same whichever training is left out, so that its error is not seen.

    Example: the target has the order of the first but for one exchange in each training.
        >>> target_N = np.array([2.0, 1, 3, 4, 1, 3, 2, 4, 1, 2, 4, 3])
        >>> first_N, second_N = np.tile([1.0, 2, 3, 4], 3), np.tile([3.0, 1, 4, 2], 3)
        >>> better = advantage(target_N, first_N, second_N, list("aaaabbbbcccc"), within=True)
        >>> round(better.first, 2), round(better.second, 2), round(better.value, 2)
        (0.8, 0.07, 0.73)
    """
    names = np.array(trainings)
    groups_N = names if within else np.full(len(names), "")

    def both(kept_N: NDArray[np.bool_]) -> list[float]:
        return [
            _correlation(target_N[kept_N], values_N[kept_N], groups_N[kept_N], ranked=True)
            for values_N in (first_N, second_N)
        ]

    def difference(kept_N: NDArray[np.bool_]) -> float:
        first, second = both(kept_N)
        return first - second

    jackknifed = _jackknife(difference, trainings)
    if jackknifed is None or jackknifed.half_width == 0:
        return None
    value, half, p_value, count = jackknifed
    first, second = both(np.full(len(names), True))
    return Advantage(first, second, value - half, value + half, p_value, len(names), count)


def _correlation(
    first_N: Floats, second_N: Floats, groups_N: NDArray[np.str_], *, ranked: bool
) -> float:
    """Return the correlation of values or ranks freed of the mean of their group; NaN for none."""
    if len(groups_N) - len(set(groups_N.tolist())) < 2:
        return math.nan
    pair = first_N, second_N
    left = [_centred(values_N, groups_N, ranked=ranked) for values_N in pair]
    lengths = [float(np.linalg.norm(values_N)) for values_N in left]
    if min(lengths) <= 1e-12 * max(np.abs(pair).max(), 1e-300):  # constant
        return math.nan
    return float(left[0] @ left[1]) / math.prod(lengths)


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
