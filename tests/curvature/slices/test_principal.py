"""The plane of a trajectory, against the singular values of stacked weights.

Shapes: P parameters, N checkpoints, F fitted ones.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from base.errors import UserError
from ckpt_tools.hf.measured import TrajectoryPlane
from ckpt_tools.hf.results import read_result
from curvature.slices.principal import principal_plane
from tests.conftest import make_hf_directory
from tests.curvature.conftest import command
from train.data.batches import batch
from train.data.corpus import open_corpus

FITTED, PROJECTED = 5, 2
SMALL = ["--grid", "4", "--sequences", "3", "--batch-size", "2"]


class Trajectory(NamedTuple):
    """Checkpoints on a curve, two beside it, and all of their weights, float64 [N, P]."""

    paths: list[Path]
    weights_NP: np.ndarray

    def options(self) -> list[Path | str]:
        """Words of the command."""
        projected = [word for path in self.paths[FITTED:] for word in ("--project", path)]
        return [*self.paths[:FITTED], *projected]


@pytest.fixture(scope="module")
def trajectory(tmp_path_factory) -> Trajectory:
    """Weights that move along one direction, bend into a second, and jitter in all others."""
    root, generator = tmp_path_factory.mktemp("trajectory"), torch.Generator().manual_seed(5)
    first = load_file(make_hf_directory(root / "run/hf/step0") / "model.safetensors")
    along, across = (
        {name: torch.randn(weight.shape, generator=generator) for name, weight in first.items()}
        for _ in range(2)
    )
    paths, weights = [], []
    for index in range(FITTED + PROJECTED):
        branch = index >= FITTED
        directory = root / ("cooled" if branch else "run") / "hf" / f"step{index}"
        if index:
            make_hf_directory(directory)
        tensors = {
            name: weight
            + 0.01 * index * along[name]
            + 0.002 * (index - 2) ** 2 * across[name]
            + (0.004 if branch else 0.001) * torch.randn(weight.shape, generator=generator)
            for name, weight in first.items()
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        paths.append(directory)
        weights.append(
            np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(tensors)])
        )
    return Trajectory(paths, np.stack(weights))


@pytest.fixture(scope="module")
def measured(tmp_path_factory, trajectory, held_out_prefix) -> TrajectoryPlane:
    out = tmp_path_factory.mktemp("pca")
    options = ["--data", held_out_prefix, *SMALL, "--out", out]
    assert command("pca", *trajectory.options(), *options) == 0
    assert json.loads((out / "result.json").read_text())["spec"]["name"] == "pca"
    return read_result(out, TrajectoryPlane).measured


class Components(NamedTuple):
    """Mean, two components with the signs of the product, and shares of variance."""

    mean_P: np.ndarray
    axes_2P: np.ndarray
    shares_F: np.ndarray


def components_of(weights_NP: np.ndarray, fitted: int) -> Components:
    """By singular values of the fitted checkpoints' stacked differences from their mean."""
    mean_P = weights_NP[:fitted].mean(axis=0)
    _, singular, axes = np.linalg.svd(weights_NP[:fitted] - mean_P, full_matrices=False)
    places = (weights_NP - mean_P) @ axes[:2].T
    largest = np.abs(places[:, 1]).argmax()
    signs = np.sign([places[fitted - 1, 0] - places[0, 0], places[largest, 1]])
    return Components(mean_P, axes[:2] * signs[:, None], singular**2 / (singular**2).sum())


def test_components_places_and_distances_are_those_of_singular_values(measured, trajectory):
    components = components_of(trajectory.weights_NP, FITTED)
    assert measured.variance_shares == pytest.approx(components.shares_F[:-1], rel=1e-9)
    differences = trajectory.weights_NP - components.mean_P
    places = differences @ components.axes_2P.T
    outside = np.linalg.norm(differences - places @ components.axes_2P, axis=1)
    for point, place, distance, difference in zip(
        measured.points, places, outside, differences, strict=True
    ):
        assert [point.x, point.y] == pytest.approx(place, rel=1e-9, abs=1e-9)
        assert point.off_plane == pytest.approx(distance, rel=1e-9)
        assert point.off_plane_share == pytest.approx(distance / np.linalg.norm(difference))
    assert [point.fitted for point in measured.points] == [True] * FITTED + [False] * PROJECTED
    assert [Path(point.path) for point in measured.points] == trajectory.paths


