"""A plane through models' weights: places of points in true distances, and the losses at them.

Every point is a sum of coefficients times models, theta(x, y) = sum_i c_i theta_i with sum_i c_i =
1, and (x, y) are Euclidean distances along orthonormal axes. `curvature.slices.corners` puts the
weights together.

Shapes: B sequences, S positions of a sequence, V vocabulary, Q points, N models, Y and X
coordinates of the grid.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from base.errors import UserError
from base.progress import Progress
from base.ranks import Ranks
from curvature.slices.corners import Corners

SMALLEST_ANGLE = 1e-3  # radians between two directions that span a plane


class PlanePoint(NamedTuple):
    """A place in a plane: Euclidean distances along its axes."""

    x: float
    y: float


class Plane(NamedTuple):
    """A plane as coefficients on N models.

    Attributes:
        origin_N: the place (0, 0); they sum to 1.
        first_N, second_N: the directions that span it, the first along x; they sum to 0.
        ends: the places of origin + first, and of origin + second.

    Example: y is orthogonal to x, so the second direction is 3 along x and 4 along y.
        >>> squares = torch.tensor([[0.0, 0.0, 0.0], [0.0, 4.0, 6.0], [0.0, 6.0, 25.0]])
        >>> plane = through_three(squares.double())
        >>> plane.ends
        (PlanePoint(x=2.0, y=0.0), PlanePoint(x=3.0, y=4.0))
        >>> plane.coefficients(PlanePoint(3.0, 4.0))
        [0.0, 0.0, 1.0]
    """

    origin_N: list[float]
    first_N: list[float]
    second_N: list[float]
    ends: tuple[PlanePoint, PlanePoint]

    def coefficients(self, point: PlanePoint) -> list[float]:
        """Return those of a point, exact at the origin and at both ends."""
        # `second` alone has a part along y, so b comes first and a from what is left along x.
        b = point.y / self.ends[1].y
        a = (point.x - b * self.ends[1].x) / self.ends[0].x
        directions = zip(self.origin_N, self.first_N, self.second_N, strict=True)
        return [origin + a * first + b * second for origin, first, second in directions]


def through_three(differences_NN: Tensor) -> Plane:
    """Return the plane through three models, with the first at its origin and x to the second.

    Args:
        differences_NN: inner products of their differences from the first, float64 [3, 3].

    Raises:
        UserError: two of them are equal, or all are on one line.
    """
    # Rounding may make a square negative where two models are nearly the same.
    lengths = [math.sqrt(max(float(differences_NN[i, i]), 0.0)) for i in (1, 2)]
    if not all(0 < length < math.inf for length in lengths):
        raise UserError(
            f"the directions have lengths {lengths}, no plane; give points that differ from the"
            " first"
        )
    along = float(differences_NN[1, 2]) / lengths[0]
    across = math.sqrt(max(lengths[1] ** 2 - along**2, 0.0))
    if across < SMALLEST_ANGLE * lengths[1]:
        raise UserError(
            "the three points are on one line, which is not a plane; give another point"
        )
    ends = PlanePoint(lengths[0], 0.0), PlanePoint(along, across)
    return Plane([1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0], ends)


class SequenceLosses:
    """The losses of B sequences at whatever the model's weights are when it is called.

    Sequences go through the model in the same batches every time, so that the same weights give the
    same bits. `weights` are the model's own, by name; a tied one is there once.
    """

    def __init__(self, model: PreTrainedModel, tokens_BS1: Tensor, batch_size: int) -> None:
        self.model, self.sequences = model, len(tokens_BS1)
        self.weights: dict[str, Tensor] = dict(model.named_parameters())
        self._batches = tokens_BS1.to(model.device).split(batch_size)

    def __call__(self) -> Tensor:
        """Return the mean cross-entropy of every sequence, nats per token, float64 [B]."""
        with torch.inference_mode():
            means = [self._nats(tokens_BS1).double().mean(dim=1) for tokens_BS1 in self._batches]
        return torch.cat(means).cpu()

    def _nats(self, tokens_BS1: Tensor) -> Tensor:
        logits_BSV: Tensor = self.model(input_ids=tokens_BS1[:, :-1], use_cache=False).logits
        if logits_BSV.dtype == torch.bfloat16:
            logits_BSV = logits_BSV.float()  # a sum over the vocabulary in bf16 is no loss
        labels_BS1 = tokens_BS1[:, 1:, None]
        return logits_BSV.logsumexp(dim=-1) - logits_BSV.gather(-1, labels_BS1).squeeze(-1)


class Walk:
    """A model whose weights are moved over a plane, in memory twice: its own, and a direction.

    A row of the grid begins with weights put together from the files. From there each step adds
    the direction along x. A step rounds as any sum in fp32 does, some 6e-8 of a weight, and rows
    take a few dozen.
    """

    def __init__(self, corners: Corners, plane: Plane, losses: SequenceLosses) -> None:
        self._corners, self._plane, self._losses = corners, plane, losses
        weights: Mapping[str, Tensor] = losses.weights
        self._along = {name: torch.empty_like(weight) for name, weight in weights.items()}
        corners.combine(plane.first_N, self._along)

    @torch.no_grad()
    def half_row(self, y: float, x_X: Sequence[float]) -> list[Tensor]:
        """Return the losses at places of a row, each a step from the one before, from x = 0 on."""
        self._corners.combine(self._plane.coefficients(PlanePoint(0.0, y)), self._losses.weights)
        losses, here = [], 0.0
        for x in x_X:
            step = (x - here) / self._plane.ends[0].x
            if step:
                for name, weight in self._losses.weights.items():
                    weight.add_(self._along[name], alpha=step)
            losses.append(self._losses())
            here = x
        return losses


def losses_at(
    corners: Corners,
    losses: SequenceLosses,
    coefficients_QN: Sequence[Sequence[float]],
    ranks: Ranks,
    label: str,
) -> Tensor:
    """Return the losses of every sequence at every point, nats per token, float64 [Q, B].

    The ranks share the points out, and every rank has all losses in the end. The weights are in
    memory once.

    Raises:
        UserError: a loss is not finite.
    """
    # Points of other ranks stay 0, so the sum over the ranks fills them in.
    losses_QB = torch.zeros(len(coefficients_QN), losses.sequences, dtype=torch.float64)
    share = ranks.share(len(coefficients_QN))
    with Progress(label, total=len(share)) as progress:
        for index in share:
            corners.combine(coefficients_QN[index], losses.weights)
            losses_QB[index] = losses()
            progress.advance(loss=float(losses_QB[index].mean()))
    ranks.sum(losses_QB)
    # Checked after the sum, where all ranks see the same losses and stop together.
    for coefficients_N, losses_B in zip(coefficients_QN, losses_QB, strict=True):
        words = " + ".join(
            f"{factor:.3g} {corner.path}"
            for factor, corner in zip(coefficients_N, corners.corners, strict=True)
            if factor
        )
        check_finite(words, losses_B, "give other models")
    return losses_QB


def losses_on_grid(
    corners: Corners,
    plane: Plane,
    losses: SequenceLosses,
    x_X: Sequence[float],
    y_Y: Sequence[float],
    ranks: Ranks,
) -> Tensor:
    """Return the losses of every sequence on a grid, nats per token, float64 [Y, X, B].

    0 is among the x. The ranks share the halves of rows on both sides of it, so that no loss
    depends on their number.

    Raises:
        UserError: a loss is not finite.
    """
    origin = x_X.index(0.0)
    # Outwards from 0, where a row begins: so few roundings add up, and none at 0.
    sides = range(origin, len(x_X)), range(origin - 1, -1, -1)
    halves = [(row, columns) for row in range(len(y_Y)) for columns in sides]
    share = [halves[index] for index in ranks.share(len(halves))]
    losses_YXB = torch.zeros(len(y_Y), len(x_X), losses.sequences, dtype=torch.float64)
    walk = Walk(corners, plane, losses)
    with Progress("grid", total=sum(len(columns) for _, columns in share)) as progress:
        for row, columns in share:
            half = walk.half_row(y_Y[row], [x_X[column] for column in columns])
            for column, losses_B in zip(columns, half, strict=True):
                losses_YXB[row, column] = losses_B
                progress.advance(loss=float(losses_B.mean()))
    ranks.sum(losses_YXB)
    for y, losses_XB in zip(y_Y, losses_YXB, strict=True):
        for x, losses_B in zip(x_X, losses_XB, strict=True):
            check_finite(f"x {x:.4g}, y {y:.4g}", losses_B, "give other models")
    return losses_YXB


def check_finite(point: str, losses_B: Tensor, next_action: str) -> None:
    """Raise UserError that names the point if a loss there is not finite."""
    if not torch.isfinite(losses_B).all():
        raise UserError(f"the loss at {point} is {float(losses_B.mean())}; {next_action}")


def grid_coordinates(values: Sequence[float], margin: float, count: int) -> list[float]:
    """Return evenly spaced coordinates that reach `margin` beyond 0 and all values on both sides.

    0 is among them, to the bit: of all places for it, the one with the smallest step is taken.

    Example:
        >>> grid_coordinates([2.0], margin=1.0, count=5)
        [-1.0, 0.0, 1.0, 2.0, 3.0]
    """
    low, high = min(0.0, *values) - margin, max(0.0, *values) + margin
    # With `below` steps on the left of 0, one step must be long enough for either side.
    step, below = min(
        (max(-low / below, high / (count - 1 - below)), below) for below in range(1, count - 1)
    )
    return [(index - below) * step for index in range(count)]
