"""The plane of a trajectory: the first two principal components of its checkpoints' weights.

Li et al. 2018 (arXiv:1712.09913, section 7) draw trajectories so, and the code of arXiv:2510.06213
draws its cooldowns. Components follow from the inner products of the checkpoints' differences, N
by N numbers, and are coefficients on the checkpoints as any point of a plane is: no component is
stored.

Shapes: N checkpoints, F of them, the first ones, that the components are of, B sequences.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.environment import environment
from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.hf.model import identify
from curvature.settings import SliceSettings
from curvature.slices.corners import Corners, open_corner
from curvature.slices.measurement import (
    checked_losses,
    described_losses,
    load_losses,
    losses_from_files,
    measured_grid,
    open_sequences,
)
from curvature.slices.plane import SMALLEST_ANGLE, Plane, PlanePoint, losses_at

FEWEST = 3  # checkpoints that can span a plane
UNITS = {
    "points.x, points.y, points.off_plane, grid.x, grid.y": "Euclidean distance of the parameters",
    "points.off_plane_share": "off_plane / distance from the mean of the fitted checkpoints",
    "points.loss, points.checkpoint_loss, points.increase, points.losses, grid.loss": (
        "nats per token"
    ),
    "variance_shares": "of the fitted checkpoints' variance, by component",
    "end.relative_difference": "of the last checkpoint's loss to loss_from_files",
}


class Principal(NamedTuple):
    """The plane of principal components.

    Attributes:
        plane: with the mean of the fitted checkpoints at its origin, in coefficients on all N.
        points: the projections of all N.
        off_plane: their distances from their projections.
        off_plane_shares: these over their distances from the mean.
        variance_shares: the parts of the fitted checkpoints' variance, largest first.
    """

    plane: Plane
    points: list[PlanePoint]
    off_plane: list[float]
    off_plane_shares: list[float]
    variance_shares: list[float]


def principal_plane(differences_NN: Tensor, fitted: int) -> Principal:
    """Return the plane of the first two principal components of the first `fitted` checkpoints.

    x grows from the first of them to the last, and the largest distance along y is positive.

    Args:
        differences_NN: inner products of differences from one of the checkpoints, float64.
        fitted: F; the others are projected alone.

    Raises:
        UserError: fewer than three are fitted, or they are on one line.
    """
    if fitted < FEWEST:
        raise UserError(
            f"{fitted} checkpoints span no plane; give three or more to take components of"
        )
    # Inner products of differences from the mean of the fitted ones.
    count = len(differences_NN)
    mean_N = torch.zeros(count, dtype=torch.float64)
    mean_N[:fitted] = 1 / fitted
    centre_NN = torch.eye(count, dtype=torch.float64) - mean_N
    centred_NN = centre_NN @ differences_NN @ centre_NN.T

    # Eigenvalues rise; those of fitted checkpoints on a line are 0 but for one.
    squares_F, vectors_FF = torch.linalg.eigh(centred_NN[:fitted, :fitted])
    squares_F, vectors_FF = squares_F.flip(0).clamp(min=0.0), vectors_FF.flip(1)
    if not float(squares_F[1]) > SMALLEST_ANGLE**2 * float(squares_F[0]):
        raise UserError(
            "the checkpoints are on one line, which is not a plane; give others, or more of them"
        )
    weights_F2 = vectors_FF[:, :2] / squares_F[:2].sqrt()
    places_N2 = centred_NN[:, :fitted] @ weights_F2
    signs_2 = torch.tensor([_sign(places_N2[fitted - 1, 0] - places_N2[0, 0]), 1.0])
    signs_2[1] = _sign(places_N2[places_N2[:, 1].abs().argmax(), 1])
    weights_F2, places_N2 = weights_F2 * signs_2, places_N2 * signs_2

    # A direction is a sum of differences from the mean, so its coefficients sum to 0.
    directions_N2 = torch.zeros(count, 2, dtype=torch.float64)
    directions_N2[:fitted] = weights_F2 - weights_F2.mean(dim=0)
    ends = PlanePoint(1.0, 0.0), PlanePoint(0.0, 1.0)
    first_N, second_N = directions_N2.T.tolist()
    plane = Plane(mean_N.tolist(), first_N, second_N, ends)

    lengths_N = centred_NN.diagonal().clamp(min=0.0)
    outside_N = (lengths_N - places_N2.square().sum(dim=1)).clamp(min=0.0)
    # A checkpoint at the mean itself is on the plane.
    shares_N = (outside_N / lengths_N).nan_to_num(0.0).sqrt()
    return Principal(
        plane,
        [PlanePoint(*place) for place in places_N2.tolist()],
        outside_N.sqrt().tolist(),
        shares_N.tolist(),
        (squares_F[:-1] / squares_F.sum()).tolist(),  # the last component of F points is none
    )


def _sign(value: Tensor) -> float:
    return -1.0 if float(value) < 0 else 1.0


def measure(
    fitted: Sequence[Path],
    projected: Sequence[Path],
    settings: SliceSettings,
    data_prefix: Path,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the content of result.json of the plane of a trajectory, without writing it.

    The weights of a model are in memory twice, however many checkpoints there are.

    Raises:
        UserError: models, text and settings do not fit, the checkpoints span no plane, a loss is
            not finite, or a checkpoint does not have the loss of its files.
    """
    clock = time.perf_counter()
    corners = Corners([open_corner(path) for path in (*fitted, *projected)])
    # The end of the trajectory: increases are over the loss of its projection.
    last = len(fitted) - 1
    end = corners.corners[last]
    sequences = open_sequences(end.hf_dir, settings, data_prefix)
    identities = [identify(corner.hf_dir) if ranks.rank == 0 else {} for corner in corners.corners]
    gram = corners.gram(ranks)
    principal = principal_plane(gram.differences_NN, len(fitted))

    losses = load_losses(end, sequences, ranks)
    direct_B = losses_from_files(losses, end)
    alone = torch.eye(len(corners), dtype=torch.float64).tolist()
    own_NB = losses_at(corners, losses, alone, ranks, "checkpoints")
    checked = checked_losses("last", direct_B, own_NB[last])
    on_plane = [principal.plane.coefficients(point) for point in principal.points]
    losses_NB = losses_at(corners, losses, on_plane, ranks, "projections")

    points = [
        {
            "name": corner.path.name,
            "path": str(corner.path),
            "fitted": index < len(fitted),
            **principal.points[index]._asdict(),
            "off_plane": principal.off_plane[index],
            "off_plane_share": principal.off_plane_shares[index],
            "checkpoint_loss": float(own_NB[index].mean()),
            **described_losses(losses_NB[index], losses_NB[last]),
        }
        for index, corner in enumerate(corners.corners)
    ]
    longer_side = max(max(along) - min(along) for along in zip(*principal.points, strict=True))
    grid = measured_grid(
        corners, principal.plane, losses, principal.points, longer_side, settings, ranks
    )

    spec = settings.model_dump(mode="json") | {"trajectory": identities, "name": "pca"}
    spec |= sequences.described | {"precision": "fp32", "attention": "sdpa"}
    size = sum(weight.numel() for weight in losses.weights.values())
    return {
        "model": identities[last],
        "spec": spec,
        "measured": {
            "points": points,
            "variance_shares": principal.variance_shares,
            "grid": grid,
            "end": checked,
            "parameters": size,
            "units": UNITS,
        },
        "environment": environment() | {"seconds": time.perf_counter() - clock},
    }