@torch.no_grad()
def loss_of(weights_P: np.ndarray, trajectory: Trajectory, held_out_prefix: Path) -> float:
    """The mean loss of three sequences by transformers, of a model with these weights."""
    model = AutoModelForCausalLM.from_pretrained(trajectory.paths[0], dtype=torch.float32)
    named, start = dict(model.named_parameters()), 0
    for name in sorted(named):
        part = weights_P[start : start + named[name].numel()]
        named[name].copy_(torch.from_numpy(part).view_as(named[name]))
        start += len(part)
    rows = torch.from_numpy(
        batch(open_corpus(held_out_prefix), step=1, batch_size=3, sequence_length=64, seed=0)
    )
    return float(np.mean([model(row[None], labels=row[None]).loss.item() for row in rows]))


def test_losses_are_those_of_weights_put_together_by_hand(measured, trajectory, held_out_prefix):
    """On nodes of the grid, at projections, and of the checkpoints themselves."""
    components, grid = components_of(trajectory.weights_NP, FITTED), measured.grid
    for row, column in ((0, 0), (3, 1), (2, 3)):
        place = np.array([grid.x[column], grid.y[row]]) @ components.axes_2P
        expected = loss_of(components.mean_P + place, trajectory, held_out_prefix)
        assert grid.loss[row][column] == pytest.approx(expected, rel=2e-6)
    for index in (1, FITTED - 1, FITTED):
        point, weights_P = measured.points[index], trajectory.weights_NP[index]
        itself = loss_of(weights_P, trajectory, held_out_prefix)
        assert point.checkpoint_loss == pytest.approx(itself, rel=2e-6)
        place = np.array([point.x, point.y]) @ components.axes_2P
        on_plane = loss_of(components.mean_P + place, trajectory, held_out_prefix)
        assert point.loss == pytest.approx(on_plane, rel=2e-6)
        increase = point.loss - measured.points[FITTED - 1].loss
        assert point.increase == pytest.approx(increase, abs=1e-12)
    for axis in "xy":
        reached = [getattr(point, axis) for point in measured.points]
        places = getattr(grid, axis)
        assert places[0] < min(reached) <= max(reached) < places[-1]


def squares(vectors_NP: np.ndarray) -> torch.Tensor:
    """Inner products of differences from the second vector: any one may be the reference."""
    differences = torch.from_numpy(vectors_NP - vectors_NP[1])
    return differences @ differences.T


def test_three_checkpoints_are_on_their_plane():
    """As is any other that is between them."""
    vectors = np.random.default_rng(0).normal(size=(3, 50))
    vectors = np.vstack([vectors, vectors.mean(axis=0), 2 * vectors[0] - vectors[1]])
    principal = principal_plane(squares(vectors), 3)
    assert principal.off_plane == pytest.approx(np.zeros(5), abs=1e-6)
    assert sum(principal.variance_shares) == pytest.approx(1.0)
    for point, vector in zip(principal.points, vectors, strict=True):
        assert np.array(principal.plane.coefficients(point)) @ vectors == pytest.approx(vector)


@pytest.mark.parametrize(
    ("vectors", "fitted", "message"),
    [
        (np.eye(4), 2, "2 checkpoints span no plane; give three or more"),
        (np.outer([0.0, 1.0, 3.0, 4.0], np.ones(6)), 4, "on one line"),
        (np.ones((3, 6)), 3, "on one line"),
        (np.array([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [5.0, 0.0]]), 3, "on one line"),
    ],
)
def test_checkpoints_that_span_no_plane_are_refused(vectors, fitted, message):
    with pytest.raises(UserError, match=message):
        principal_plane(squares(vectors), fitted)


def test_bad_input_ends_with_nothing_written(trajectory, held_out_prefix, tmp_path, capsys):
    first, second, *_ = trajectory.paths

    def refusal(*paths) -> str:
        out = tmp_path / "out"
        assert command("pca", *paths, "--data", held_out_prefix, *SMALL, "--out", out) == 2
        assert not out.exists()
        return capsys.readouterr().err.splitlines()[-1]

    assert "2 checkpoints span no plane" in refusal(first, second)
    assert "on one line" in refusal(first, second, first)
    assert "config.json does not exist" in refusal(first, second, tmp_path)
    wider = make_hf_directory(tmp_path / "wider", intermediate_size=96)
    assert "has other parameters than" in refusal(*trajectory.paths[:3], "--project", wider)
