"""A plane through a model's weights: where points lie in it, in true distances, and the losses at them.

theta(x, y) = base + a first + b second, with (x, y) the coordinates along the orthonormal axes that Gram-Schmidt makes
of the two directions: x along `first`, y along the part of `second` that is orthogonal to it.

Shapes: B sequences, Q points, X and Y coordinates of the grid.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt_tools.ranks import Ranks
from curvature.slices.losses import SequenceLosses, mean_and_error
from train.command import Progress, UserError

SMALLEST_ANGLE = 1e-3  # radians between two directions that span a plane
ROUNDING_STEPS = (1e-6, 2e-6)  # times |theta|: far above the rounding of a weight, far below any curvature


def dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Inner product in float64, over the tensors that both have: an absent one is zero."""
    shared = [name for name in one if name in other]
    return sum(
        float(one[name].detach().double().flatten() @ other[name].detach().double().flatten()) for name in shared
    )


class Point(NamedTuple):
    """Where weights lie in a plane: Euclidean distances along its axes."""

    x: float
    y: float


class Plane:
    """The plane spanned by two directions at a model's weights, which it overwrites.

    Holds the weights four times: the model's own, a copy of the base, and both directions.

    Args:
        weights: the model's own tensors, at the base.
        first, second: the directions by name; an absent tensor does not move.

    Attributes:
        ends: theta = base + first, and theta = base + second.

    Raises:
        UserError: the directions span no plane.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], first: Mapping[str, Tensor], second: Mapping[str, Tensor]
    ) -> None:
        lengths = [math.sqrt(dot(direction, direction)) for direction in (first, second)]
        if not all(0 < length < math.inf for length in lengths):
            raise UserError(f"the directions have lengths {lengths}, no plane; give points that differ from the model")
        along = dot(first, second) / lengths[0]
        across = math.sqrt(max(lengths[1] ** 2 - along**2, 0.0))
        if across < SMALLEST_ANGLE * lengths[1]:
            raise UserError("both points lie on one line with the model, no plane; give another point")
        self.ends = Point(lengths[0], 0.0), Point(along, across)
        self.cosine = along / lengths[1]
        self._weights, self._first, self._second = weights, first, second
        self._base = {name: weight.detach().clone() for name, weight in weights.items()}

    def coefficients(self, point: Point) -> tuple[float, float]:
        """(a, b) of base + a first + b second; exactly (0, 0), (1, 0) and (0, 1) at the base and the ends."""
        b = point.y / self.ends[1].y
        return (point.x - b * self.ends[1].x) / self.ends[0].x, b

    @torch.no_grad()
    def move(self, point: Point) -> None:
        """Sets the model's weights to those at a point: always from the base, so that no rounding adds up."""
        a, b = self.coefficients(point)
        for name, weight in self._weights.items():
            weight.copy_(self._base[name])
            if name in self._first:
                weight.add_(self._first[name], alpha=a)
            if name in self._second:
                weight.add_(self._second[name], alpha=b)


def losses_at(plane: Plane, losses: SequenceLosses, points: Sequence[Point], ranks: Ranks, label: str) -> Tensor:
    """Losses of every sequence at every point, nats per token, float64 [Q, B]; the points are shared out over ranks.

    Raises:
        UserError: a loss is not finite.
    """
    share = ranks.share(len(points))
    found: dict[int, Tensor] = {}
    with Progress(label, total=len(share)) as progress:
        for index in share:
            plane.move(points[index])
            found[index] = losses()
            progress.advance(loss=float(found[index].mean()))
    return gathered(found, [f"x {point.x:.4g}, y {point.y:.4g}" for point in points], losses.sequences, ranks)


def check_finite(place: str, losses_B: Tensor, next_action: str) -> None:
    """UserError that names the place if a loss there is not finite."""
    if not torch.isfinite(losses_B).all():
        raise UserError(f"the loss at {place} is {float(losses_B.mean())}; {next_action}")


def gathered(found: Mapping[int, Tensor], places: Sequence[str], sequences: int, ranks: Ranks) -> Tensor:
    """The losses [Q, B] at all places on every rank, of those that each rank found.

    Raises:
        UserError: a loss is not finite; it names the place.
    """
    losses_QB = torch.zeros(len(places), sequences, dtype=torch.float64)
    for index, losses_B in found.items():
        losses_QB[index] = losses_B
    ranks.sum(losses_QB)
    for place, losses_B in zip(places, losses_QB, strict=True):
        check_finite(place, losses_B, "give a smaller extent or radius")
    return losses_QB


def grid_coordinates(values: Sequence[float], margin: float, count: int) -> list[float]:
    """`count` evenly spaced coordinates, 0 among them, that reach `margin` beyond 0 and all values on both sides."""
    low, high = min(0.0, *values) - margin, max(0.0, *values) + margin
    step, below = min((max(-low / below, high / (count - 1 - below)), below) for below in range(1, count - 1))
    return [(index - below) * step for index in range(count)]


class SecondDifference(NamedTuple):
    """Curvature along an axis at the base, (L(h) - 2 L(0) + L(-h)) / h^2, nats per token per squared distance.

    A second difference of the grid, not a limit: `at_double_step` says how far the loss is from a parabola.

    Attributes:
        standard_error: over sequences, conditional on the plane.
        rounding: what fp32 alone makes of it at this step, one standard deviation.
        at_double_step: the same with 2 h; None where the grid does not reach that far.
    """

    value: float
    standard_error: float
    rounding: float
    step: float
    at_double_step: float | None


def second_difference(losses_XB: Tensor, coordinates: Sequence[float], rounding: float) -> SecondDifference:
    """Of the losses along one axis, the base among them; `rounding` is the s.d. of a second difference in fp32."""
    base = coordinates.index(0.0)
    step = coordinates[base + 1]

    def over(count: int) -> Tensor:
        return (losses_XB[base + count] - 2 * losses_XB[base] + losses_XB[base - count]) / (count * step) ** 2

    value, error = mean_and_error(over(1))
    reaches = 2 <= base < len(coordinates) - 2
    return SecondDifference(value, error, rounding / step**2, step, float(over(2).mean()) if reaches else None)


def rounding_points(theta_norm: float) -> list[Point]:
    """Points so close to the base that second differences of their losses are fp32's rounding and nothing else."""
    signed = [sign * share * theta_norm for share in ROUNDING_STEPS for sign in (-1, 1)]
    return [Point(x, 0.0) for x in signed] + [Point(0.0, y) for y in signed]


def rounding_of(losses_QB: Tensor, base_B: Tensor) -> float:
    """Root mean square of the second differences of the mean loss at `rounding_points`, nats per token."""
    pairs = losses_QB.mean(dim=1).view(-1, 2).sum(dim=1)
    return float((pairs - 2 * base_B.mean()).square().mean().sqrt())
