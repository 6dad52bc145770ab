"""Geometry of a plane, against dense linear algebra in float64.

Shapes: P parameters, Q points, B sequences.
"""

import math

import numpy as np
import pytest
import torch

from base.errors import UserError
from base.ranks import start
from curvature.slices.plane import Plane, PlanePoint, SequenceLosses, grid_coordinates, losses_at
from tests.curvature.conftest import random_tokens, tiny_model


def random_direction(weights, seed):
    """As long as the weights in every matrix; norms do not move along it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight.norm() * drawn / drawn.norm()
        for name, weight in weights.items()
        if weight.dim() > 1
        for drawn in [torch.randn(weight.shape, generator=generator, dtype=weight.dtype)]
    }


@pytest.fixture
def directions(curved):
    """Two that are far from orthogonal."""
    first, second = (random_direction(curved.losses.weights, index) for index in range(2))
    return first, {name: second[name] - 0.6 * first[name] for name in first}


def axes_of(curved, directions):
    """The orthonormal axes by QR, each on the side of its direction, [P, 2]."""
    spanning = np.stack([curved.flat(direction).numpy() for direction in directions], axis=1)
    q, r = np.linalg.qr(spanning)
    return q * np.sign(np.diag(r)), spanning


def test_coordinates_are_true_distances(curved, directions):
    axes, spanning = axes_of(curved, directions)
    weights = curved.losses.weights
    base_P = curved.flat(weights).numpy().copy()
    plane = Plane(weights, *directions)
    for point in (PlanePoint(0.3, -0.2), PlanePoint(-2.0, 0.7), *plane.ends):
        plane.move(point)
        assert curved.flat(weights).numpy() - base_P == pytest.approx(
            axes @ np.array(point), abs=1e-12
        )
    assert math.hypot(*plane.ends[1]) == pytest.approx(np.linalg.norm(spanning[:, 1]))
    cosine = spanning[:, 0] @ spanning[:, 1] / np.prod(np.linalg.norm(spanning, axis=0))
    assert plane.cosine == pytest.approx(cosine)
    for end, direction_P in zip(plane.ends, spanning.T, strict=True):
        plane.move(end)
        assert curved.flat(weights).numpy() == pytest.approx(base_P + direction_P, abs=1e-14)


def test_the_origin_is_the_base_to_the_bit_after_any_walk():
    losses = SequenceLosses(tiny_model(torch.float32), random_tokens(4), batch_size=2)
    before = {name: weight.detach().clone() for name, weight in losses.weights.items()}
    first_losses = losses()
    plane = Plane(losses.weights, *(random_direction(losses.weights, index) for index in range(2)))
    for point in (PlanePoint(3.1, -0.7), PlanePoint(1e-3, 1e3), PlanePoint(0.0, 0.0)):
        plane.move(point)
    assert all(torch.equal(before[name], weight) for name, weight in losses.weights.items())
    assert torch.equal(losses(), first_losses)


@pytest.mark.parametrize(
    ("values", "margin", "count"),
    [
        ([0.0], 1.0, 15),
        ([0.0, 2.2, 0.001], 3.7, 15),
        ([0.0, 5.0], 0.1, 3),
        ([0.0, -7.0, 4.0], 0.5, 10),
        ([0.0], 1.0, 4),
    ],
)
def test_grids_hold_zero_and_all_points_with_their_margin(values, margin, count):
    coordinates = grid_coordinates(values, margin, count)
    assert len(coordinates) == count
    assert coordinates.count(0.0) == 1
    assert 0.0 not in (coordinates[0], coordinates[-1])
    assert coordinates[0] <= min(values) - margin + 1e-12
    assert coordinates[-1] >= max(values) + margin - 1e-12
    steps = np.diff(coordinates)
    assert steps == pytest.approx(steps[0])
    needed = max(values) - min(values) + 2 * margin
    assert coordinates[-1] - coordinates[0] <= needed * 2 if count == 3 else needed * 1.5


def test_directions_that_span_no_plane_are_refused():
    weights = dict(tiny_model(torch.float32).named_parameters())
    first = random_direction(weights, 0)
    for second in ({}, {name: 0 * part for name, part in first.items()}):
        with pytest.raises(UserError, match="differ from the model"):
            Plane(weights, first, second)
    with pytest.raises(UserError, match="on one line"):
        Plane(weights, first, {name: -2 * part for name, part in first.items()})


def test_a_point_without_a_finite_loss_is_named(curved, directions):
    plane = Plane(curved.losses.weights, *directions)
    points = [PlanePoint(0.0, 0.0), PlanePoint(0.0, math.inf)]
    with pytest.raises(UserError, match=r"x 0, y inf is nan"):
        losses_at(plane, curved.losses, points, start("cpu"), "test")
