"""Geometry of a plane and weights put together from files, against dense algebra in float64.

Shapes: P parameters, N models, Q points, B sequences.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from base.errors import UserError
from base.ranks import ALONE
from curvature.slices import corners as corners_of_files
from curvature.slices.corners import Corners, open_corner
from curvature.slices.plane import (
    Plane,
    PlanePoint,
    SequenceLosses,
    grid_coordinates,
    losses_at,
    losses_on_grid,
    through_three,
)
from tests.conftest import make_hf_directory


class Models(NamedTuple):
    """Checkpoints of one model in files, and all of their weights, float64 [N, P]."""

    paths: list[Path]
    corners: Corners
    weights_NP: np.ndarray


def read_flat(path: Path) -> np.ndarray:
    """The weights of an HF directory as one vector, by name."""
    tensors = load_file(path / "model.safetensors")
    return np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(tensors)])


def flat(weights: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate(
        [weights[name].detach().double().numpy().ravel() for name in sorted(weights)]
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    """Four, in fp32 but for one in bf16."""
    root = tmp_path_factory.mktemp("models")
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    paths = [
        make_hf_directory(root / str(seed), seed=seed, dtype=dtype)
        for seed, dtype in enumerate(dtypes)
    ]
    corners = Corners([open_corner(path) for path in paths])
    return Models(paths, corners, np.stack([read_flat(path) for path in paths]))


@pytest.fixture
def losses(models) -> SequenceLosses:
    model = loaded(models.paths[0])
    generator = torch.Generator().manual_seed(0)
    return SequenceLosses(model, torch.randint(0, 320, (4, 9), generator=generator), batch_size=3)


def loaded(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(params=[1 << 28, 2000], ids=["whole tensors", "few rows"])
def bytes_at_once(request, monkeypatch):
    monkeypatch.setattr(corners_of_files, "BYTES_AT_ONCE", request.param)


@pytest.mark.usefixtures("bytes_at_once")
def test_inner_products_are_those_of_stacked_weights(models):
    gram = models.corners.gram(ALONE)
    differences = models.weights_NP - models.weights_NP[0]
    assert gram.differences_NN.numpy() == pytest.approx(differences @ differences.T, rel=1e-12)
    assert gram.theta_norm == pytest.approx(np.linalg.norm(models.weights_NP[0]), rel=1e-13)


@pytest.mark.usefixtures("bytes_at_once")
def test_a_combination_is_that_of_stacked_weights_and_a_model_itself_to_the_bit(models, losses):
    coefficients = [0.7, -0.4, 0.9, -0.2]
    models.corners.combine(coefficients, losses.weights)
    expected = np.float32(np.array(coefficients) @ models.weights_NP)
    # sums in another order: a weight below 2 may round to the next number of fp32
    assert np.abs(flat(losses.weights) - expected).max() <= 2**-23
    for index, weights_P in enumerate(models.weights_NP):
        models.corners.combine([float(other == index) for other in range(4)], losses.weights)
        assert (flat(losses.weights) == weights_P).all()


def three(models, *chosen: int) -> Plane:
    vectors = models.weights_NP[list(chosen)] - models.weights_NP[chosen[0]]
    return through_three(torch.from_numpy(vectors @ vectors.T))


def test_coordinates_are_true_distances(models):
    plane, (base_P, first_P, second_P, _) = three(models, 0, 1, 2), models.weights_NP
    spanning = np.stack([first_P - base_P, second_P - base_P], axis=1)
    q, r = np.linalg.qr(spanning)
    axes = q * np.sign(np.diag(r))
    for point in (PlanePoint(0.3, -0.2), PlanePoint(-2.0, 0.7), *plane.ends):
        weights_P = np.array(plane.coefficients(point)) @ models.weights_NP[:3]
        assert weights_P - base_P == pytest.approx(axes @ np.array(point), abs=1e-12)
    assert math.hypot(*plane.ends[1]) == pytest.approx(np.linalg.norm(spanning[:, 1]))


def test_the_three_points_are_on_their_plane_exactly(models):
    plane = three(models, 0, 1, 2)
    for index, point in enumerate((PlanePoint(0.0, 0.0), *plane.ends)):
        assert plane.coefficients(point) == [float(other == index) for other in range(3)]


def test_losses_on_a_grid_are_those_of_weights_put_together_one_by_one(models, losses):
    """A walk adds directions, `losses_at` begins anew at every point: 1e-6 is fp32's rounding."""
    corners = Corners(models.corners.corners[:3])
    plane = three(models, 0, 1, 2)
    x, y = [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0], [-3.0, 0.0, 3.0]
    grid = losses_on_grid(corners, plane, losses, x, y, ALONE)
    places = [plane.coefficients(PlanePoint(a, b)) for b in y for a in x]
    one_by_one = losses_at(corners, losses, places, ALONE, "test").view(3, 6, -1)
    assert grid.numpy() == pytest.approx(one_by_one.numpy(), rel=1e-6)
    # a row begins at x = 0: the base itself, to the bit
    assert torch.equal(grid[1, 2], one_by_one[1, 2])
    base = SequenceLosses(loaded(models.paths[0]), torch.cat(losses._batches), batch_size=3)
    assert torch.equal(grid[1, 2], base())


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


def test_points_that_span_no_plane_are_refused(models):
    with pytest.raises(UserError, match="differ from the first"):
        three(models, 0, 0, 1)
    with pytest.raises(UserError, match="differ from the first"):
        three(models, 0, 1, 0)
    with pytest.raises(UserError, match="on one line"):
        three(models, 0, 1, 1)
    along = np.array([0.0, 1.0, -2.0])
    with pytest.raises(UserError, match="on one line"):
        through_three(torch.from_numpy(np.outer(along, along)))


def test_a_point_without_a_finite_loss_is_named(models, losses):
    places = [[1.0, 0.0, 0.0, 0.0], [0.0, math.inf, 0.0, 1.0]]
    message = r"the loss at inf \S+1 \+ 1 \S+3 is nan"
    with pytest.raises(UserError, match=message):
        losses_at(models.corners, losses, places, ALONE, "test")
