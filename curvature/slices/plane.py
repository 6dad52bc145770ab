"""A plane through a model's weights: places of points, in true distances, and the losses at them.

theta(x, y) = base + a first + b second, with (x, y) the coordinates along the orthonormal axes that
Gram-Schmidt makes of the two directions: x along `first`, y along the part of `second` that is
orthogonal to it.

Shapes: B sequences, S positions of a sequence, V vocabulary, Q points.
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

SMALLEST_ANGLE = 1e-3  # radians between two directions that span a plane


def dot(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the inner product in float64, over the tensors that both have: an absent one is 0.

    Example:
        >>> dot({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.tensor([1.0, 2.0])})
        3.0
    """
    return sum(
        float(first[name].detach().double().flatten() @ second[name].detach().double().flatten())
        for name in first
        if name in second
    )


class PlanePoint(NamedTuple):
    """A place in a plane: Euclidean distances along its axes."""

    x: float
    y: float


class Plane:
    """The plane spanned by two directions at a model's weights, which it overwrites.

    Holds the weights four times: the model's own, a copy of the base, and both directions, in which
    an absent tensor does not move.

    Attributes:
        ends: theta = base + first, and theta = base + second.

    Raises:
        UserError: the directions span no plane.

    Example: y is orthogonal to x, so (3, 4) of the second direction is 3 along x and 4 along y.
        >>> weights = {"w": torch.zeros(2)}
        >>> first, second = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([3.0, 4.0])}
        >>> plane = Plane(weights, first, second)
        >>> plane.move(PlanePoint(0.0, 4.0))
        >>> plane.ends[1], weights["w"].tolist()
        (PlanePoint(x=3.0, y=4.0), [0.0, 4.0])
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor],
    ) -> None:
        lengths = [math.sqrt(dot(direction, direction)) for direction in (first, second)]
        if not all(0 < length < math.inf for length in lengths):
            raise UserError(
                f"the directions have lengths {lengths}, no plane; give points that differ from the"
                " model"
            )
        along = dot(first, second) / lengths[0]
        # Rounding may make the difference negative where the directions are nearly parallel.
        across = math.sqrt(max(lengths[1] ** 2 - along**2, 0.0))
        if across < SMALLEST_ANGLE * lengths[1]:
            raise UserError(
                "both points are on one line with the model, which is not a plane; give another"
                " point"
            )
        self.ends = PlanePoint(lengths[0], 0.0), PlanePoint(along, across)
        self.cosine = along / lengths[1]
        self._weights, self._first, self._second = weights, first, second
        self._base = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def move(self, point: PlanePoint) -> None:
        """Set the weights to those at a point, always from the base: no rounding adds up."""
        # `second` alone has a part along y, so b comes first and a from what is left along x.
        b = point.y / self.ends[1].y
        a = (point.x - b * self.ends[1].x) / self.ends[0].x  # exact at the base and the ends
        for name, weight in self._weights.items():
            weight.copy_(self._base[name])
            if name in self._first:
                weight.add_(self._first[name], alpha=a)
            if name in self._second:
                weight.add_(self._second[name], alpha=b)


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
        labels_BS1 = tokens_BS1[:, 1:, None]
        return logits_BSV.logsumexp(dim=-1) - logits_BSV.gather(-1, labels_BS1).squeeze(-1)


def losses_at(
    plane: Plane, losses: SequenceLosses, points: Sequence[PlanePoint], ranks: Ranks, label: str
) -> Tensor:
    """Return the losses of every sequence at every point, nats per token, float64 [Q, B].

    The ranks share the points out, and every rank has all losses in the end.

    Raises:
        UserError: a loss is not finite.
    """
    # Points of other ranks stay 0, so the sum over the ranks fills them in.
    losses_QB = torch.zeros(len(points), losses.sequences, dtype=torch.float64)
    share = ranks.share(len(points))
    with Progress(label, total=len(share)) as progress:
        for index in share:
            plane.move(points[index])
            losses_QB[index] = losses()
            progress.advance(loss=float(losses_QB[index].mean()))
    ranks.sum(losses_QB)
    # Checked after the sum, where all ranks see the same losses and stop together.
    for point, losses_B in zip(points, losses_QB, strict=True):
        check_finite(f"x {point.x:.4g}, y {point.y:.4g}", losses_B, "give other models")
    return losses_QB


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
