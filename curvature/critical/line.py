"""The loss along a line: its slope, its curvature, and the multiple at which it exceeds the start.

f(c) = L(theta + c d) - L(theta) is known where it is evaluated, by a forward pass each. With g the
gradient and H the Hessian at theta, f(c) = c g.d + c^2 d'Hd / 2 + O(c^3).

**Curvature.** (f(c) + f(-c)) / 2, the rise, has neither the linear term nor any other of odd order:
2 rise / c^2 = d'Hd + O(c^2), whatever the slope is. One side alone, 2 (f(c) - c g.d) / c^2, needs
the gradient and is off by O(c). The step c of the pair is chosen so that the rise is near a stated
one: far enough above rounding, and near enough to theta. Over |d|^2 the result is a Rayleigh
quotient of H, which the largest eigenvalue bounds where both are of the same sequences.

**Critical multiple and sharpness** (arXiv:2601.16979, definition 2.1): the smallest c > 0 with f(c)
> 0, and 2 / c. The paper's d is an update of the optimizer, along which the loss falls first. Where
it rises from the start that c is 0 and says nothing, so we take the side on which the loss falls: d
or -d, by the sign of the slope. On it, if the loss is quadratic, 2 / c = d'Hd / |g.d|, which the
paper calls the directional sharpness. The multiple is negative on the side of -d. The search is the
paper's: doubling or halving, then bisection. It starts at the quadratic's crossing, which the pair
gives. As in the paper it ends at a crossing, which is the smallest where f has only one.

Shapes: B sequences, over which all differences are paired.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from curvature.trace.estimates import TRACE_UNIT, estimate_mean

Losses = NDArray[np.float64]  # of each sequence, nats per token, [B]

PASSES = 9  # of a direction, at most
TOLERANCE = 1 / 8  # of the width of a bracket, in units of its upper end
KEPT = 1 / 16, 4.0  # a pair is kept whose rise is the stated one times a factor between these
MOST_FACTOR = 64.0  # between the steps of the first pair and of the second
RESOLVED = 10.0  # times the noise: the least rise that gives a curvature

_NATS = "nats per token"
UNITS = {
    "loss": _NATS,
    "noise": f"{_NATS}, change of the loss by a digit of every weight",
    "norm": "parameter units, |d|",
    "step": "multiples of d, of the symmetric pair",
    "rise": f"{_NATS}, (f(c) + f(-c)) / 2 at the step",
    "slope": f"{_NATS} per multiple, g.d",
    "second_derivative": f"{_NATS} per squared multiple, d'Hd",
    "curvature": f"{TRACE_UNIT}, d'Hd / |d|^2",
    "directional_sharpness": "1 / multiple, d'Hd / |g.d|",
    "critical.side": "1 or -1: the loss falls first along d or along -d",
    "critical.multiple": "multiples of d, of the sign of the side",
    "critical.sharpness": "1 / multiple, 2 / |critical multiple|",
    "critical.not_above, critical.above": "multiples of d or -d, the bracket",
    "evaluated.increase": f"{_NATS}, f at a multiple",
}


class Bracket(NamedTuple):
    """Two multiples around a crossing.

    Attributes:
        not_above: the largest with a loss that does not exceed the start; 0 if none was seen.
        above: the smallest with a loss that does; None if none was seen.
    """

    not_above: float
    above: float | None

    @property
    def outcome(self) -> str:
        """Return crossing, rises (no lower loss was seen on the way down to `above`) or none."""
        if self.above is None:
            return "none"
        return "crossing" if self.not_above else "rises"

    @property
    def is_narrow(self) -> bool:
        """Return whether a crossing is known to within the tolerance."""
        if self.above is None or not self.not_above:
            return False
        return self.above - self.not_above <= TOLERANCE * self.above


UNSEEN = Bracket(0.0, None)


def find_crossing(
    increase: Callable[[float], float],
    start: float,
    *,
    reach: float,
    passes: int,
    known: Bracket = UNSEEN,
) -> Bracket:
    """Return a bracket of a multiple at which the loss begins to exceed that of the start.

    Args:
        increase: f(c), called at most `passes` times.
        start: the first multiple, inside `known`.
        reach: the largest multiple.
        passes: at most; what is known by then is returned.
        known: from what was evaluated before.

    Example: -2 c + c^2 is 0 at 2.
        >>> find_crossing(lambda c: -2 * c + c * c, 0.625, reach=64, passes=9)
        Bracket(not_above=1.875, above=2.03125)
        >>> find_crossing(lambda c: -c, 1.0, reach=8, passes=9).outcome
        'none'
        >>> find_crossing(lambda c: c, 1.0, reach=8, passes=9).outcome
        'rises'
    """
    bracket, multiple = known, min(start, reach)
    for _ in range(passes):
        if bracket.is_narrow or bracket.not_above >= reach:
            break
        if increase(multiple) > 0:
            bracket = bracket._replace(above=multiple)
        else:
            bracket = bracket._replace(not_above=multiple)
        # Double without an upper end. From 0, the middle of a bracket is half of its upper end.
        low, high = bracket
        multiple = min(2 * low, reach) if high is None else (low + high) / 2
    return bracket


class _Line:
    """Increases of the loss at multiples of a direction, each evaluated once."""

    def __init__(self, losses: Callable[[float], Losses], base_B: Losses) -> None:
        self._losses, self._base_B = losses, base_B
        self.increases: dict[float, Losses] = {}

    def at(self, multiple: float) -> Losses:
        """Return the increase of each sequence, [B]."""
        if multiple not in self.increases:
            self.increases[multiple] = self._losses(multiple) - self._base_B
        return self.increases[multiple]

    def rise(self, step: float) -> Losses:
        """Return the even part of the increase at a step, [B]."""
        return (self.at(step) + self.at(-step)) / 2

    def known(self, side: int) -> Bracket:
        """Return the bracket that the multiples of d or -d give, up to the first that exceeds."""
        low = 0.0
        for multiple in sorted(side * c for c in self.increases if side * c > 0):
            if _mean(self.increases[side * multiple]) > 0:
                return Bracket(low, multiple)
            low = multiple
        return Bracket(low, None)


def measure_line(
    losses: Callable[[float], Losses],
    base_B: Losses,
    *,
    norm: float,
    start: float,
    rise: float,
    reach: float,
    noise: float,
    level: float = 0.95,
) -> dict[str, Any]:
    """Return slope, curvature and critical multiple along a direction, for JSON.

    Estimates are over the sequences; their errors are of the draw of these. At most `PASSES` calls
    of `losses`.

    Args:
        losses: of B sequences at theta + c d, by c.
        base_B: those at theta.
        norm: |d|.
        start: the step of the first symmetric pair.
        rise: the stated rise, nats per token.
        reach: the largest multiple at which the loss is evaluated.
        noise: what rounding does to the loss; a smaller rise than ten times it gives no curvature.
        level: coverage of the intervals.

    Example: f = -2 c + c^2, a quadratic of slope -2 and curvature 2.
        >>> zeros = np.zeros(2)
        >>> line = measure_line(
        ...     lambda c: zeros - 2 * c + c * c, zeros,
        ...     norm=1.0, start=0.1, rise=0.01, reach=64.0, noise=0.0,
        ... )
        >>> round(line["curvature"]["mean"], 6), round(line["critical"]["multiple"]["mean"], 6)
        (2.0, 2.0)
    """
    line = _Line(losses, base_B)
    step = _step_of(line, min(start, reach), rise, reach)
    rise_B = line.rise(step)
    slope_B = (line.at(step) - line.at(-step)) / (2 * step)
    second_B = 2 * rise_B / step**2
    slope, second = _mean(slope_B), _mean(second_B)
    is_resolved = abs(_mean(rise_B)) > RESOLVED * noise

    side = -1 if slope > 0 else 1
    known = line.known(side)
    bracket = find_crossing(
        lambda c: _mean(line.at(side * c)),
        _inside(known, 2 * abs(slope) / second if second > 0 else math.inf),
        reach=reach,
        passes=PASSES - len(line.increases),
        known=known,
    )

    def estimate(values_B: Losses) -> dict[str, Any]:
        return estimate_mean(values_B, level=level)._asdict()

    multiple_B = _crossing(line, side, bracket)
    sharpness_B = None
    if multiple_B is not None:
        # The first order of 2 / |c| around the mean, whose own value is 2 / its mean.
        multiple = _mean(multiple_B)
        sharpness_B = side * (2 / multiple - 2 / multiple**2 * (multiple_B - multiple))
    return {
        "norm": norm,
        "step": step,
        "rise": _mean(rise_B),
        "slope": estimate(slope_B),
        "second_derivative": estimate(second_B) if is_resolved else None,
        "curvature": estimate(second_B / norm**2) if is_resolved else None,
        "directional_sharpness": second / abs(slope) if is_resolved and slope else None,
        "critical": {
            "outcome": bracket.outcome,
            "side": side,
            "not_above": bracket.not_above,
            "above": bracket.above,
            "is_narrow": bracket.is_narrow,
            "multiple": None if multiple_B is None else estimate(multiple_B),
            "sharpness": None if sharpness_B is None else estimate(sharpness_B),
        },
        "forward_passes": len(line.increases),
        "evaluated": [
            {"multiple": multiple, "increase": _mean(line.increases[multiple])}
            for multiple in sorted(line.increases)
        ],
    }


def _step_of(line: _Line, start: float, rise: float, reach: float) -> float:
    """Return the step of the symmetric pair: the first, or a second one if its rise is far off."""
    first = abs(_mean(line.rise(start)))
    if KEPT[0] * rise <= first <= KEPT[1] * rise:
        return start
    # The rise is of second order in the step.
    factor = math.sqrt(rise / first) if first else MOST_FACTOR
    step = min(start * min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR), reach)
    line.rise(step)
    return step


def _inside(bracket: Bracket, multiple: float) -> float:
    """Return a multiple inside a bracket: this one, or the next one of the search."""
    low, high = bracket
    if high is None:
        return multiple if low < multiple < math.inf else 2 * low
    return multiple if low < multiple < high else (low + high) / 2


def _crossing(line: _Line, side: int, bracket: Bracket) -> Losses | None:
    """Return values whose mean is the multiple of the crossing and whose spread is its error, [B].

    It is interpolated linearly between the ends of the bracket. None without a narrow one.
    """
    low, high = bracket
    if high is None or not bracket.is_narrow:
        return None
    ends = line.at(side * low), line.at(side * high)
    below, above = map(_mean, ends)
    share = below / (below - above)
    # Paired increases at the crossing, whose mean is 0, over the slope there: the delta method.
    at_crossing_B = (1 - share) * ends[0] + share * ends[1]
    multiple = low + share * (high - low)
    return np.asarray(side * (multiple - at_crossing_B * (high - low) / (above - below)))


def _mean(values_B: Losses) -> float:
    return math.fsum(values_B) / len(values_B)
